# SPDX-License-Identifier: Apache-2.0
"""Names that vLLM imports from Triton wherever there is a Triton, and that MUSA's Triton 3.2 lacks.

From 0.27 on ``vllm.triton_utils`` imports ``triton.experimental.gluon`` and ``triton.language.core._aggregate``, so
with Triton 3.2 no process of vLLM gets further. Only kernels for AMD use what these names hold. Not run on MUSA
hardware.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

_EXPERIMENTAL: Final = "triton.experimental"
_NAMES: Final = (_EXPERIMENTAL, f"{_EXPERIMENTAL}.gluon", f"{_EXPERIMENTAL}.gluon.language")


class _Placeholders(MetaPathFinder, Loader):
    """Gives empty modules; as the last finder it is asked only for what Triton lacks."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self, is_package=True) if name in _NAMES else None

    def exec_module(self, module: ModuleType) -> None:
        core: Any = sys.modules.get("triton.language.core")
        if core is not None and not hasattr(core, "_aggregate"):
            core._aggregate = _refuse


def _refuse(*_: object) -> None:
    raise NotImplementedError("this Triton has no _aggregate, which vLLM's kernels for AMD need")


def install() -> None:
    """Let this process import vLLM with a Triton before 3.4."""
    if not any(isinstance(finder, _Placeholders) for finder in sys.meta_path):
        sys.meta_path.append(_Placeholders())
