# SPDX-License-Identifier: Apache-2.0
"""The catalogue: one folder a feature, with a `patch.toml` and its diffs. docs/how-to-add-a-patch.md shows one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..gates import GATES
from ..versions import Versions
from ._diff import parse_diff
from ._errors import CatalogError, DiffError
from ._model import Catalog, Feature, FileDiff, NotNeeded, Variant

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TEXTS = ("id", "title", "gate", "what", "origin", "removal")
_KEYS = frozenset({*_TEXTS, "requires", "not_needed", "variant"})
_TABLE_KEYS = {"variant": frozenset({"versions", "diffs"}), "not_needed": frozenset({"versions", "reason"})}


def default_folder() -> Path:
    """`patches/` inside the installed package, or beside the package in a source tree."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "patches"
    return inside if inside.is_dir() else package.parent / "patches"


def load_catalog(folder: Path | None = None, *, version: str | None = None) -> Catalog:
    """Read every feature of `folder`.

    Args:
        folder: default: the project's own.
        version: keep only the variants for this version. A process that patches itself has no use for the others; a
            version that no variant of a feature covers gets all of them.

    Raises:
        CatalogError: a folder or `patch.toml` is not as it has to be.
        DiffError: a diff is malformed.
    """
    folder = default_folder() if folder is None else folder
    try:
        names = sorted(item.name for item in folder.iterdir() if item.is_dir() and not item.name.startswith(("_", ".")))
    except OSError as error:
        raise CatalogError(
            f"{folder}: the folder of patches can't be read ({error}); reinstall vllm-hwplugin"
        ) from error
    return Catalog(_in_order([_load_feature(folder / name, version) for name in names], folder))


def _load_feature(folder: Path, version: str | None) -> Feature:
    file = folder / "patch.toml"
    try:
        raw = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CatalogError(f"{file}: can't be read ({error.strerror}); each folder of patches needs one") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CatalogError(f"{file}: not TOML ({error}); see docs/how-to-add-a-patch.md") from error
    _refuse_unknown(raw, _KEYS, "", file)
    texts = {key: _text(raw, key, file) for key in _TEXTS}
    if raw["id"] != folder.name:
        raise CatalogError(f"{file}: id is {raw['id']!r}, expected the folder's name {folder.name!r}")
    if not any(gate.name == raw["gate"] and gate.kind == "switch" for gate in GATES):
        raise CatalogError(
            f"{file}: gate {raw['gate']!r} is not a switch in vllm_hwplugin/gates/table.py; add it there"
        )
    requires = raw.get("requires", [])
    if not isinstance(requires, list) or not all(isinstance(item, str) for item in requires):
        raise CatalogError(f"{file}: requires is {requires!r}, expected a list of feature ids")
    tables = _tables(raw, "variant", file)
    ranges = [_versions(table, file) for table in tables]
    not_needed = [
        NotNeeded(_versions(table, file), _text(table, "reason", file)) for table in _tables(raw, "not_needed", file)
    ]
    _refuse_overlap([*ranges, *(item.versions for item in not_needed)], file)
    wanted = [version is not None and item.covers(version) for item in ranges]
    cache: dict[str, tuple[FileDiff, ...]] = {}
    variants = [
        Variant(versions, _diffs(table, folder, file, cache))
        for table, versions, used in zip(tables, ranges, wanted, strict=True)
        if used or not any(wanted)
    ]
    return Feature(
        **texts,
        requires=tuple(requires),
        not_needed=tuple(not_needed),
        variants=tuple(variants),
    )


def _text(table: Mapping[str, Any], key: str, file: Path) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise CatalogError(f"{file}: {key} is {value!r}, expected a text; see docs/how-to-add-a-patch.md")
    return value.strip()


def _tables(raw: Mapping[str, Any], key: str, file: Path) -> list[dict[str, Any]]:
    tables = raw.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(item, dict) for item in tables):
        raise CatalogError(f"{file}: {key} is {tables!r}, expected [[{key}]] tables")
    for table in tables:
        _refuse_unknown(table, _TABLE_KEYS[key], f"[[{key}]]: ", file)
    return tables


def _refuse_unknown(table: Mapping[str, Any], known: frozenset[str], where: str, file: Path) -> None:
    unknown = sorted(table.keys() - known)
    if unknown:
        raise CatalogError(f"{file}: {where}unknown key {unknown[0]!r}; expected {', '.join(sorted(known))}")


def _versions(table: Mapping[str, Any], file: Path) -> Versions:
    text = _text(table, "versions", file)
    try:
        return Versions(text)
    except ValueError as error:
        raise CatalogError(f"{file}: versions {text!r} is no PEP 440 specifier, such as '>=0.20.0,<0.22.0'") from error


def _refuse_overlap(ranges: Iterable[Versions], file: Path) -> None:
    taken: dict[str, Versions] = {}
    for item in ranges:
        for version in item.supported():
            if version in taken:
                raise CatalogError(
                    f"{file}: the ranges '{taken[version]}' and '{item}' both cover vLLM {version}; make one of them "
                    "narrower"
                )
            taken[version] = item


def _diffs(
    table: Mapping[str, Any], folder: Path, file: Path, cache: dict[str, tuple[FileDiff, ...]]
) -> tuple[FileDiff, ...]:
    names = table.get("diffs")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise CatalogError(f"{file}: diffs is {names!r}, expected a list of file names")
    for name in names:
        if name in cache:
            continue
        try:
            # newline="": a diff of a file with CRLF lines has to keep them.
            with (folder / name).open(encoding="utf-8", newline="") as stream:
                cache[name] = parse_diff(stream.read(), f"{folder.name}/{name}")
        except OSError as error:
            raise CatalogError(
                f"{file}: diff {name!r} can't be read ({error.strerror}); name a file beside it"
            ) from error
        except UnicodeDecodeError as error:
            raise DiffError(f"{folder.name}/{name}: not UTF-8 ({error}); write the diff anew") from error
    return tuple(item for name in names for item in cache[name])


def _in_order(features: list[Feature], folder: Path) -> tuple[Feature, ...]:
    by_id = {feature.id: feature for feature in features}
    ordered: dict[str, Feature] = {}

    def visit(feature: Feature, path: tuple[str, ...]) -> None:
        if feature.id in path:
            raise CatalogError(
                f"{folder}: features require one another in a circle: {' -> '.join([*path, feature.id])}"
            )
        for name in feature.requires:
            if name not in by_id:
                raise CatalogError(f"{folder / feature.id / 'patch.toml'}: requires {name!r}, which is no feature here")
            visit(by_id[name], (*path, feature.id))
        ordered.setdefault(feature.id, feature)

    for feature in features:
        visit(feature, ())
    return tuple(ordered.values())
