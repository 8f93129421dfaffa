# SPDX-License-Identifier: Apache-2.0
"""A catalogue: one folder a feature, with a `patch.toml` and its diffs. docs/how-to-add-a-patch.md shows one.

This reads the project's own; `outside` reads those of others, by the same rules but for what `Terms` says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ..gates import GATES
from ..versions import Versions
from ._diff import parse_diff
from ._errors import CatalogError, DiffError
from ._model import VLLM, Catalog, Feature, FileDiff, NotNeeded, Variant, target_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TEXTS = ("id", "title", "gate", "what", "origin", "removal")
#: What a `patch.toml` of the project's own may hold.
FEATURE_KEYS = frozenset({*_TEXTS, "requires", "not_needed", "variant"})
_TABLE_KEYS = {"variant": frozenset({"versions", "diffs"}), "not_needed": frozenset({"versions", "reason"})}


def _own(raw: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    if not any(gate.name == raw.get("gate") and gate.switches for gate in GATES):
        raise CatalogError(
            f"{file}: gate {raw.get('gate')!r} is not a switch in vllm_hwplugin/gates/table.py; add it there"
        )
    return raw


class Terms:
    """What a feature is read by.

    Attributes:
        catalogue: the name that its id begins with; empty for the project's own catalogue.
        keys: which keys its `patch.toml` may have.
        complete: takes the values of a `patch.toml` and its path, and gives back the values with those that may be left
            out. CatalogError where one is not as it has to be.
        read: the bytes of a file. OSError where it is not there.
    """

    # An ordinary class: each process of vLLM would pay for making a named tuple or a dataclass of it.
    def __init__(
        self,
        catalogue: str = "",
        keys: frozenset[str] = FEATURE_KEYS,
        complete: Callable[[Mapping[str, Any], Path], Mapping[str, Any]] = _own,
        read: Callable[[Path], bytes] = Path.read_bytes,
    ) -> None:
        self.catalogue, self.keys, self.complete, self.read = catalogue, keys, complete, read


def default_folder() -> Path:
    """`patches/` inside the installed package, or beside the package in a source tree."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "patches"
    return inside if inside.is_dir() else package.parent / "patches"


def load_catalog(folder: Path | None = None, *, version: str | None = None) -> Catalog:
    """Read every feature of `folder`.

    Args:
        folder: default: the project's own.
        version: keep only the variants for this version. A process that patches itself has no use for the others. All
            of them are kept of a feature that says nothing of the version.

    Raises:
        CatalogError: a folder or `patch.toml` is not as it has to be.
        DiffError: a diff is malformed.
    """
    folder = default_folder() if folder is None else folder
    return Catalog(in_order([load_feature(item, version, Terms()) for item in feature_folders(folder)], folder))


def feature_folders(folder: Path, way_out: str = "reinstall vllm-hwplugin") -> tuple[Path, ...]:
    """The folders of a catalogue's features, by name. Those that begin with `_` or `.` are none.

    Raises:
        CatalogError: the catalogue's folder cannot be read.
    """
    try:
        return tuple(sorted(item for item in folder.iterdir() if item.is_dir() and item.name[0] not in "_."))
    except OSError as error:
        raise CatalogError(f"{folder}: the folder of patches can't be read ({error}); {way_out}") from error


