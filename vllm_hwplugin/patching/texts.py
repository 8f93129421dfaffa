# SPDX-License-Identifier: Apache-2.0
"""Diffs, hunks and verdicts, for tools that read and write patches. No vLLM process imports it."""

from ._apply import Edit, Text, apply_edits, edits_of, locate, split_lines
from ._catalogue import GROUPS, default_folder
from ._diff import file_diff, parse_diff, read_sections
from ._errors import CatalogueError, DiffError, NotPython, UnreadableFile
from ._evaluate import evaluate, evaluate_as, evaluate_together, last_listed, told_apart, trouble_in
from ._model import (
    Conflict,
    FeatureVerdict,
    FileDiff,
    Hunk,
    HunkVerdict,
    NotNeeded,
    Plan,
    Source,
    Status,
    blob_of,
    target_name,
)
from ._nearest import LONGEST_COMPARED
from ._plan import render_diff
