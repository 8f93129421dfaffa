# SPDX-License-Identifier: Apache-2.0
"""What vLLM and torch_musa need of Triton, and MUSA's builds lack (3.2) or do wrong (3.6). Not run on MUSA hardware.

3.2: from 0.27 on ``vllm.triton_utils`` imports ``triton.experimental.gluon`` and ``triton.language.core._aggregate``,
so no process of vLLM gets further. Only kernels for AMD use what these names hold.

3.6: the names of pointers that share memory are wrong behind a None, and torch_musa's Inductor imports its benchmark
from a module of 3.2. torchada's sources fix both; no release up to 0.1.103 does.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import logging
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, Final

logger = logging.getLogger("vllm.hwplugin")

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
    """Make Triton name the arguments of a launch that share memory."""
    try:
        jit: Any = importlib.import_module("triton.runtime.jit")
        theirs = jit._make_pointer_alias_spec
    except (ImportError, AttributeError):
        return
    # The backend counts only arguments that are no constants, so the answer is 0:1.
    pointer = SimpleNamespace(dtype="fp32", data_ptr=lambda: 4096)
    parameter = SimpleNamespace(is_constexpr=False, annotation_type="", do_not_specialize=False, is_const=False)
    if theirs([parameter] * 3, [None, pointer, pointer]) == "1:2":
        jit._make_pointer_alias_spec = alias_pairs
        logger.info("Triton counts a None among the arguments that share memory; the plugin counts instead")


def alias_pairs(params: Iterable[Any], values: Iterable[Any]) -> str:
    """Name the pairs of a launch's arguments that are the same pointer.

    Args:
        params: Triton's ``KernelParam`` of a kernel.
        values: what the launch passes for each.

    Returns:
        Such as ``0:4,0:5``, where arguments are numbered without those that Triton compiles as constants; empty if no
        pointer is passed twice, or an argument is neither a tensor nor a number.
    """
    places: dict[int, list[int]] = {}
    position = 0
    for param, value in zip(params, values, strict=False):
        # Triton compiles these as constants.
        constant = value is None or (type(value) is int and value == 1 and not param.do_not_specialize)
        if param.is_constexpr or (constant and not param.annotation_type):
            continue
        if hasattr(value, "data_ptr") and hasattr(value, "dtype"):
            places.setdefault(value.data_ptr(), []).append(position)
        elif not isinstance(value, (int, float)):
            return ""
        position += 1
    places.pop(0, None)
    return ",".join(f"{a}:{b}" for positions in places.values() for a, b in itertools.combinations(positions, 2))


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
    if "device_type" in inspect.signature(testing.do_bench).parameters:
        options["device_type"] = "musa"
    result = testing.do_bench(function, **options)
    # Later versions return the number if there is one quantile.
    return [result] if options.get("quantiles") and not isinstance(result, (list, tuple)) else result
