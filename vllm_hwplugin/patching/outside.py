# SPDX-License-Identifier: Apache-2.0
"""External catalogues: folders and packages with features that are not the project's (docs/your-own-patches.md).

An external catalogue is a folder like `patches/` with a `catalogue.toml` at its top. Its features are named
`catalogue/feature`, and their `patch.toml` declare their switches.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final, NamedTuple

from ..base import cachedir, gates
from ..base.errors import HwpluginError
from ._catalogue import (
    OWN,
    PATCH,
    Terms,
    distribution_of,
    feature_folders,
    in_order,
    load_feature,
    plain_name,
    read_toml,
    refuse_unknown,
    text_of,
)
from ._errors import CatalogueError
from ._installed import importable
from ._model import VLLM, Catalogue, Feature

#: The file that makes a folder a catalogue.
MANIFEST: Final = "catalogue.toml"

#: `[project.entry-points."vllm_hwplugin.patches"]`: any name, and the package that has the `catalogue.toml`.
GROUP: Final = "vllm_hwplugin.patches"

#: The environment variable that names folders of catalogues.
FOLDERS: Final = "VLLM_HWPLUGIN_PATCHES"

#: While `patches save` swaps two folders, the old folder is `.NAME.old`.
ASIDE: Final = ".old"

_KEYS: Final = frozenset({"name", "distribution"})
_WAY_OUT: Final = "name a folder with a catalogue.toml (docs/your-own-patches.md)"


class Manifest(NamedTuple):
    """A `catalogue.toml`.

    Attributes:
        name: lower case, digits and dashes.
        distribution: whose files its features change by default.
    """

    folder: Path
    name: str
    distribution: str


class Outside(NamedTuple):
    """An external catalogue.

    Attributes:
        features: requirements before the features that require them.
        required: features of other catalogues that its features require.
    """

    manifest: Manifest
    features: tuple[Feature, ...]
    required: frozenset[str]
    gates: tuple[gates.Gate, ...]


def read_manifest(folder: Path, *, read: Callable[[Path], bytes] = Path.read_bytes) -> Manifest:
    """Read a folder's `catalogue.toml`, or raise CatalogueError."""
    file = folder / MANIFEST
    raw = read_toml(file, read, "a folder of patches has one with its `name`")
    refuse_unknown(raw, _KEYS, "", file)
    name = plain_name(text_of(raw, "name", file), file)
    if name == OWN:
        raise CatalogueError(f"{file}: name is {name!r}, which is the plugin's own; choose another")
    return Manifest(folder, name, distribution_of({"distribution": VLLM} | raw, file))


def load_outside(folder: Path, *, read: Callable[[Path], bytes] = Path.read_bytes) -> Outside:
    """Read every feature of an external catalogue, or raise as `load_catalogue`.

    Nothing is imported or run, so the folder need not be trusted. `read` returns the bytes of a file.
    """
    manifest = read_manifest(folder, read=read)
    for aside in (file.parent for file in folder.glob(f".*{ASIDE}/{PATCH}")):
        if not (name := folder / aside.name[1 : -len(ASIDE)]).exists():
            raise CatalogueError(f"{aside}: a command was stopped while it wrote {name.name}; rename it to {name}")
    terms = Terms(manifest.name, manifest.distribution, read)
    features = [load_feature(home, terms) for home in feature_folders(folder, _WAY_OUT)]
    if not features:
        raise CatalogueError(
            f"{folder}: has no feature, which is a folder with a patch.toml; a package names them in its package-data "
            "(docs/your-own-patches.md)"
        )
    prefix = f"{manifest.name}/"
    required = frozenset(name for feature in features for name in feature.requires if not name.startswith(prefix))
    return Outside(manifest, in_order(features, folder, required), required, _gates(features, manifest))


def _gates(features: list[Feature], manifest: Manifest) -> tuple[gates.Gate, ...]:
    users: dict[str, list[Feature]] = {}
    for feature in features:
        users.setdefault(feature.gate, []).append(feature)
    for name, of in users.items():
        if len({feature.switch.default for feature in of if feature.switch is not None}) > 1:
            raise CatalogueError(
                f"{manifest.folder}: {' and '.join(feature.id for feature in of)} share the switch {name} and have "
                "different defaults; give them the same"
            )
    return Catalogue(tuple(features)).gates


