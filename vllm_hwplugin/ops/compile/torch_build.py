# SPDX-License-Identifier: Apache-2.0
"""Facts about the installed PyTorch for a build."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from .spec import KernelUnavailable, ToolchainName


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """A PyTorch.

    Attributes:
        root: the package's folder, with ``include`` and ``lib``.
        cuda: CUDA version of the build; None for other builds.
        musa_root: folder of the package torch_musa; its ``lib`` has the MUSA part of the stable ABI. None without it.
        capabilities: (major, minor) of each visible device.
    """

    version: Version
    root: Path
    cuda: str | None = None
    musa_root: Path | None = None
    capabilities: tuple[tuple[int, int], ...] = ()

    @property
    def toolchain(self) -> ToolchainName | None:
        """The compiler of its libraries; None for a CPU build."""
        if self.musa_root is not None:
            return "mcc"
        return None if self.cuda is None else "nvcc"


def installed(capabilities: tuple[tuple[int, int], ...] | None = None) -> TorchBuild:
    """Return the PyTorch of this environment, after importing it.

    Without known `capabilities` it asks PyTorch, which initialises its GPU part.

    Raises:
        KernelUnavailable: there is none, or it or its torch_musa cannot be imported.
    """
    torch = _import("torch")
    # An installed torch_musa sets both on the torch module.
    has_musa = getattr(torch.version, "musa", None) is not None
    if capabilities is None:
        devices: Any = torch.musa if has_musa else torch.cuda
        capabilities = tuple(devices.get_device_capability(index) for index in range(devices.device_count()))
    return TorchBuild(
        version=Version(torch.__version__),
        root=Path(torch.__file__).parent,
        cuda=torch.version.cuda,
        musa_root=Path(_import("torch_musa").__file__).parent if has_musa else None,
        capabilities=capabilities,
    )


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        # A PyTorch that does not fit its host raises OSError, RuntimeError and others.

        raise KernelUnavailable(f"{name} cannot be imported: {error}; install it") from error
