# SPDX-License-Identifier: Apache-2.0
"""Which installed packages bring a catalogue of patches: asked in every process of vLLM, and nearly always none."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from typing import Final

from ..cachedir import read_ordinary
from ._errors import CatalogueError

#: `[project.entry-points."vllm_hwplugin.patches"]`: any name, and the package that has the `catalogue.toml`.
GROUP: Final = "vllm_hwplugin.patches"


def catalogue_packages() -> tuple[tuple[str, EntryPoint | CatalogueError], ...]:
    """Each distribution and entry point of the group, by the distribution's name; an error for what cannot be parsed.

    Only metadata in folders is looked at, as installers leave it; not what lies in archives.
    """
    found: dict[str, Distribution] = {}
    for folder in _folders():
        # The first on the path is the one that Python takes the package from.
        found.setdefault(folder.name.partition("-")[0], Distribution.at(folder))
    return tuple((name, point) for name, each in sorted(found.items()) for point in _points(each))


def _points(distribution: Distribution) -> list[EntryPoint | CatalogueError]:
    try:
        return [point for point in distribution.entry_points if point.group == GROUP]
    except Exception as error:
        # Whatever the parser of this Python meets in it.
        where = distribution.locate_file("")
        return [
            CatalogueError(f"entry_points.txt of a package in {where} cannot be parsed ({error}); install it again")
        ]


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
                    text = read_ordinary(f"{place}/{name}/entry_points.txt")
                except OSError:
                    continue  # most have none
                if wanted in text:
                    yield Path(place, name)
