# SPDX-License-Identifier: Apache-2.0
"""A Moore Threads host's GPUs and packages, found by importing only ``pymtml``. Not run on MUSA hardware."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from . import versions
from .versions import MusaHost

# Modules that the platform class imports -> the distribution to install.
MUSA_MODULES: Final[Mapping[str, str]] = {
    "torch_musa": "torch_musa",
    "torchada": "torchada",
    "pymtml": "mthreads-ml-py",
}


class Musa(NamedTuple):
    """Distributions that the platform class lacks, the number of GPUs, and why the driver does not answer."""

    missing: tuple[str, ...] = ()
    devices: int = 0
    trouble: str = ""


def probe() -> Musa:
    """Look for Moore Threads GPUs without importing torch."""
    missing = tuple(dist for module, dist in MUSA_MODULES.items() if _folders(module) is None)
    if missing:
        return Musa(missing)
    try:
        from . import _mtml

        return Musa(devices=_mtml.count())
    except Exception as error:
        # OSError: no libmtml.so; MTMLError: the library refuses. Either way no GPU can be used.
        return Musa(trouble=f"{type(error).__name__}: {error}")


def gpus() -> tuple[str, ...]:
    """Return the driver's GPU names, without starting a GPU; ignores ``MUSA_VISIBLE_DEVICES``.

    Raises ModuleNotFoundError without mthreads-ml-py, OSError without a driver, ``MTMLError`` if the driver refuses.
    """
    from . import _mtml

    return tuple(_mtml.name(index) for index in range(_mtml.count()))


def look(vllm: str | None) -> MusaHost:
    """Find what is installed next to this vLLM, by metadata and files."""
    installed = {name: versions.installed(name) for name in versions.DISTRIBUTIONS}
    mate = _folders("mate")
    vendors_mate = any((folder / "mha_interface.py").is_file() for folder in mate) if mate else None
    # Backends in Triton's package, and those that other distributions add.
    triton = {file.parent.name for folder in _folders("triton") or () for file in folder.glob("backends/*/compiler.py")}
    triton.update(point.name for point in importlib.metadata.entry_points(group="triton.backends"))
    try:
        names = gpus()
    except Exception:
        # The row of the platform class reports the error.
        names = ()
    return MusaHost(installed, vllm, vendors_mate, frozenset(triton), names)


def _folders(package: str) -> list[Path] | None:
    """Return a package's folders, a module's file, or None: not there."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:
        # A module that was put into sys.modules by hand.
        return []
    if spec is None:
        return None
    if spec.submodule_search_locations is not None:
        return [Path(folder) for folder in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.origin else []
