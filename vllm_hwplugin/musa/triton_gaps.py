# SPDX-License-Identifier: Apache-2.0
"""What vLLM and torch_musa need of Triton, and MUSA's builds lack (3.2) or do wrong (3.6). Not run on MUSA hardware.

3.2: from 0.27 on ``vllm.triton_utils`` imports names that only kernels for AMD use. 3.6: pointers that share memory are
named wrongly behind a None, and torch_musa's Inductor imports its benchmark from a module of 3.2; torchada's sources
fix both, no release up to 0.1.103 does.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

_EXPERIMENTAL: Final = "triton.experimental"
_NAMES: Final = (_EXPERIMENTAL, f"{_EXPERIMENTAL}.gluon", f"{_EXPERIMENTAL}.gluon.language")
_BENCHMARK: Final = "triton.backends.mtgpu.musa_testing"


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


def fix_aliases() -> None:
    """Leave constants out where Triton numbers arguments that share memory."""
    try:
        jit: Any = importlib.import_module("triton.runtime.jit")
        theirs = jit._make_pointer_alias_spec
    except (ImportError, AttributeError):
        return

    def name_pairs(params: Iterable[Any], values: Iterable[Any]) -> str:
        passed = [pair for pair in zip(params, values, strict=False) if not _is_constant(*pair)]
        # How many arguments the compiler makes of a tuple is not known, so nothing is promised.
        if any(isinstance(value, tuple) for _, value in passed):
            return ""
        return str(theirs([param for param, _ in passed], [value for _, value in passed]))

    jit._make_pointer_alias_spec = name_pairs


def _is_constant(param: Any, value: Any) -> bool:
    """Whether Triton compiles an argument of a launch into the kernel."""
    is_one = type(value) is int and value == 1 and not param.do_not_specialize
    return param.is_constexpr or ((value is None or is_one) and not param.annotation_type)


def give_benchmark() -> None:
    """Give torch_musa's Inductor Triton's benchmark under the name that it imports."""
    try:
        importlib.import_module(_BENCHMARK)
    except ImportError:
        sys.modules[_BENCHMARK] = module = ModuleType(_BENCHMARK)
        module.do_bench = _do_bench  # type: ignore[attr-defined]


def _do_bench(function: Any, **options: Any) -> Any:
    """Time a function; return one time for each quantile, or the mean."""
    testing: Any = importlib.import_module("triton.testing")
    result = testing.do_bench(function, device_type="musa", **options)
    # Later versions return the number if there is one quantile.
    return [result] if options.get("quantiles") and not isinstance(result, (list, tuple)) else result
