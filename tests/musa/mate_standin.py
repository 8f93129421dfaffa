# SPDX-License-Identifier: Apache-2.0
"""The stand-in for mate of tests/musa_sim, for tensors of the host, as a module of one test's own."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_FOLDER = str(Path(__file__).parents[1] / "musa_sim")


def mate(calls: list[dict[str, Any]] | None = None) -> ModuleType:
    """The package, imported anew; ``calls`` notes what its functions are called with, each by its name."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "mate"}
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, _FOLDER)
    try:
        module: Any = importlib.import_module("mate")
    finally:
        sys.path.remove(_FOLDER)
        for name in [name for name in sys.modules if name.partition(".")[0] == "mate"]:
            del sys.modules[name]
        sys.modules.update(before)
    module._device.TYPE = "cpu"
    if calls is not None:
        for name in ("flash_attn_varlen_func", "flash_mla_with_kvcache", "get_mla_metadata"):
            setattr(module, name, _noted(getattr(module, name), calls))
    return module  # type: ignore[no-any-return]


def _noted(function: Any, calls: list[dict[str, Any]]) -> Any:
    @functools.wraps(function)
    def noted(**arguments: Any) -> Any:
        calls.append({"function": function.__name__, **arguments})
        return function(**arguments)

    return noted
