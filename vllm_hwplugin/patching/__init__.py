# SPDX-License-Identifier: Apache-2.0
"""Exact, versioned source patches, applied when a module is imported.

Text in, text out: nothing here imports torch or vLLM. `_diff`, `_apply`, `_catalogue`, `_evaluate` and `_plan` are
pure; `_installed`, `_overlay`, `_finder`, `_swap` and `_runtime` act on this process. docs/patching.md says how.

The module `texts` has the parts for tools that read and write patches.
"""

from ._catalogue import OWN, load_catalogue
from ._errors import InstallError, PatchingError
from ._installed import (
    Installed,
    NotInstalled,
    VersionUnknown,
    find_distribution,
    find_installed,
    find_targets,
    find_unneeded,
)
from ._model import VLLM, Catalogue, Feature, PatchedFile
from ._overlay import FOLDER, has_copy
from ._plan import make_plan
from ._runtime import current_plan, force, install
