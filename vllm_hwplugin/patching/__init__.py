# SPDX-License-Identifier: Apache-2.0
"""Exact, versioned source patches, applied when a module is imported.

Text in, text out: nothing here imports torch or vLLM. `_diff`, `_apply`, `_catalogue`, `_evaluate` and `_plan` are
pure; `_installed`, `_overlay`, `_finder`, `_swap` and `_runtime` act on this process. docs/patching.md says how.
"""

from ..versions import SUPPORTED, is_supported
from ._apply import Edit, Text, apply_edits, edits_of, locate, split_lines
from ._catalogue import GROUPS, default_folder, load_catalogue
from ._diff import file_diff, parse_diff, read_sections
from ._errors import CatalogueError, DiffError, InstallError, NotPython, PatchingError, UnreadableFile
from ._evaluate import evaluate, evaluate_as, evaluate_together, last_listed, told_apart, trouble_in
from ._installed import Installed, NotInstalled, VersionUnknown, find_installed
from ._model import (
    VLLM,
    Catalogue,
    Conflict,
    Feature,
    FeatureVerdict,
    FileDiff,
    Hunk,
    HunkVerdict,
    NotNeeded,
    PatchedFile,
    Plan,
    Source,
    Status,
    blob_of,
    target_name,
)
from ._nearest import LONGEST_COMPARED
from ._overlay import FOLDER, has_copy
from ._plan import make_plan, render_diff
from ._runtime import force, install

__all__ = [
    "FOLDER",
    "GROUPS",
    "LONGEST_COMPARED",
    "SUPPORTED",
    "VLLM",
    "Catalogue",
    "CatalogueError",
    "Conflict",
    "DiffError",
    "Edit",
    "Feature",
    "FeatureVerdict",
    "FileDiff",
    "Hunk",
    "HunkVerdict",
    "InstallError",
    "Installed",
    "NotInstalled",
    "NotNeeded",
    "NotPython",
    "PatchedFile",
    "PatchingError",
    "Plan",
    "Source",
    "Status",
    "Text",
    "UnreadableFile",
    "VersionUnknown",
    "apply_edits",
    "blob_of",
    "default_folder",
    "edits_of",
    "evaluate",
    "evaluate_as",
    "evaluate_together",
    "file_diff",
    "find_installed",
    "force",
    "has_copy",
    "install",
    "is_supported",
    "last_listed",
    "load_catalogue",
    "locate",
    "make_plan",
    "parse_diff",
    "read_sections",
    "render_diff",
    "split_lines",
    "target_name",
    "told_apart",
    "trouble_in",
]
