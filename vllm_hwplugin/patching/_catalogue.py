# SPDX-License-Identifier: Apache-2.0
"""A catalogue: one folder a feature, with a `patch.toml` and its diffs. docs/your-own-patches.md shows one.

This reads the project's own; `outside` reads those of others, by the same rules but for what `Terms` says.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..gates import BY_NAME, Gate, GateError, feature_gate, read
from ..versions import SUPPORTED, Versions, cached, final
from ._diff import parse_diff
from ._errors import CatalogueError, DiffError
from ._model import VLLM, Catalogue, Feature, FileDiff, NotNeeded, target_name
from ._toml import MISSING, read_patch_tomls, read_toml

#: The file that makes a folder of a catalogue a feature.
PATCH = "patch.toml"

_TEXTS = ("id", "title", "gate", "what", "origin", "removal")
#: What a `patch.toml` of any catalogue may hold.
FEATURE_KEYS = frozenset({*_TEXTS, "requires", "versions", "not_needed", "default", "help", "compile_key"})
_OWN_KEYS = FEATURE_KEYS | {"since", "aliases"}
_NOT_NEEDED_KEYS = frozenset({"versions", "reason"})
#: What files of a feature's folder are its diffs.
DIFFS = ".diff"


def _own(raw: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    return raw


class Terms:
    """What a feature is read by.

    Attributes:
        catalogue: the name that its id begins with; empty for the project's own catalogue.
        keys: which keys its `patch.toml` may have.
        complete: takes the values of a `patch.toml` and its path, and gives back the values with those that may be left
            out. CatalogueError where one is not as it has to be.
        read: the bytes of a file. OSError where it is not there.
        parsed: `patch.toml` -> its values, of those that were read before.
        environ: the diffs of features whose gate is off there are not read.
    """

    # An ordinary class: each process of vLLM would pay for making a named tuple or a dataclass of it.
    def __init__(
        self,
        catalogue: str = "",
        keys: frozenset[str] = _OWN_KEYS,
        complete: Callable[[Mapping[str, Any], Path], Mapping[str, Any]] = _own,
        read: Callable[[Path], bytes] = Path.read_bytes,
        parsed: Mapping[Path, Mapping[str, Any]] = MappingProxyType({}),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.catalogue, self.keys, self.complete, self.read = catalogue, keys, complete, read
        self.parsed, self.environ = parsed, environ


def default_folder() -> Path:
    """`patches/` inside the installed package, or beside the package in a source tree."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "patches"
    return inside if inside.is_dir() else package.parent / "patches"


def load_catalogue(
    folder: Path | None = None,
    *,
    version: str | None = None,
    environ: Mapping[str, str] | None = None,
    base: Path | None = None,
) -> Catalogue:
    """Read every feature of `folder`.

    Args:
        folder: default: the project's own.
        version: keep only the hunks for this version. A process that patches itself needs no others. A feature that
            says nothing of the version keeps all of its hunks. Ranges that overlap are then an error only where both
            hold this version.
        environ: a feature whose gate is off there keeps no hunk.
        base: a cache folder that can be trusted, for the values of each `patch.toml`; without one they are parsed.

    Raises:
        CatalogueError: a folder or `patch.toml` is not as it has to be.
        DiffError: a diff is malformed.
    """
    folder = default_folder() if folder is None else folder
    folders = feature_folders(folder)
    parsed = {} if base is None else read_patch_tomls([item / PATCH for item in folders], base)
    terms = Terms(parsed=parsed, environ=environ)
    return Catalogue(in_order([load_feature(item, version, terms) for item in folders], folder))


