# SPDX-License-Identifier: Apache-2.0
"""Diffs, hunks and verdicts, for tools that read and write patches. No vLLM process imports it."""

from ._apply import Edit, Text, apply_edits, edits_of, locate, split_lines
from ._catalogue import GROUPS, default_folder
from ._diff import file_diff, parse_diff, read_sections
from ._errors import CatalogueError, DiffError, NotPython, UnreadableFile
from ._evaluate import Texts, compiled, conflicts_between, fit, fit_files, known_versions, trouble_in
from ._model import (
    Conflict,
    FeatureVerdict,
    FileDiff,
    Hunk,
    HunkVerdict,
    Nearest,
    NotNeeded,
    Plan,
    Source,
    Status,
    blob_of,
    target_name,
)
from ._plan import patched_files
