# SPDX-License-Identifier: Apache-2.0
"""Which installed packages bring a catalogue of patches: asked in every process of vLLM, and nearly always none."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import Final

#: `[project.entry-points."vllm_hwplugin.patches"]`: any name, and the package that has the `catalogue.toml`.
GROUP: Final = "vllm_hwplugin.patches"

# Bytes: nearly every such file is read at once.
_READ: Final = 1 << 16


def catalogue_packages() -> tuple[tuple[str, EntryPoint], ...]:
    """Each distribution and entry point of the group, by the distribution's name.

    Only metadata in folders is looked at, as installers leave it; not what lies in archives.
    """
    found: dict[str, Distribution] = {}
    for folder in _folders():
        # The first on the path is the one that Python takes the package from.
        found.setdefault(folder.name.partition("-")[0], Distribution.at(folder))
    return tuple(
        (name, point) for name, each in sorted(found.items()) for point in each.entry_points if point.group == GROUP
    )


def _folders() -> Iterator[Path]:
    # A search through `importlib.metadata` makes an object of each distribution and parses all entry points, which is
    # seen in the time that a process takes to start; and the answer is nearly always no.
    wanted = GROUP.encode()
    for place in dict.fromkeys(entry or "." for entry in sys.path):
        try:
            names = os.listdir(place)
        except OSError:
            continue  # an archive, or what is gone: `import` passes over it as well
        for name in names:
            if name.endswith((".dist-info", ".egg-info")):
                try:
                    text = _bytes(f"{place}/{name}/entry_points.txt")
                except OSError:
                    continue  # most have none
                if wanted in text:
                    yield Path(place, name)


def _bytes(file: str) -> bytes:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(descriptor, _READ)
        while text and len(text) % _READ == 0 and (more := os.read(descriptor, _READ)):
            text += more
        return text
    finally:
        os.close(descriptor)
