# SPDX-License-Identifier: Apache-2.0
"""Records of built libraries, and which library suits a host.

``doctor`` reads them too, so this does not import torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import vllm_hwplugin

from ...base.cachedir import UntrustedFolder, read_private, trusted_folder
from .ahead import PREBUILT
from .ninja import RECORD
from .plan import FORMAT

#: The folder of libraries built at first use, below a cache folder.
FOLDER = "kernels"

# Kind of code, major and minor version, suffix; MUSA's has no suffix, and runs only on its own architecture.
_CODE = re.compile(r"(?:-gencode=arch=compute_\d+[af]?,code=(sm|compute)|--offload-arch=mp)_(\d+)(\d)([af]?)")


@dataclass(frozen=True, slots=True)
class Built:
    """A library and its record (`BuildPlan.record`)."""

    library: Path
    kernel: str
    toolchain: str
    version: str
    torch: str
    sources: str
    arch: tuple[str, ...]
    flags: tuple[str, ...]
    changes_numerics: tuple[str, ...]

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether it holds code for such a device of its toolchain's vendor.

        CUDA needs binary code of the device's generation, or PTX not newer than it. Code for one exact architecture
        (``a``) runs only there; code for a family (``f``) counts only for its first member, MUSA code only for its own
        architecture.
        """
        for kind, major, minor, suffix in (match.groups() for match in map(_CODE.fullmatch, self.arch) if match):
            code = int(major), int(minor)
            later = kind is not None and not suffix and code < capability
            if code == capability or (later and (kind == "compute" or code[0] == capability[0])):
                return True
        return False


def read(folder: Path) -> Built | None:
    """Return the wheel's library in a folder, if whole and current."""
    try:
        return _built(folder, (folder / RECORD).read_bytes())
    except OSError:
        # An unreadable library is built again.
        return None


def read_cached(folder: Path) -> Built | None:
    """Return the library in a cache folder, or raise UntrustedFolder."""
    try:
        folder = trusted_folder(folder)
    except OSError:
        return None
    record = read_private(folder / RECORD)
    return None if record is None else _built(folder, record)


def _built(folder: Path, record: bytes) -> Built | None:
    try:
        entries = json.loads(record)
        library = folder / entries["library"]
        if entries["format"] != FORMAT or library.parent != folder or not library.is_file():
            return None
        if library.stat().st_size != entries["size"]:
            # Loading a truncated library may end the process.
            return None
        result = Built(
            library=library,
            kernel=entries["kernel"],
            toolchain=entries["toolchain"],
            version=entries["version"],
            torch=entries["torch"],
            sources=entries["sources"],
            arch=tuple(entries["arch"]),
            flags=tuple(flag for row in entries["flags"] for flag in row["flags"]),
            changes_numerics=tuple(entries["changes_numerics"]),
        )
        texts = (result.kernel, result.toolchain, result.version, result.torch, result.sources)
        whole = all(isinstance(text, str) for text in chain(texts, result.arch, result.flags, result.changes_numerics))
        return result if whole else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        # Everything in a cache can be built again.
        return None


def prebuilt_folder() -> Path:
    """Return the wheel's folder of libraries, which may not exist."""
    return Path(vllm_hwplugin.__file__).parent / PREBUILT


def read_all(places: Iterable[Path], notes: list[str]) -> Sequence[Built]:
    """Read every library: the wheel's, then the caches' in `places`.

    `notes` gets a line for each folder of a cache that is skipped, with the reason.
    """
    libraries = [read(folder) for folder in sorted(prebuilt_folder().glob("*"))]
    for place in places:
        try:
            folder = trusted_folder(place / FOLDER)
            names = sorted(os.listdir(folder))
        except FileNotFoundError:
            continue
        except (OSError, UntrustedFolder) as error:
            notes.append(f"no kernels are taken from {place}: {error}")
            continue
        for name in names:
            try:
                libraries.append(read_cached(folder / name))
            except UntrustedFolder as error:
                notes.append(f"a kernel is skipped: {error}")
    return [library for library in libraries if library is not None]
