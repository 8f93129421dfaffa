# SPDX-License-Identifier: Apache-2.0
"""Entry points for the engines that are measured, also where the package was never installed.

vLLM finds the plugin's function and its platform class by entry points, which are metadata of an installed
distribution. A source tree that is only on PYTHONPATH has none, and an environment may hold those of an older copy. So
the engine's process gets a folder with the metadata that an installation of this tree would write, made from the tree's
own ``pyproject.toml``, in front of its path: vLLM then loads what it would load for a user, when it would load it.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_hwplugin import __version__
from vllm_hwplugin.errors import HwpluginError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DISTRIBUTION = "vllm-hwplugin"
#: The groups of vLLM that this package has entry points in.
GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")

#: group -> name -> "module:function".
EntryPoints = dict[str, dict[str, str]]

_HOME = Path(__file__).resolve().parents[2]


class NoEntryPoints(HwpluginError):
    """vLLM could not find the plugin: the package is neither installed nor a source tree."""


def installed() -> EntryPoints:
    """What this process's metadata say of this package, by vLLM's groups."""
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: EntryPoints = {}
    for point in distribution.entry_points:
        if point.group in GROUPS:
            found.setdefault(point.group, {})[point.name] = point.value
    return found


def declared(home: Path = _HOME) -> EntryPoints | None:
    """What ``pyproject.toml`` beside the package says, by vLLM's groups; None where the package lies elsewhere."""
    try:
        project = tomllib.loads((home / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (FileNotFoundError, KeyError):
        return None
    if project.get("name") != DISTRIBUTION:
        return None  # an installed copy below somebody else's project
    groups: Mapping[str, Any] = project.get("entry-points", {})
    return {group: dict(groups[group]) for group in GROUPS if group in groups}


def provide(folder: Path) -> Path | None:
    """Write this tree's metadata into ``folder`` where the installed ones do not say the same.

    Args:
        folder: is made; belongs on the path of the processes that shall find the entry points, in front.

    Returns:
        ``folder``, or None where nothing has to be added to the path.

    Raises:
        NoEntryPoints: there is nothing to find and nothing to make it from.
    """
    wanted, found = declared(), installed()
    if wanted is None:
        if not found:
            raise NoEntryPoints(
                f"vLLM cannot find this plugin: {_HOME / 'vllm_hwplugin'} has no entry points in this Python "
                f"({sys.executable}) and no pyproject.toml beside it; expected an installation or a source tree: pip "
                "install the package, or run from a clone of its repository"
            )
        return None
    if wanted == found:
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
