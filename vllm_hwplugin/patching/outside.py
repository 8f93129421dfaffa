# SPDX-License-Identifier: Apache-2.0
"""Catalogues from outside: folders and packages of others with features of their own.

Such a catalogue is a folder like `patches/` with a `catalogue.toml` at its top. Its features are `catalogue/feature`,
and their gates come from their `patch.toml`. A process imports this only where there is one (docs/your-own-patches.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from .. import gates
from ._catalog import FEATURE_KEYS, Terms, feature_folders, in_order, load_feature, read_toml, refuse_unknown, text_of
from ._errors import CatalogError
from ._model import VLLM, Feature

#: The file that makes a folder a catalogue.
MANIFEST: Final = "catalogue.toml"

#: What the project's own features are called in the requirements of others: `vllm-hwplugin/draft-full-graph`.
OWN: Final = "vllm-hwplugin"

_KEYS: Final = frozenset({"name", "distribution"})
_NAME: Final = re.compile("[a-z0-9]+(-[a-z0-9]+)*")
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
        CatalogError: there is none, or it is not as it has to be.
    """
    file = folder / MANIFEST
    raw = read_toml(file, read, "a folder of patches has one with its `name`")
    refuse_unknown(raw, _KEYS, "", file)
    name = _named(text_of(raw, "name", file), file)
    if name == OWN:
        raise CatalogError(f"{file}: name is {name!r}, which is the plugin's own; choose another")
    return Manifest(folder, name, _distribution({"distribution": VLLM} | raw, file))


def gate_name(catalogue: str, feature: str) -> str:
    """The gate of a feature whose `patch.toml` names none."""
    return gates.CATALOGUE_PREFIX + f"{catalogue}_{feature}".replace("-", "_").upper()


def load_outside(
    folder: Path, *, version: str | None = None, read: Callable[[Path], bytes] = Path.read_bytes
) -> Outside:
    """Read every feature of a catalogue from outside.

    Nothing is imported or run, so the folder need not be trusted.

    Args:
        folder: with a `catalogue.toml` at its top.
        version: keep only the variants for this version of vLLM; see :func:`load_catalog`.
        read: the bytes of a file.

    Raises:
        CatalogError: the folder, `catalogue.toml` or a `patch.toml` is not as it has to be.
        DiffError: a diff is malformed.
    """
    manifest = read_manifest(folder, read=read)
    terms = Terms(manifest.name, FEATURE_KEYS | {"distribution", "default"}, _completing(manifest), read)
    features = [load_feature(item, version, terms) for item in feature_folders(folder, _WAY_OUT)]
    prefix = f"{manifest.name}/"
    required = frozenset(name for item in features for name in item.requires if not name.startswith(prefix))
    return Outside(manifest, in_order(features, folder, required), required, _gates(features, manifest))


def _completing(manifest: Manifest) -> Callable[[Mapping[str, Any], Path], Mapping[str, Any]]:
    def complete(raw: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
        gate = gate_name(manifest.name, _named(file.parent.name, file))
        made: dict[str, Any] = {"gate": gate, "distribution": manifest.distribution, "default": "auto"}
        made |= raw
        made["distribution"] = _distribution(made, file)
        if made["default"] not in gates.SWITCH:
            raise CatalogError(f"{file}: default is {made['default']!r}, expected {', '.join(gates.SWITCH)}")
        if isinstance(requires := raw.get("requires"), list):
            made["requires"] = [_full(manifest.name, item) for item in requires]
        return made

    return complete


def _full(catalogue: str, required: object) -> object:
    """A requirement as the id of a feature; what is no text is for others to refuse."""
    if not isinstance(required, str):
        return required
    return required.removeprefix(f"{OWN}/") if "/" in required else f"{catalogue}/{required}"


def _distribution(raw: Mapping[str, Any], file: Path) -> str:
    # As PEP 503 has it: the index, the metadata and the people who write names differ in case and dashes.
    name = re.sub(r"[-_.]+", "-", text_of(raw, "distribution", file)).lower()
    if name == OWN or not _NAME.fullmatch(name):
        raise CatalogError(f"{file}: distribution is {name!r}, expected that of a package other than the plugin")
    return name


def _named(name: str, file: Path) -> str:
    if not _NAME.fullmatch(name):
        raise CatalogError(f"{file}: the name {name!r} has more than lower case, digits and single dashes; rename it")
    return name


def _gates(features: list[Feature], manifest: Manifest) -> tuple[gates.Gate, ...]:
    users: dict[str, list[Feature]] = {}
    for feature in features:
        users.setdefault(feature.gate, []).append(feature)
    made = []
    for name, of in users.items():
        if len({feature.default for feature in of}) > 1:
            raise CatalogError(
                f"{manifest.folder}: {' and '.join(feature.id for feature in of)} have one gate, {name}, and different "
                "defaults; give them the same"
            )
        try:
            text = f"Feature {', '.join(feature.id for feature in of)}: {of[0].title}"
            made.append(gates.catalogue_gate(name, text, of[0].default))
        except gates.GateError as error:
            raise CatalogError(f"{manifest.folder / of[0].id.rpartition('/')[2] / 'patch.toml'}: {error}") from error
    return tuple(made)