def feature_folders(folder: Path, way_out: str = "reinstall vllm-hwplugin") -> tuple[Path, ...]:
    """The folders of a catalogue's features, by name. Those that begin with `_` or `.` are none.

    Raises:
        CatalogueError: the catalogue's folder cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            names = sorted(item.name for item in entries if item.name[0] not in "_." and item.is_dir())
    except OSError as error:
        raise CatalogueError(f"{folder}: the folder of patches can't be read ({error}); {way_out}") from error
    return tuple(folder / name for name in names)


def load_feature(folder: Path, version: str | None, terms: Terms) -> Feature:
    """One feature; see `load_catalogue`."""
    file = folder / PATCH
    raw = terms.parsed[file] if file in terms.parsed else read_toml(file, terms.read, MISSING)
    if "variant" in raw:
        raise CatalogueError(
            f"{file}: [[variant]] is not read any more: say `versions` once for the feature, keep one diff for each "
            "file that it changes, and write the versions of a hunk behind its '@@' where it is not for all of these; "
            "see docs/your-own-patches.md"
        )
    refuse_unknown(raw, terms.keys, "", file)
    if "id" in raw and raw["id"] != folder.name:
        raise CatalogueError(f"{file}: id is {raw['id']!r}, expected the folder's name {folder.name!r}")
    raw = dict(terms.complete(raw, file))
    texts = {key: text_of(raw, key, file) for key in _TEXTS}
    distribution = text_of({"distribution": VLLM} | raw, "distribution", file)
    requires = raw.get("requires", [])
    if not isinstance(requires, list) or not all(isinstance(item, str) for item in requires):
        raise CatalogueError(f"{file}: requires is {requires!r}, expected a list of feature ids")
    versions = _versions(raw, file)
    not_needed = [NotNeeded(_versions(table, file), text_of(table, "reason", file)) for table in _not_needed(raw, file)]
    only = version if distribution == VLLM else None
    stated = [versions, *(item.versions for item in not_needed)]
    if terms.catalogue:
        # What others write may be for versions, and distributions, of which this release knows nothing.
        edges = [edge for item in stated for edge in item.edges()]
        _refuse_overlap(stated, (*SUPPORTED, *edges), file, distribution)
    else:
        _refuse_overlap(stated, SUPPORTED if version is None else (version,), file, distribution)
    if terms.catalogue and not versions.has_end:
        raise CatalogueError(
            f"{file}: the range '{versions}' has no end, so it would hold releases that nobody has seen; end it before "
            "the first one"
        )
    wanted = only if only and versions.covers(only) else None
    files: tuple[FileDiff, ...] = ()
    switch = _switch(raw, texts, terms, file)
    if not _is_off(switch, terms.environ) and not (only and any(item.versions.covers(only) for item in not_needed)):
        # Of a candidate the feature as a whole knows which hunks are meant.
        files = _diffs(folder, wanted if wanted and final(wanted) == wanted else None, terms, distribution)
    feature = Feature(
        **(texts | {"id": _joined(terms.catalogue, folder.name)}),
        requires=tuple(requires),
        versions=versions,
        not_needed=tuple(not_needed),
        files=files,
        distribution=distribution,
        switch=switch,
    )
    return feature._replace(files=feature.files_for(wanted)) if wanted else feature


def _switch(raw: Mapping[str, Any], texts: Mapping[str, str], terms: Terms, file: Path) -> Gate:
    name = texts["gate"]
    if not terms.catalogue and name in BY_NAME and BY_NAME[name].switches:
        return BY_NAME[name]
    compile_key, aliases = raw.get("compile_key", True), raw.get("aliases", [])
    if not isinstance(compile_key, bool):
        raise CatalogueError(f"{file}: compile_key is {compile_key!r}, expected true or false")
    if not isinstance(aliases, list) or not all(isinstance(item, str) for item in aliases):
        raise CatalogueError(f"{file}: aliases is {aliases!r}, expected a list of variables")
    try:
        return feature_gate(
            name,
            text_of(raw, "help", file) if "help" in raw else texts["title"],
            text_of(raw, "default", file) if "default" in raw else "auto",
            catalogue=terms.catalogue,
            compile_key=compile_key,
            aliases=aliases,
            since=text_of(raw, "since", file) if "since" in raw else "0.1.0",
        )
    except GateError as error:
        raise CatalogueError(f"{file}: {error}") from error


def _is_off(gate: Gate, environ: Mapping[str, str] | None) -> bool:
    try:
        return environ is not None and read(gate, environ).choice == "off"
    except GateError:
        return False  # for who reads all of them to say


def _diffs(folder: Path, version: str | None, terms: Terms, distribution: str) -> tuple[FileDiff, ...]:
    names = sorted(name for name in os.listdir(folder) if name.endswith(DIFFS) and not name.startswith("."))
    if not names:
        raise CatalogueError(f"{folder}: has no {DIFFS} file, so it changes nothing; see docs/your-own-patches.md")
    return tuple(item for name in names for item in _read_diff(folder, name, version, terms, distribution))


def _joined(catalogue: str, name: str) -> str:
    return f"{catalogue}/{name}" if catalogue else name


def _read_diff(folder: Path, name: str, version: str | None, terms: Terms, distribution: str) -> tuple[FileDiff, ...]:
    origin = _joined(terms.catalogue, f"{folder.name}/{name}")
    try:
        # As bytes: a diff of a file with CRLF lines has to keep them.
        return parse_diff(terms.read(folder / name).decode("utf-8"), origin, distribution, version=version)
    except OSError as error:
        raise CatalogueError(f"{folder / name}: can't be read ({error.strerror}); mend or remove it") from error
    except UnicodeDecodeError as error:
        raise DiffError(f"{origin}: not UTF-8 ({error}); write the diff anew") from error


def text_of(table: Mapping[str, Any], key: str, file: Path) -> str:
    """The text under `key`, without blanks around it; CatalogueError where there is none."""
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise CatalogueError(f"{file}: {key} is {value!r}, expected a text; see docs/your-own-patches.md")
    return value.strip()


def _not_needed(raw: Mapping[str, Any], file: Path) -> list[dict[str, Any]]:
    tables = raw.get("not_needed", [])
    if not isinstance(tables, list) or not all(isinstance(item, dict) for item in tables):
        raise CatalogueError(f"{file}: not_needed is {tables!r}, expected [[not_needed]] tables")
    for table in tables:
        refuse_unknown(table, _NOT_NEEDED_KEYS, "[[not_needed]]: ", file)
    return tables


def refuse_unknown(table: Mapping[str, Any], known: frozenset[str], where: str, file: Path) -> None:
    """CatalogueError where the table has a key that is not known."""
    unknown = sorted(table.keys() - known)
    if unknown:
        raise CatalogueError(f"{file}: {where}unknown key {unknown[0]!r}; expected {', '.join(sorted(known))}")


def _versions(table: Mapping[str, Any], file: Path) -> Versions:
    text = text_of(table, "versions", file)
    try:
        return cached(text)
    except ValueError as error:
        raise CatalogueError(
            f"{file}: versions {text!r} is no PEP 440 specifier, such as '>=0.20.0,<0.22.0'"
        ) from error


def _refuse_overlap(ranges: list[Versions], versions: Iterable[str], file: Path, distribution: str) -> None:
    for version in versions:
        covering = [item for item in ranges if item.covers(version)]
        if len(covering) > 1:
            raise CatalogueError(
                f"{file}: the ranges '{covering[0]}' and '{covering[1]}' both cover {target_name(distribution)} "
                f"{version}; make one of them narrower"
            )


def in_order(features: list[Feature], folder: Path, known: Collection[str] = ()) -> tuple[Feature, ...]:
    """The features of one catalogue, requirements first.

    Args:
        known: features of the catalogues before it, which may be required.

    Raises:
        CatalogueError: a requirement is no feature, or they go in a circle.
    """
    by_id = {feature.id: feature for feature in features}
    ordered: dict[str, Feature] = {}

    def visit(feature: Feature, path: tuple[str, ...]) -> None:
        if feature.id in path:
            raise CatalogueError(
                f"{folder}: features require one another in a circle: {' -> '.join([*path, feature.id])}"
            )
        for name in feature.requires:
            if name in known:
                continue
            if name not in by_id:
                file = folder / feature.id.rpartition("/")[2] / PATCH
                raise CatalogueError(f"{file}: requires {name!r}, which is no feature here")
            visit(by_id[name], (*path, feature.id))
        ordered.setdefault(feature.id, feature)

    for feature in features:
        visit(feature, ())
    return tuple(ordered.values())
