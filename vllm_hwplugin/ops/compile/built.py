# SPDX-License-Identifier: Apache-2.0
"""Read the records of libraries that were built, and decide which of them suits a host.

``doctor`` reads them too, so nothing here imports torch.
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

from ...cachedir import UntrustedFolder, read_private, trusted_folder
from .ahead import PREBUILT
from .ninja import RECORD
from .plan import FORMAT

#: The folder of libraries that were built at first use, below a cache folder.
FOLDER = "kernels"

_CODE = re.compile(r"-gencode=arch=compute_\d+[af]?,code=(sm|compute)_(\d+)(\d)([af]?)")
_MUSA_CODE = re.compile(r"--offload-arch=mp_(\d+)(\d)")


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

        For CUDA that is binary code of the device's generation, or PTX not newer than it. Code for one exact
        architecture (``a``) runs only there, and code for a family (``f``) counts only for its first member. Code for
        MUSA counts only for its own architecture: the vendor promises no other.
        """
        for flag in self.arch:
            if musa := _MUSA_CODE.fullmatch(flag):
                if (int(musa.group(1)), int(musa.group(2))) == capability:
                    return True
                continue
            match = _CODE.fullmatch(flag)
            if match is None:
                continue
            code = int(match.group(2)), int(match.group(3))
            exact = match.group(4) != ""
            if code == capability:
                return True
            if exact or code > capability:
                continue
            if match.group(1) == "compute" or code[0] == capability[0]:
                return True
        return False


def read(folder: Path) -> Built | None:
    """The library in a folder of the wheel; None where it is not whole, or was built by another release's rules."""
    try:
        return _built(folder, (folder / RECORD).read_bytes())
    except OSError:
        # What cannot be read is built again.
        return None


def read_cached(folder: Path) -> Built | None:
    """The same for a folder in the cache, which may hold only what this user put there.

    Raises:
        UntrustedFolder: another user can change what lies in it.
    """
    try:
        folder = trusted_folder(folder)
    except OSError:
        return None
    record = read_private(folder / RECORD)
    return None if record is None else _built(folder, record)


def _built(folder: Path, record: bytes) -> Built | None:
    try:
        found = json.loads(record)
        library = folder / found["library"]
        if found["format"] != FORMAT or library.parent != folder or not library.is_file():
            return None
        if library.stat().st_size != found["size"]:
            # To load a part of one may end the process.
            return None
        result = Built(
            library=library,
            kernel=found["kernel"],
            toolchain=found["toolchain"],
            version=found["version"],
            torch=found["torch"],
            sources=found["sources"],
            arch=tuple(found["arch"]),
            flags=tuple(flag for item in found["flags"] for flag in item["flags"]),
            changes_numerics=tuple(found["changes_numerics"]),
        )
        texts = (result.kernel, result.toolchain, result.version, result.torch, result.sources)
        whole = all(isinstance(text, str) for text in chain(texts, result.arch, result.flags, result.changes_numerics))
        return result if whole else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        # A cache holds nothing that cannot be made anew.
        return None


def prebuilt_folder() -> Path:
    """Where the wheel carries its libraries; it need not exist."""
    return Path(vllm_hwplugin.__file__).parent / PREBUILT


def read_all(places: Iterable[Path], notes: list[str]) -> Sequence[Built]:
    """Every library: the wheel's, then those in the cache.

    Args:
        places: cache folders.
        notes: gets a line for each folder of the cache that was left out, and why.
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
                notes.append(f"a kernel is left out: {error}")
    return [found for found in libraries if found is not None]
