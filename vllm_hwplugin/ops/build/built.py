# SPDX-License-Identifier: Apache-2.0
"""Read the records of libraries that were built, and decide which of them suits a host.

``doctor`` reads them too, so nothing here imports torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import vllm_hwplugin

from ...cachedir import places
from .ahead import PREBUILT
from .ninja import RECORD
from .plan import FORMAT

#: The folder of libraries that were built at first use, below a cache folder.
FOLDER = "kernels"

_CODE = re.compile(r"-gencode=arch=compute_\d+[af]?,code=(sm|compute)_(\d+)(\d)([af]?)")


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
        """Whether it holds code for such a CUDA device: binary code of its generation, or PTX not newer than it.

        Code for one exact architecture (``a``) runs there alone, code for a family (``f``) is taken for its first
        member alone.
        """
        for flag in self.arch:
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
    """The library in a folder; None where it is not whole, or was built by another release's rules."""
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if found["format"] != FORMAT or not (folder / found["library"]).is_file():
            return None
        return Built(
            library=folder / found["library"],
            kernel=found["kernel"],
            toolchain=found["toolchain"],
            version=found["version"],
            torch=found["torch"],
            sources=found["sources"],
            arch=tuple(found["arch"]),
            flags=tuple(flag for item in found["flags"] for flag in item["flags"]),
            changes_numerics=tuple(found["changes_numerics"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        # What cannot be read is built again: a cache holds nothing that cannot be made anew.
        return None


def prebuilt_folder() -> Path:
    """Where the wheel carries its libraries; it need not exist."""
    return Path(vllm_hwplugin.__file__).parent / PREBUILT


def read_all(environ: Mapping[str, str] | None = None) -> Sequence[Built]:
    """Every library: the wheel's, then those in the cache.

    Raises:
        GateError: the variable of the cache folder has a bad value.
    """
    folders = sorted(prebuilt_folder().glob("*"))
    for place in places(environ):
        folders += sorted((place / FOLDER).glob("*"))
    return [found for folder in folders if (found := read(folder)) is not None]