def read_toml(file: Path, read: Callable[[Path], bytes], missing: str) -> dict[str, Any]:
    """The values of a TOML file.

    Raises:
        CatalogError: it cannot be read (`missing` says what it is for), or is no TOML.
    """
    try:
        values: dict[str, Any] = tomllib.loads(read(file).decode("utf-8"))
    except OSError as error:
        raise CatalogError(f"{file}: can't be read ({error.strerror}); {missing}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CatalogError(f"{file}: not TOML ({error}); see docs/how-to-add-a-patch.md") from error
    return values


def load_feature(folder: Path, version: str | None, terms: Terms) -> Feature:
    """One feature; see `load_catalog`."""
    file = folder / "patch.toml"
    raw = read_toml(file, terms.read, "each folder of patches needs one")
    refuse_unknown(raw, terms.keys, "", file)
    if "id" in raw and raw["id"] != folder.name:
        raise CatalogError(f"{file}: id is {raw['id']!r}, expected the folder's name {folder.name!r}")
    raw = dict(terms.complete(raw, file))
    texts = {key: text_of(raw, key, file) for key in _TEXTS}
    distribution = text_of({"distribution": VLLM} | raw, "distribution", file)
    requires = raw.get("requires", [])
    if not isinstance(requires, list) or not all(isinstance(item, str) for item in requires):
        raise CatalogError(f"{file}: requires is {requires!r}, expected a list of feature ids")
    tables = _tables(raw, "variant", file)
    ranges = [_versions(table, file) for table in tables]
    not_needed = [
        NotNeeded(_versions(table, file), text_of(table, "reason", file)) for table in _tables(raw, "not_needed", file)
    ]
    _refuse_overlap([*ranges, *(item.versions for item in not_needed)], file, distribution, bool(terms.catalogue))
    if terms.catalogue and not tables:
        raise CatalogError(f"{file}: has no [[variant]], so it changes nothing; see docs/how-to-add-a-patch.md")
    if terms.catalogue and (endless := next((item for item in ranges if not item.has_end), None)):
        raise CatalogError(
            f"{file}: the range '{endless}' of a variant has no end, so it would hold releases that nobody has seen; "
            "end it before the first one"
        )
    only = version if distribution == VLLM else None
    wanted = [only is not None and item.covers(only) for item in ranges]
    told = any(wanted) or any(only is not None and item.versions.covers(only) for item in not_needed)
    cache: dict[str, tuple[FileDiff, ...]] = {}

    def diffs(table: Mapping[str, Any]) -> tuple[FileDiff, ...]:
        names = table.get("diffs")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise CatalogError(f"{file}: diffs is {names!r}, expected a list of file names")
        for name in names:
            if name not in cache:
                cache[name] = _read_diff(folder, name, terms, distribution)
        return tuple(item for name in names for item in cache[name])

    variants = [
        Variant(versions, diffs(table))
        for table, versions, used in zip(tables, ranges, wanted, strict=True)
        if used or not told
    ]
    return Feature(
        **(texts | {"id": _joined(terms.catalogue, folder.name)}),
        requires=tuple(requires),
        not_needed=tuple(not_needed),
        variants=tuple(variants),
        distribution=distribution,
        default=raw.get("default", "auto"),
    )


def _joined(catalogue: str, name: str) -> str:
    return f"{catalogue}/{name}" if catalogue else name


def _read_diff(folder: Path, name: str, terms: Terms, distribution: str) -> tuple[FileDiff, ...]:
    origin = _joined(terms.catalogue, f"{folder.name}/{name}")
    try:
        # As bytes: a diff of a file with CRLF lines has to keep them.
        return parse_diff(terms.read(folder / name).decode("utf-8"), origin, distribution)
    except OSError as error:
        raise CatalogError(
            f"{folder / 'patch.toml'}: diff {name!r} can't be read ({error.strerror}); name a file beside it"
        ) from error
    except UnicodeDecodeError as error:
        raise DiffError(f"{origin}: not UTF-8 ({error}); write the diff anew") from error


def text_of(table: Mapping[str, Any], key: str, file: Path) -> str:
    """The text under `key`, without blanks around it; CatalogError where there is none."""
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise CatalogError(f"{file}: {key} is {value!r}, expected a text; see docs/how-to-add-a-patch.md")
    return value.strip()


def _tables(raw: Mapping[str, Any], key: str, file: Path) -> list[dict[str, Any]]:
    tables = raw.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(item, dict) for item in tables):
        raise CatalogError(f"{file}: {key} is {tables!r}, expected [[{key}]] tables")
    for table in tables:
        refuse_unknown(table, _TABLE_KEYS[key], f"[[{key}]]: ", file)
    return tables


def refuse_unknown(table: Mapping[str, Any], known: frozenset[str], where: str, file: Path) -> None:
    """CatalogError where the table has a key that is not known."""
    unknown = sorted(table.keys() - known)
    if unknown:
        raise CatalogError(f"{file}: {where}unknown key {unknown[0]!r}; expected {', '.join(sorted(known))}")


def _versions(table: Mapping[str, Any], file: Path) -> Versions:
    text = text_of(table, "versions", file)
    try:
        return Versions(text)
    except ValueError as error:
        raise CatalogError(f"{file}: versions {text!r} is no PEP 440 specifier, such as '>=0.20.0,<0.22.0'") from error


def _refuse_overlap(ranges: list[Versions], file: Path, distribution: str, outside: bool) -> None:
    taken: dict[str, Versions] = {}
    # What others write may be for versions, and distributions, of which this release knows nothing.
    edges = [version for item in ranges for version in item.edges()] if outside else []
    for item in ranges:
        for version in (*item.supported(), *(edge for edge in edges if item.covers(edge))):
            other = taken.setdefault(version, item)
            if other is not item:
                raise CatalogError(
                    f"{file}: the ranges '{other}' and '{item}' both cover {target_name(distribution)} {version}; make "
                    "one of them narrower"
                )


def in_order(features: list[Feature], folder: Path, known: Collection[str] = ()) -> tuple[Feature, ...]:
    """The features of one catalogue, requirements first.

    Args:
        known: features of the catalogues before it, which may be required.

    Raises:
        CatalogError: a requirement is no feature, or they go in a circle.
    """
    by_id = {feature.id: feature for feature in features}
    ordered: dict[str, Feature] = {}

    def visit(feature: Feature, path: tuple[str, ...]) -> None:
        if feature.id in path:
            raise CatalogError(
                f"{folder}: features require one another in a circle: {' -> '.join([*path, feature.id])}"
            )
        for name in feature.requires:
            if name in known:
                continue
            if name not in by_id:
                file = folder / feature.id.rpartition("/")[2] / "patch.toml"
                raise CatalogError(f"{file}: requires {name!r}, which is no feature here")
            visit(by_id[name], (*path, feature.id))
        ordered.setdefault(feature.id, feature)

    for feature in features:
        visit(feature, ())
    return tuple(ordered.values())
