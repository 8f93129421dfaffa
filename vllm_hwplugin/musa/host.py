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
    """Whether this is a Moore Threads host.

    Attributes:
        missing: Distributions that the platform class needs and that are not installed.
        devices: Number of GPUs; 0 if a distribution is missing or the driver does not answer.
        trouble: Why the driver does not answer; or empty.
    """

    missing: tuple[str, ...] = ()
    devices: int = 0
    trouble: str = ""


def probe() -> Musa:
    """Look for Moore Threads GPUs without importing torch."""
    missing = tuple(dist for module, dist in MUSA_MODULES.items() if not _importable(module))
    if missing:
        return Musa(missing)
    try:
        from . import _mtml

        return Musa(devices=_mtml.count())
    except Exception as error:
        # OSError: no libmtml.so; MTMLError: the library refuses. Either way no GPU can be used.
        return Musa(trouble=f"{type(error).__name__}: {error}")


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:
        # A module that was put into sys.modules by hand has no spec.
        return True


def gpus() -> tuple[str, ...]:
    """Return the driver's GPU names, without starting a GPU; ignores ``MUSA_VISIBLE_DEVICES``.

    Raises:
        ModuleNotFoundError: mthreads-ml-py is not installed.
        OSError: There is no driver.
        Exception: An ``MTMLError``: the driver refuses.
    """
    from . import _mtml

    return tuple(_mtml.name(index) for index in range(_mtml.count()))


def look(vllm: str | None) -> MusaHost:
    """Find what is installed, by metadata and files.

    Args:
        vllm: vLLM's version; None: not installed.
    """
    installed = {name: versions.installed(name) for name in versions.DISTRIBUTIONS}
    return MusaHost(installed, vllm, _vendors_mate(), _triton_backends(), _gpus())


def _vendors_mate() -> bool | None:
    folders = _folders("mate")
    return any((folder / "mha_interface.py").is_file() for folder in folders) if folders else None


def _triton_backends() -> frozenset[str]:
    """Return the backends in Triton's package, and those that other distributions add."""
    own = {file.parent.name for folder in _folders("triton") for file in folder.glob("backends/*/compiler.py")}
    return frozenset(own.union(point.name for point in importlib.metadata.entry_points(group="triton.backends")))


def _folders(package: str) -> list[Path]:
    """Return the folders of a package, or the file of a module."""
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
        # The row of the platform class reports the error.
        return ()
