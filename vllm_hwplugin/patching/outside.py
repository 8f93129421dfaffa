# SPDX-License-Identifier: Apache-2.0
"""Catalogues from outside: folders and packages of others with features of their own.

Such a catalogue is a folder like `patches/` with a `catalogue.toml` at its top. Its features are `catalogue/feature`,
and their gates come from their `patch.toml`. A process imports this only where there is one (docs/your-own-patches.md).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final, NamedTuple

from .. import cachedir, gates
from ..errors import HwpluginError
from ._catalogue import (
    OWN,
    PATCH,
    Terms,
    distribution_of,
    feature_folders,
    gate_name,
    in_order,
    load_feature,
    plain_name,
    read_toml,
    refuse_unknown,
    text_of,
)
from ._errors import CatalogueError
from ._installed import find_distribution, find_targets, importable
from ._model import VLLM, Catalogue, Feature

__all__ = [
    "ASIDE",
    "FOLDERS",
    "MANIFEST",
    "OWN",
    "Found",
    "Manifest",
    "Outside",
    "Trouble",
    "feature_folders",
    "find_distribution",
    "find_outside",
    "find_targets",
    "gate_name",
    "load_outside",
    "read_manifest",
    "refuse_taken",
]

#: The file that makes a folder a catalogue.
MANIFEST: Final = "catalogue.toml"

#: `[project.entry-points."vllm_hwplugin.patches"]`: any name, and the package that has the `catalogue.toml`.
GROUP: Final = "vllm_hwplugin.patches"

#: The gate that names folders of catalogues.
FOLDERS: Final = "VLLM_HWPLUGIN_PATCHES"

#: While `patches save` swaps two folders, the old one is `.NAME.old`.
ASIDE: Final = ".old"

_KEYS: Final = frozenset({"name", "distribution"})
_WAY_OUT: Final = "name a folder with a catalogue.toml (docs/your-own-patches.md)"


class Manifest(NamedTuple):
    """A `catalogue.toml`.

    Attributes:
        name: lower case, digits and dashes.
        distribution: whose files its features change where their `patch.toml` does not say.
    """

    folder: Path
    name: str
    distribution: str


class Outside(NamedTuple):
    """A catalogue from outside, requirements before those that require them.

    Attributes:
        required: features of other catalogues that its features require.
        gates: one for each variable that its features name.
    """

    manifest: Manifest
    features: tuple[Feature, ...]
    required: frozenset[str]
    gates: tuple[gates.Gate, ...]


def read_manifest(folder: Path, *, read: Callable[[Path], bytes] = Path.read_bytes) -> Manifest:
    """The `catalogue.toml` of a folder.

    Raises:
        CatalogueError: there is none, or it is not as it has to be.
    """
    file = folder / MANIFEST
    raw = read_toml(file, read, "a folder of patches has one with its `name`")
    refuse_unknown(raw, _KEYS, "", file)
    name = plain_name(text_of(raw, "name", file), file)
    if name == OWN:
        raise CatalogueError(f"{file}: name is {name!r}, which is the plugin's own; choose another")
    return Manifest(folder, name, distribution_of({"distribution": VLLM} | raw, file))


def load_outside(folder: Path, *, read: Callable[[Path], bytes] = Path.read_bytes) -> Outside:
    """Read every feature of a catalogue from outside.

    Nothing is imported or run, so the folder need not be trusted.

    Args:
        folder: with a `catalogue.toml` at its top.
        read: the bytes of a file.

    Raises:
        CatalogueError: the folder, `catalogue.toml` or a `patch.toml` is not as it has to be.
        DiffError: a diff is malformed.
    """
    manifest = read_manifest(folder, read=read)
    for aside in (file.parent for file in folder.glob(f".*{ASIDE}/{PATCH}")):
        if not (name := folder / aside.name[1 : -len(ASIDE)]).exists():
            raise CatalogueError(f"{aside}: a command was stopped while it wrote {name.name}; rename it to {name}")
    terms = Terms(manifest.name, manifest.distribution, read)
    features = [load_feature(item, terms) for item in feature_folders(folder, _WAY_OUT)]
    if not features:
        raise CatalogueError(
            f"{folder}: has no feature, which is a folder with a patch.toml; a package names them in its package-data "
            "(docs/your-own-patches.md)"
        )
    prefix = f"{manifest.name}/"
    required = frozenset(name for item in features for name in item.requires if not name.startswith(prefix))
    return Outside(manifest, in_order(features, folder, required), required, _gates(features, manifest))


def _gates(features: list[Feature], manifest: Manifest) -> tuple[gates.Gate, ...]:
    users: dict[str, list[Feature]] = {}
    for feature in features:
        users.setdefault(feature.gate, []).append(feature)
    for name, of in users.items():
        if len({feature.switch.default for feature in of if feature.switch is not None}) > 1:
            raise CatalogueError(
                f"{manifest.folder}: {' and '.join(feature.id for feature in of)} have one gate, {name}, and different "
                "defaults; give them the same"
            )
    return Catalogue(tuple(features)).gates


class Trouble(NamedTuple):
    """A catalogue that is left out: where it was looked for, and why."""

    where: str
    reason: str


class Found(NamedTuple):
    """The catalogues from outside that an environment has, and those that cannot be used."""

    catalogues: tuple[Outside, ...] = ()
    troubles: tuple[Trouble, ...] = ()

    @property
    def gates(self) -> tuple[gates.Gate, ...]:
        return tuple(gate for each in self.catalogues for gate in each.gates)

    def behind(self, own: Catalogue) -> Catalogue:
        """One catalogue of the project's own features and these: of two that conflict, the earlier one is live."""
        return Catalogue((*own.features, *(feature for each in self.catalogues for feature in each.features)))


