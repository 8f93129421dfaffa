# SPDX-License-Identifier: Apache-2.0
"""The features that a command is about, from the plugin and from installed or named catalogues."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from vllm_hwplugin.base import gates
from vllm_hwplugin.base.errors import HwpluginError
from vllm_hwplugin.cli.text import printable
from vllm_hwplugin.patching import OWN, VLLM, Catalogue, Feature, load_catalogue
from vllm_hwplugin.patching.outside import FOLDERS, Outside, Trouble, find_outside, load_outside, refuse_taken


class UnknownCatalogue(HwpluginError):
    """No catalogue has this name, and no folder is one."""


class UnknownFeature(HwpluginError):
    """No feature has this id."""


class Selection(NamedTuple):
    """The features that a command works on.

    Attributes:
        catalogue: All features of a process in this environment, with the chosen ones.
        chosen: The features that the command names.
        troubles: Catalogues that a process would ignore.
    """

    catalogue: Catalogue
    chosen: tuple[Feature, ...]
    troubles: tuple[Trouble, ...] = ()

    def by_distribution(self) -> dict[str, Catalogue]:
        """Return the chosen features by the distribution that they change, vLLM first."""
        names = sorted({feature.distribution for feature in self.chosen}, key=lambda name: (name != VLLM, name))
        return {name: only(self.chosen, name) for name in names}


def only(features: Iterable[Feature], distribution: str) -> Catalogue:
    """Return the features that change a distribution."""
    return Catalogue(tuple(feature for feature in features if feature.distribution == distribution))


def select(own: Catalogue, named: Sequence[str] = ()) -> Selection:
    """Select the features of named catalogues, or all features of this environment.

    Args:
        own: The plugin's features; their catalogue is named `vllm-hwplugin`.
        named: Catalogue names or folders. A folder is read, not run, so it need not be trusted.

    Raises:
        UnknownCatalogue: A name is neither a catalogue nor a folder.
        PatchingError: A named folder is not a valid catalogue.
        GateError: ``VLLM_HWPLUGIN_PATCHES`` has an invalid value.
    """
    outside = find_outside(gates.read(FOLDERS).names, own)
    if not named:
        catalogue = outside.behind(own)
        return Selection(catalogue, catalogue.features, outside.troubles)
    catalogues = list(outside.catalogues)
    chosen: list[Feature] = []
    for name in dict.fromkeys(named):
        if name == OWN:
            chosen += own.features
            continue
        installed = next((catalogue for catalogue in catalogues if catalogue.manifest.name == name), None)
        chosen += (installed or _from_folder(name, catalogues, own)).features
    # A catalogue may be named twice, by its name and by its folder.
    by_id = {feature.id: feature for feature in chosen}
    return Selection(outside._replace(catalogues=tuple(catalogues)).behind(own), tuple(by_id.values()))


def _from_folder(name: str, catalogues: list[Outside], own: Catalogue) -> Outside:
    folder = Path(os.path.realpath(Path(name).expanduser()))
    # An empty name (an unset shell variable) would be the working directory.
    if not name or not folder.is_dir():
        names = ", ".join([OWN, *(catalogue.manifest.name for catalogue in catalogues)])
        raise UnknownCatalogue(f"{name!r} is neither a folder nor a catalogue; expected a folder, or one of {names}")
    for catalogue in catalogues:
        if catalogue.manifest.folder == folder:
            return catalogue
    loaded = load_outside(folder)
    refuse_taken(loaded, catalogues, own)
    catalogues.append(loaded)
    return loaded


def find_feature(catalogue: Catalogue, name: str) -> Feature:
    """Return the feature with this id; raise UnknownFeature with all ids."""
    for feature in catalogue.features:
        if feature.id == name:
            return feature
    known = ", ".join(feature.id for feature in catalogue.features) or "none"
    raise UnknownFeature(f"unknown feature {name}; expected one of {known}")


def condition_of(feature: Feature) -> str:
    """Return where a feature may run, besides versions; empty: anywhere."""
    platform = [f"on platform {' or '.join(feature.platforms)}"] if feature.platforms else []
    return ", ".join([*platform, *([f"with {feature.companion}"] if feature.companion else [])])


def say_troubles(selection: Selection) -> None:
    """Print an error for each catalogue that cannot be used."""
    for trouble in selection.troubles:
        print(f"error: the patches of {trouble.where} are ignored: {printable(trouble.reason)}", file=sys.stderr)


def all_features() -> Catalogue:
    """Return the features of all catalogues; print which catalogues are missing."""
    selection = select(load_catalogue())
    say_troubles(selection)
    return selection.catalogue
