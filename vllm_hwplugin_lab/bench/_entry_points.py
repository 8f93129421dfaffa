# SPDX-License-Identifier: Apache-2.0
"""Entry points for measured engines, even if the package is not installed.

vLLM finds the plugin's function and platform class by entry points, which are metadata of an installed distribution. A
source tree on PYTHONPATH has none, and the environment may have an older copy's. So the engine's process gets a folder
with this tree's metadata, made from its ``pyproject.toml``, at the front of its path. vLLM then loads the plugin as for
a user.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_hwplugin import __version__
from vllm_hwplugin.base.errors import HwpluginError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DISTRIBUTION = "vllm-hwplugin"
#: vLLM's groups in which this package has entry points.
GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")

#: group -> name -> "module:function".
EntryPoints = dict[str, dict[str, str]]

_HOME = Path(__file__).resolve().parents[2]


class NoEntryPoints(HwpluginError):
    """vLLM cannot find the plugin: the package is neither installed nor a source tree."""


def installed() -> EntryPoints:
    """Return this process's entry points of this package, by group."""
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return {}
    groups: EntryPoints = {}
    for point in distribution.entry_points:
        if point.group in GROUPS:
            groups.setdefault(point.group, {})[point.name] = point.value
    return groups


def declared(home: Path = _HOME) -> EntryPoints | None:
    """Return the entry points in ``pyproject.toml``, or None.

    None: the package is not in a source tree.
    """
    try:
        project = tomllib.loads((home / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (FileNotFoundError, KeyError):
        return None
    if project.get("name") != DISTRIBUTION:
        return None  # an installed copy inside another project
    groups: Mapping[str, Any] = project.get("entry-points", {})
    return {group: dict(groups[group]) for group in GROUPS if group in groups}


def provide(folder: Path) -> Path | None:
    """Write this tree's metadata unless the installed metadata are equal.

    Args:
        folder: Created; belongs at the front of the path of processes that need the entry points.

    Returns:
        ``folder``; None: the path needs no addition.

    Raises:
        NoEntryPoints: There are no metadata, and no source tree to make them from.
    """
    wanted, existing = declared(), installed()
    if wanted is None:
        if not existing:
            raise NoEntryPoints(
                f"vLLM cannot find this plugin: {_HOME / 'vllm_hwplugin'} has no entry points in this Python "
                f"({sys.executable}) and no pyproject.toml next to it; expected an installation or a source tree: pip "
                "install the package, or run from a clone of its repository"
            )
        return None
    if wanted == existing:
        return None
    metadata = folder / f"{DISTRIBUTION.replace('-', '_')}-{__version__}.dist-info"
    metadata.mkdir(parents=True)
    head = f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {__version__}\n"
    (metadata / "METADATA").write_text(head, encoding="utf-8")
    lines = [line for group, points in wanted.items() for line in _section(group, points)]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _section(group: str, points: Mapping[str, str]) -> list[str]:
    return [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