def find_outside(folders: Sequence[str], own: Catalogue) -> Found:
    """The catalogues in these folders, in their order, then those of installed packages, by name.

    A catalogue is taken as a whole, or left out with a reason. Its features may require those of the project and of the
    catalogues before it.

    Args:
        folders: what ``VLLM_HWPLUGIN_PATCHES`` names.
        own: the project's own features.
    """
    catalogues: list[Outside] = []
    troubles: list[Trouble] = []
    places: list[tuple[str, Callable[[], Path], Callable[[Path], bytes]]] = [
        (folder, functools.partial(cachedir.code_folder, Path(folder)), cachedir.read_code) for folder in folders
    ]
    # A package is not judged by its owner: Python imports the code of whoever can write to it without asking.
    places += [
        (f"package {name}", functools.partial(_package_folder, point), Path.read_bytes)
        for name, point in sorted((point.dist.name if point.dist else "", point) for point in entry_points(group=GROUP))
    ]
    for where, place, read in places:
        try:
            folder = place()
            if any(folder == each.manifest.folder for each in catalogues):
                continue
            loaded = load_outside(folder, read=read)
            refuse_taken(loaded, catalogues, own)
        except FileNotFoundError as error:
            troubles.append(Trouble(where, f"{error.filename} is not there; expected a folder with a catalogue.toml"))
        except (HwpluginError, OSError) as error:
            troubles.append(Trouble(where, str(error)))
        except Exception as error:
            # What its author wrote, and no check here foresaw: still only this catalogue is left out.
            text = f"{type(error).__name__}: {error}"
            troubles.append(Trouble(where, f"it cannot be read ({text}); see docs/your-own-patches.md"))
        else:
            catalogues.append(loaded)
    return Found(tuple(catalogues), tuple(troubles))


def refuse_taken(new: Outside, catalogues: Sequence[Outside], own: Catalogue) -> None:
    """CatalogueError where a catalogue has the name or a gate of one before it, or requires what is no feature.

    Args:
        catalogues: those before it.
        own: the project's own features.
    """
    manifest = new.manifest
    for each in catalogues:
        if each.manifest.name == manifest.name:
            raise CatalogueError(
                f"{manifest.folder}: its name, {manifest.name}, is that of {each.manifest.folder} too; rename one"
            )
        if both := {gate.name for gate in each.gates} & {gate.name for gate in new.gates}:
            raise CatalogueError(
                f"{manifest.folder}: the gate {min(both)} is one of {each.manifest.folder} too; name another `gate` in "
                "patch.toml"
            )
    known = {feature.id for feature in own.features}.union(
        *({item.id for item in each.features} for each in catalogues)
    )
    if missing := new.required - known:
        raise CatalogueError(
            f"{manifest.folder}: requires {min(missing)!r}, which neither the plugin ({OWN}/...) nor a catalogue "
            "before this one has"
        )


def _package_folder(point: EntryPoint) -> Path:
    """The folder of the package that an entry point names, found without importing it."""
    top, *rest = point.value.split(".")
    tried = [place.joinpath(*rest) for place in importable(top)]
    for folder in tried:
        if (folder / MANIFEST).is_file():
            return Path(os.path.realpath(folder))
    where = ", ".join(map(str, tried)) or f"no package {top} that can be imported"
    raise CatalogueError(f"the entry point {point.name} = {point.value!r} leads to no {MANIFEST} (looked in: {where})")