class Trouble(NamedTuple):
    """A catalogue that is left out: its place, and why."""

    where: str
    reason: str


class Found(NamedTuple):
    """The external catalogues of an environment, and why others cannot be used."""

    catalogues: tuple[Outside, ...] = ()
    troubles: tuple[Trouble, ...] = ()

    @property
    def gates(self) -> tuple[gates.Gate, ...]:
        return tuple(gate for catalogue in self.catalogues for gate in catalogue.gates)

    def behind(self, own: Catalogue) -> Catalogue:
        """Return one catalogue, in which the project's own features come first."""
        external = (feature for catalogue in self.catalogues for feature in catalogue.features)
        return Catalogue((*own.features, *external))


def find_outside(folders: Sequence[str], own: Catalogue) -> Found:
    """Load the catalogues in these folders, then in installed packages, by name.

    A catalogue is loaded as a whole, or left out with a reason. Its features may require features of `own`, the
    project's catalogue, and of the catalogues before it. `folders` is from ``VLLM_HWPLUGIN_PATCHES``.
    """
    catalogues: list[Outside] = []
    troubles: list[Trouble] = []
    places: list[tuple[str, Callable[[], Path], Callable[[Path], bytes]]] = [
        (folder, functools.partial(cachedir.code_folder, Path(folder)), cachedir.read_code) for folder in folders
    ]
    # A package's owner is not checked: Python imports its code without a check.
    places += [
        (f"package {name}", functools.partial(_package_folder, point), Path.read_bytes)
        for name, point in sorted((point.dist.name if point.dist else "", point) for point in entry_points(group=GROUP))
    ]
    for where, place, read in places:
        try:
            folder = place()
            if any(folder == catalogue.manifest.folder for catalogue in catalogues):
                continue
            loaded = load_outside(folder, read=read)
            refuse_taken(loaded, catalogues, own)
        except FileNotFoundError as error:
            troubles.append(Trouble(where, f"{error.filename} is not there; expected a folder with a catalogue.toml"))
        except (HwpluginError, OSError) as error:
            troubles.append(Trouble(where, str(error)))
        except Exception as error:
            # An author's mistake that no check here foresees costs only this catalogue, too.
            text = f"{type(error).__name__}: {error}"
            troubles.append(Trouble(where, f"it cannot be read ({text}); see docs/your-own-patches.md"))
        else:
            catalogues.append(loaded)
    return Found(tuple(catalogues), tuple(troubles))


def refuse_taken(new: Outside, catalogues: Sequence[Outside], own: Catalogue) -> None:
    """Raise CatalogueError for taken names or switches and unknown requirements."""
    manifest = new.manifest
    for earlier in catalogues:
        if earlier.manifest.name == manifest.name:
            raise CatalogueError(
                f"{manifest.folder}: {earlier.manifest.folder} has the name {manifest.name}, too; rename one of them"
            )
        if both := {gate.name for gate in earlier.gates} & {gate.name for gate in new.gates}:
            raise CatalogueError(
                f"{manifest.folder}: {earlier.manifest.folder} has the switch {min(both)}, too; name another `gate` in "
                "patch.toml"
            )
    known = {feature.id for feature in own.features}.union(
        *({feature.id for feature in catalogue.features} for catalogue in catalogues)
    )
    if missing := new.required - known:
        raise CatalogueError(
            f"{manifest.folder}: requires {min(missing)!r}, which neither the plugin ({OWN}/...) nor a catalogue "
            "before this one has"
        )


def _package_folder(point: EntryPoint) -> Path:
    """Find the folder of an entry point's package without importing it."""
    top, *rest = point.value.split(".")
    tried = [place.joinpath(*rest) for place in importable(top)]
    for folder in tried:
        if (folder / MANIFEST).is_file():
            return Path(os.path.realpath(folder))
    where = ", ".join(map(str, tried)) or f"no package {top} that can be imported"
    raise CatalogueError(f"the entry point {point.name} = {point.value!r} leads to no {MANIFEST} (looked in: {where})")
