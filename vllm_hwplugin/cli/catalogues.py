# SPDX-License-Identifier: Apache-2.0
"""Which features a command is about: the plugin's own, those of catalogues from outside, or some of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from .. import gates
from ..errors import HwpluginError
from ..patching import VLLM, Catalogue, Feature, load_catalogue
from ..patching.outside import FOLDERS, OWN, Outside, Trouble, find_outside, load_outside, refuse_taken
from .text import printable


class UnknownCatalogue(HwpluginError):
    """No catalogue has this name, and no folder is one."""


class UnknownFeature(HwpluginError):
    """No feature has this id."""


class Selection(NamedTuple):
    """
    Attributes:
        catalogue: every feature that a process of this environment has, the chosen ones included.
        chosen: those that were asked for.
        troubles: catalogues that a process would leave out.
    """

    catalogue: Catalogue
    chosen: tuple[Feature, ...]
    troubles: tuple[Trouble, ...] = ()

    def by_distribution(self) -> dict[str, Catalogue]:
        """The chosen features by what they change, vLLM first."""
        names = sorted({feature.distribution for feature in self.chosen}, key=lambda name: (name != VLLM, name))
        return {name: only(self.chosen, name) for name in names}


def only(features: Iterable[Feature], distribution: str) -> Catalogue:
    """The features that change a distribution."""
    return Catalogue(tuple(feature for feature in features if feature.distribution == distribution))


def select(own: Catalogue, named: Sequence[str] = ()) -> Selection:
    """The features of the catalogues that are named; by default of all that a process of this environment has.

    Args:
        own: the plugin's features, which are called `vllm-hwplugin`.
        named: names of catalogues, or folders of others. Those are read, not run, so they need not be trusted.

    Raises:
        UnknownCatalogue: a name is neither.
        PatchingError: a folder that is named is not as a catalogue has to be.
        GateError: ``VLLM_HWPLUGIN_PATCHES`` has a bad value.
    """
    found = find_outside(gates.read(FOLDERS).names, own)
    if not named:
        catalogue = found.behind(own)
        return Selection(catalogue, catalogue.features, found.troubles)
    catalogues = list(found.catalogues)
    chosen: list[Feature] = []
    for name in dict.fromkeys(named):
        if name == OWN:
            chosen += own.features
            continue
        known = next((each for each in catalogues if each.manifest.name == name), None)
        chosen += (known or _from_folder(name, catalogues, own)).features
    # A catalogue may be named twice, by its name and by its folder.
    each = {feature.id: feature for feature in chosen}
    return Selection(found._replace(catalogues=tuple(catalogues)).behind(own), tuple(each.values()))


def _from_folder(name: str, catalogues: list[Outside], own: Catalogue) -> Outside:
    folder = Path(os.path.realpath(Path(name).expanduser()))
    # An empty name, as of a variable that is not set, would be the working directory.
    if not name or not folder.is_dir():
        names = ", ".join([OWN, *(each.manifest.name for each in catalogues)])
        raise UnknownCatalogue(f"{name!r}: no folder, and no catalogue of this name; there are: {names}")
    for each in catalogues:
        if each.manifest.folder == folder:
            return each
    loaded = load_outside(folder)
    refuse_taken(loaded, catalogues, own)
    catalogues.append(loaded)
    return loaded


def find_feature(catalogue: Catalogue, name: str) -> Feature:
    """The feature of that id.

    Raises:
        UnknownFeature: there is none; the message lists those that there are.
    """
    for feature in catalogue.features:
        if feature.id == name:
            return feature
    known = ", ".join(feature.id for feature in catalogue.features) or "none"
    raise UnknownFeature(f"{name}: no such feature; there are: {known}")


def say_troubles(selection: Selection) -> None:
    """The catalogues whose patches could not be looked at."""
    for trouble in selection.troubles:
        print(f"error: the patches of {trouble.where} are left out: {printable(trouble.reason)}", file=sys.stderr)


def all_features() -> Catalogue:
    """The features of all catalogues; what is wrong with one of these may be why the wanted feature is not there."""
    selection = select(load_catalogue())
    say_troubles(selection)
    return selection.catalogue
