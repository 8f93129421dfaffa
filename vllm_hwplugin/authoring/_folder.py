# SPDX-License-Identifier: Apache-2.0
"""The folder of a feature: written whole, or given variants that it did not have."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from packaging.version import Version

from ..errors import HwpluginError
from ..patching import VLLM, Catalog, Feature, FileDiff, load_catalog, outside
from ..versions import Versions
from ._errors import FeatureFolderError
from ._variants import MadeVariant, ranges, render

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FEATURE: Final = "patch.toml"
_TABLE: Final = re.compile(r"^\[\[", re.MULTILINE)
_HAS_IT: Final = "this vLLM has the change already"


class About(NamedTuple):
    """The texts of a feature's `patch.toml`. `gate` is None where the catalogue's name and the feature's make it."""

    title: str
    what: str
    origin: str
    removal: str
    gate: str | None = None


class _Table(NamedTuple):
    """A `[[variant]]` of a `patch.toml`."""

    versions: str
    diffs: tuple[str, ...]


def slug(text: str) -> str:
    """A name for a folder: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def read_catalogue(folder: Path) -> Catalog:
    """The features of a folder of patches: the project's own, or one with a `catalogue.toml`.

    Raises:
        CatalogError, DiffError: it is not as it has to be.
    """
    if (folder / outside.MANIFEST).is_file() or not any(folder.glob(f"*/{FEATURE}")):
        return Catalog(outside.load_outside(folder).features)
    return load_catalog(folder)


def read_feature(folder: Path) -> Feature:
    """The feature of a folder.

    Raises:
        FeatureFolderError: it is none.
        CatalogError, DiffError: the catalogue around it is not as it has to be.
    """
    if not (folder / FEATURE).is_file():
        raise FeatureFolderError(f"{folder}: no feature (there is no {FEATURE} in it); name the folder of one")
    name = folder.resolve().name
    found = next(item for item in read_catalogue(folder.resolve().parent).features if item.id.split("/")[-1] == name)
    refuse_others(found.distribution, folder)
    return found


def refuse_others(distribution: str, folder: Path) -> None:
    """Raise FeatureFolderError for what changes another distribution, whose versions are not at hand."""
    if distribution != VLLM:
        raise FeatureFolderError(
            f"{folder}: changes {distribution}, and only vLLM's versions are read here; make its diffs by hand "
            "(docs/how-to-add-a-patch.md)"
        )


def check_catalogue(folder: Path, *, gate: str | None) -> None:
    """Whether a new feature can go there. A folder that is not there, or empty, becomes a catalogue with its first one.

    Raises:
        FeatureFolderError: a folder is there that is no catalogue, or one whose features need a gate that is not given.
        CatalogError: its `catalogue.toml` is not as it has to be.
    """
    if (folder / outside.MANIFEST).is_file():
        refuse_others(outside.read_manifest(folder).distribution, folder)
    elif not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        if not slug(folder.resolve().name):
            raise FeatureFolderError(f"{folder}: its name has no letter or digit; name another folder")
    elif not folder.is_dir() or not any(folder.glob(f"*/{FEATURE}")):
        raise FeatureFolderError(
            f"{folder}: no catalogue (there is no {outside.MANIFEST} in it); name one, or a new folder"
        )
    elif gate is None:
        raise FeatureFolderError(
            f"{folder}: without {outside.MANIFEST} each feature names a gate of vllm_hwplugin/gates/table.py: add one "
            "there and name it with --gate"
        )


def new_folder(catalogue: Path, name: str) -> Path:
    """Where a new feature goes.

    Raises:
        FeatureFolderError: the name is no good, or taken.
    """
    if not name or slug(name) != name:
        better = slug(name) or "NAME"
        raise FeatureFolderError(f"{name!r}: a feature's name has small letters, digits and hyphens; use --id {better}")
    folder = catalogue / name
    if folder.exists():
        raise FeatureFolderError(f"{folder}: is there already; remove it, or use another name (--id)")
    return folder


def create(
    folder: Path,
    about: About,
    variants: Sequence[MadeVariant],
    diffs: Mapping[str, FileDiff],
    upstream: Iterable[str] = (),
) -> None:
    """Write a new feature, with its catalogue where there is none.

    Args:
        upstream: the versions that have the change already.

    Raises:
        FeatureFolderError: it cannot be written.
        CatalogError: it would not be read as it was written (a gate that is none); nothing is left of it.
    """
    lines = [f"id = {_basic(folder.name)}", f"title = {_basic(about.title)}"]
    if about.gate is not None:
        lines.append(f"gate = {_basic(about.gate)}")
    lines.append(f"what = {_long(about.what)}")
    lines += [f"origin = {_basic(about.origin)}", f"removal = {_basic(about.removal)}", "requires = []", ""]
    gaps = [{"versions": text, "reason": _HAS_IT} for text, _ in ranges(upstream)]
    tables = [_Table(item.versions, item.diffs) for item in variants]
    catalogue = folder.parent
    if not catalogue.exists() or not any(catalogue.iterdir()):
        _write(catalogue / outside.MANIFEST, f"name = {json.dumps(slug(catalogue.resolve().name))}\n")
    for name, diff in diffs.items():
        _write(folder / name, render(diff))
    _write(folder / FEATURE, "\n".join(lines) + "\n" + _tables(gaps, tables))
    try:
        read_feature(folder)
    except HwpluginError:
        shutil.rmtree(folder)
        raise


def add_variants(
    folder: Path, variants: Sequence[MadeVariant], diffs: Mapping[str, FileDiff]
) -> tuple[dict[str, str], list[str]]:
    """Give a feature's versions other diffs; the ranges that held them until now lose them.

    What stands above the first table of `patch.toml` stays as it is.

    Returns:
        The file name that each diff got, and the feature's diffs that no variant uses any more, which are left where
        they are.

    Raises:
        FeatureFolderError: `patch.toml` is not as it has to be, or cannot be written.
        CatalogError: it would not be read as it was written; it is as before then.
    """
    file = folder / FEATURE
    head, raw = _read(file)
    taken = {version for item in variants for version in item.members}
    kept = [table for old in _variants_of(raw, file) for table in _without(old, taken)]
    gaps = [gap for old in raw.get("not_needed", []) for gap in _gaps_without(old, taken)]
    used = {name for table in kept for name in table.diffs}
    names = {name: _free(folder, name, used, render(diff)) for name, diff in diffs.items()}
    made = [_Table(item.versions, tuple(names[name] for name in item.diffs)) for item in variants]
    tables = _joined([*kept, *made])
    for name, diff in diffs.items():
        _write(folder / names[name], render(diff))
    before = file.read_text(encoding="utf-8")
    _write(file, head + _tables(gaps, tables))
    try:
        read_feature(folder)
    except HwpluginError:
        _write(file, before)
        raise
    unused = {item.name for item in folder.glob("*.diff")} - {name for table in tables for name in table.diffs}
    return names, sorted(unused)


def _read(file: Path) -> tuple[str, dict[str, Any]]:
    """The text above the tables, and all of it read."""
    try:
        text = file.read_text(encoding="utf-8")
        raw = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FeatureFolderError(f"{file}: can't be read ({error}); mend it first") from error
    for found in _TABLE.finditer(text):
        # In the middle of a text of several lines, a line may begin so, too.
        head = text[: found.start()]
        try:
            tomllib.loads(head)
        except tomllib.TOMLDecodeError:
            continue
        return head, raw
    return text.rstrip("\n") + "\n\n", raw


def _variants_of(raw: Mapping[str, Any], file: Path) -> list[_Table]:
    try:
        return [_Table(table["versions"], tuple(table["diffs"])) for table in raw.get("variant", [])]
    except (KeyError, TypeError) as error:
        raise FeatureFolderError(f"{file}: a [[variant]] has no versions or no diffs; mend it first") from error


def _without(table: _Table, taken: set[str]) -> list[_Table]:
    return [table._replace(versions=text) for text in _left(table.versions, taken)]


def _gaps_without(gap: Mapping[str, Any], taken: set[str]) -> list[dict[str, Any]]:
    return [{**gap, "versions": text} for text in _left(str(gap["versions"]), taken)]


def _left(text: str, taken: set[str]) -> list[str]:
    """A range without some versions: itself where it holds none of them."""
    versions = Versions(text)
    if not any(versions.covers(version) for version in taken):
        return [text]
    return [spec for spec, _ in ranges(version for version in versions.supported() if version not in taken)]


def _joined(tables: list[_Table]) -> list[_Table]:
    """Neighbours with the same diffs as one, in the order of their versions."""
    by_diffs: dict[tuple[str, ...], list[_Table]] = {}
    for table in tables:
        by_diffs.setdefault(table.diffs, []).append(table)
    found = []
    for diffs, own in by_diffs.items():
        if len(own) == 1:
            found += own
            continue
        listed = [version for table in own for version in Versions(table.versions).supported()]
        found += [_Table(text, diffs) for text, _ in ranges(listed)]
        found += [table for table in own if not Versions(table.versions).supported()]
    return sorted(found, key=lambda table: _first(table.versions))


def _first(text: str) -> Version:
    supported = Versions(text).supported()
    return Version(supported[0]) if supported else Version(re.sub(r"^[^0-9]*", "", text.partition(",")[0]) or "0")


def _free(folder: Path, name: str, used: set[str], text: str) -> str:
    """The name of the feature's file that has this text, or else one that no other text of the feature has."""
    texts = {one: (folder / one).read_bytes() for one in sorted(used)}
    # Under two names it would keep apart ranges that belong together.
    if same := [one for one, held in texts.items() if held == text.encode()]:
        return same[0]
    candidate, number = name, 1
    while candidate in texts:
        number += 1
        candidate = f"{name.removesuffix('.diff')}-{number}.diff"
    return candidate


def _tables(gaps: Iterable[Mapping[str, Any]], tables: Iterable[_Table]) -> str:
    parts = [
        f"[[not_needed]]\nversions = {_basic(gap['versions'])}\nreason = {_basic(gap['reason'])}\n" for gap in gaps
    ]
    for table in tables:
        diffs = ", ".join(_basic(name) for name in table.diffs)
        parts.append(f"[[variant]]\nversions = {_basic(table.versions)}\ndiffs = [{diffs}]\n")
    return "\n".join(parts)


def _basic(text: str) -> str:
    """A TOML string of one line."""
    # JSON's escapes are TOML's, but for one character that JSON leaves.
    return json.dumps(" ".join(text.split()), ensure_ascii=False).replace("\x7f", "\\u007F")


def _long(text: str) -> str:
    clean = "".join(c for c in text if c.isprintable() or c == "\n").replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    wrapped = [textwrap.fill(part, width=120) if part.lstrip() == part else part for part in clean.split("\n")]
    return '"""\n' + "\n".join(wrapped).strip() + '\n"""'


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode("utf-8"))
    except OSError as error:
        raise FeatureFolderError(f"{file}: can't be written ({error.strerror}); name another folder") from error
