# SPDX-License-Identifier: Apache-2.0
"""Exact, versioned source patches, applied when a module is imported.

Text in, text out: nothing here imports torch or vLLM. `_diff`, `_apply`, `_catalog`, `_evaluate` and `_plan` are pure;
`_installed`, `_overlay`, `_finder`, `_reapply` and `_runtime` act on this process. docs/architecture.md says how.
"""

from ..versions import SUPPORTED, is_supported
from ._catalog import default_folder, load_catalog
from ._errors import CatalogError, DiffError, PatchingError, UnreadableFile
from ._evaluate import check_conflicts, evaluate
from ._installed import Installed, NotInstalled, VersionUnknown, find_installed
from ._model import (
    VLLM,
    Catalog,
    Conflict,
    Feature,
    FeatureState,
    FeatureVerdict,
    FileDiff,
    Hunk,
    HunkVerdict,
    Nearest,
    NotNeeded,
    PatchedFile,
    Plan,
    Source,
    Status,
    Variant,
    target_name,
)
from ._overlay import FOLDER
from ._plan import make_plan, render_diff
from ._runtime import InstallError, ModuleCheck, current_plan, install, verify

__all__ = [
    "FOLDER",
    "SUPPORTED",
    "VLLM",
    "Catalog",
    "CatalogError",
    "Conflict",
    "DiffError",
    "Feature",
    "FeatureState",
    "FeatureVerdict",
    "FileDiff",
    "Hunk",
    "HunkVerdict",
    "InstallError",
    "Installed",
    "ModuleCheck",
    "Nearest",
    "NotInstalled",
    "NotNeeded",
    "PatchedFile",
    "PatchingError",
    "Plan",
    "Source",
    "Status",
    "UnreadableFile",
    "Variant",
    "VersionUnknown",
    "check_conflicts",
    "current_plan",
    "default_folder",
    "evaluate",
    "find_installed",
    "install",
    "is_supported",
    "load_catalog",
    "make_plan",
    "render_diff",
    "target_name",
    "verify",
]
