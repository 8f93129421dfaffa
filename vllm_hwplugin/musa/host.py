# SPDX-License-Identifier: Apache-2.0
"""What a Moore Threads host has: its GPUs, and the packages in :mod:`.versions`; only ``pymtml`` is imported.

Not run on MUSA hardware.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from . import versions
from .versions import MusaHost

# What the MUSA class imports, as module -> the distribution to install.
MUSA_MODULES: Final[Mapping[str, str]] = {
    "torch_musa": "torch_musa",
    "torchada": "torchada",
    "pymtml": "mthreads-ml-py",
}


class Musa(NamedTuple):
    """What speaks for a Moore Threads host.

    ``missing`` names the distributions that the platform class needs and that are not installed. ``devices`` is 0 if
    there are any, or if the driver does not answer; ``trouble`` then says why.
    """

    missing: tuple[str, ...] = ()
    devices: int = 0
    trouble: str = ""


def probe() -> Musa:
    """Look for Moore Threads GPUs without importing torch: installed packages, then the driver through ``pymtml``."""
    missing = tuple(dist for module, dist in MUSA_MODULES.items() if not _importable(module))
    if missing:
        return Musa(missing)
    try:
        from . import _mtml

        return Musa(devices=_mtml.count())
    except Exception as error:
        # OSError without the driver's libmtml.so, MTMLError where it refuses; either way no GPU can be used.
        return Musa(trouble=f"{type(error).__name__}: {error}")


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:
        # A module that was put into sys.modules by hand has no spec, and is there.
        return True


def gpus() -> tuple[str, ...]:
    """The names of the driver's GPUs, whatever ``MUSA_VISIBLE_DEVICES`` says; none of them is started.

    Raises:
        ModuleNotFoundError: mthreads-ml-py is not installed.
        OSError: there is no driver.
        Exception: an ``MTMLError``, where the driver refuses.
    """
    from . import _mtml

    return tuple(_mtml.name(index) for index in range(_mtml.count()))


def look(vllm: str | None) -> MusaHost:
    """What is installed, by metadata and files.

    Args:
        vllm: its version.
    """
    found = {name: versions.installed(name) for name in versions.DISTRIBUTIONS}
    return MusaHost(found, vllm, _vendors_mate(), _triton_backends(), _gpus())


def _vendors_mate() -> bool | None:
    folders = _folders("mate")
    return any((folder / "mha_interface.py").is_file() for folder in folders) if folders else None


def _triton_backends() -> frozenset[str]:
    """Those in its package, and those that other distributions add to it."""
    own = {file.parent.name for folder in _folders("triton") for file in folder.glob("backends/*/compiler.py")}
    return frozenset(own.union(point.name for point in importlib.metadata.entry_points(group="triton.backends")))


def _folders(package: str) -> list[Path]:
    """The folders of a package that could be imported, or the file's own where it is a single module."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:
        # A module that was put into sys.modules by hand.
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(folder) for folder in spec.submodule_search_locations]
    return [Path(spec.origin)] if spec.origin else []


def _gpus() -> tuple[str, ...]:
    try:
        return gpus()
    except Exception:
        # Of any kind, without the driver or the package; the line of the platform class says which.
        return ()
