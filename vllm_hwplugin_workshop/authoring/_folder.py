# SPDX-License-Identifier: Apache-2.0
"""The folder of a feature: written whole, or given variants that it did not have."""

from __future__ import annotations

import json
import re
import shutil
import stat
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from packaging.version import Version

from vllm_hwplugin.cachedir import write_atomically
from vllm_hwplugin.errors import HwpluginError
from vllm_hwplugin.patching import VLLM, Catalog, Feature, FileDiff, load_catalog, outside
from vllm_hwplugin.versions import SUPPORTED, Versions

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
    """A `[[variant]]` of a `patch.toml`, or with a reason in place of diffs a `[[not_needed]]`."""

    versions: str
    diffs: tuple[str, ...] = ()
    reason: str = ""


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
        FeatureFolderError: it cannot be written; nothing is left of it.
        CatalogError: it would not be read as it was written (a gate that is none); nothing is left of it.
    """
    lines = [f"id = {_basic(folder.name)}", f"title = {_basic(about.title)}"]
    if about.gate is not None:
        lines.append(f"gate = {_basic(about.gate)}")
    lines.append(f"what = {_long(about.what)}")
    lines += [f"origin = {_basic(about.origin)}", f"removal = {_basic(about.removal)}", "requires = []", ""]
    tables = [_Table(text, reason=_HAS_IT) for text, _ in ranges(upstream)]
    tables += [_Table(item.versions, item.diffs) for item in variants]
    catalogue = folder.parent
    if not catalogue.exists() or not any(catalogue.iterdir()):
        _write(catalogue / outside.MANIFEST, f"name = {json.dumps(slug(catalogue.resolve().name))}\n")
    # A folder without its `patch.toml` would put the whole catalogue out of force; with a dot before it, it is none.
    making = catalogue / f".{folder.name}.new"
    shutil.rmtree(making, ignore_errors=True)
    try:
        for name, diff in diffs.items():
            _write(making / name, render(diff))
        _write(making / FEATURE, "\n".join(lines) + "\n" + _rendered(tables))
        making.rename(folder)
        read_feature(folder)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        raise


def add_variants(
    folder: Path, variants: Sequence[MadeVariant], diffs: Mapping[str, FileDiff]
) -> tuple[tuple[MadeVariant, ...], list[str]]:
    """Give a feature's versions other diffs.

    A version that a range of the feature holds leaves that range, together with the versions behind it of which this
    release knows nothing, up to the next one that it knows. All the others keep what they had. What stands above the
    first table of `patch.toml` stays as it is.

    Returns:
        The variants with the ranges and the diffs' names that they got, and the feature's diffs that no variant uses
        any more, which are left where they are.

    Raises:
        FeatureFolderError: `patch.toml` is not as it has to be, or cannot be written; it is as before then.
        CatalogError: it would not be read as it was written; it is as before then.
    """
    file = folder / FEATURE
    head, raw = _read(file)
    kept = _tables_of(raw, file)
    parts: list[list[str]] = []
    for item in variants:
        own: list[str] = []
        for version in item.members:
            ((cell, _),) = ranges([version])
            holder = next((table for table in kept if Versions(table.versions).covers(version)), None)
            if holder is not None:
                below, cell, above = _cut(holder.versions, cell)
                kept.remove(holder)
                kept += [holder._replace(versions=text) for text in (below, above) if text]
            own.append(cell)
        parts.append(own)
    used = {name for table in kept for name in table.diffs}
    names = {name: _free(folder, name, used, render(diff)) for name, diff in diffs.items()}
    new = [
        [_Table(text, tuple(names[name] for name in item.diffs)) for text in own]
        for item, own in zip(variants, parts, strict=True)
    ]
    tables = _joined([*kept, *(table for group in new for table in group)])
    before = file.read_text(encoding="utf-8")
    for name, diff in diffs.items():
        _write(folder / names[name], render(diff))
    _write(file, head + _rendered(tables))
    try:
        read_feature(folder)
    except HwpluginError:
        _write(file, before)
        raise
    unused = {item.name for item in folder.glob("*.diff")} - {name for table in tables for name in table.diffs}
    given = [
        item._replace(versions=" or ".join(table.versions for table in _joined(group)), diffs=group[0].diffs)
        for item, group in zip(variants, new, strict=True)
    ]
    return tuple(given), sorted(unused)


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


def _tables_of(raw: Mapping[str, Any], file: Path) -> list[_Table]:
    try:
        tables = [_Table(table["versions"], reason=table["reason"]) for table in raw.get("not_needed", [])]
        tables += [_Table(table["versions"], tuple(table["diffs"])) for table in raw.get("variant", [])]
        for table in tables:
            Versions(table.versions)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FeatureFolderError(
            f"{file}: a [[variant]] or [[not_needed]] is not as it has to be ({error!r}); mend it first"
        ) from error
    return tables


def _cut(text: str, cell: str) -> tuple[str, str, str]:
    """What a range holds below a part of it, in that part, and above it; empty where that is nothing.

    Args:
        cell: as `ranges` writes it of one version, which the range holds.
    """
    clauses = [clause.strip() for clause in text.split(",")]
    if cell.startswith("=="):
        rest = f"{text},!={cell.removeprefix('==')}"
        return "", cell, rest if _first(rest) else ""
    begin, end = cell.split(",")
    lower, upper = ([clause for clause in clauses if clause.startswith(sign)] for sign in "><")
    others = [clause for clause in clauses if not clause.startswith((">", "<"))]
    below = ",".join([*lower, *others, begin.replace(">=", "<")])
    above = ",".join([end.replace("<", ">="), *others, *upper])
    below, above = (part if _first(part) else "" for part in (below, above))
    return below, ",".join([*([begin] if below else lower), *others, *([end] if above else upper)]), above


def _joined(tables: Iterable[_Table]) -> list[_Table]:
    """In the order of their versions, and neighbours with the same diffs as one."""
    found: list[_Table] = []
    for table in sorted(tables, key=lambda item: _first(item.versions) or Version("0")):
        last = found[-1] if found else table
        one, other = _interval(last.versions), _interval(table.versions)
        if one and other and Version(one[1]) == Version(other[0]) and last[1:] == table[1:]:
            found[-1] = last._replace(versions=f">={one[0]},<{other[1]}")
        else:
            found.append(table)
    return found


def _interval(text: str) -> tuple[str, str] | None:
    """Where `>=...,<...` begins and ends; None for a range that is written otherwise."""
    match = re.fullmatch(r">=([^,=]+),<([^,=]+)", ",".join(sorted(text.replace(" ", "").split(","), reverse=True)))
    return match and (match[1], match[2])


def _first(text: str) -> Version | None:
    """The oldest version that a range holds, of those that are known or that it names; None where it holds none."""
    versions = Versions(text)
    known = ("0", *SUPPORTED, *versions.edges())
    return min((Version(item) for item in known if versions.covers(item)), default=None)


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


def _rendered(tables: Iterable[_Table]) -> str:
    """The tables as text, those of versions that need nothing first."""
    parts = []
    for table in sorted(tables, key=lambda item: not item.reason):
        if table.reason:
            parts.append(f"[[not_needed]]\nversions = {_basic(table.versions)}\nreason = {_basic(table.reason)}\n")
            continue
        diffs = ", ".join(_basic(name) for name in table.diffs)
        parts.append(f"[[variant]]\nversions = {_basic(table.versions)}\ndiffs = [{diffs}]\n")
    return "\n".join(parts)


def _basic(text: str) -> str:
    """A TOML string of one line."""
    # What a terminal or a mail had that is no text becomes a question mark; the rest JSON escapes as TOML does, but for
    # one character that it leaves.
    clean = " ".join(text.encode(errors="replace").decode().split())
    return json.dumps(clean, ensure_ascii=False).replace("\x7f", "\\u007F")


def _long(text: str) -> str:
    clean = "".join(c for c in text if c.isprintable() or c == "\n").replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    wrapped = [textwrap.fill(part, width=120) if part.lstrip() == part else part for part in clean.split("\n")]
    return '"""\n' + "\n".join(wrapped).strip() + '\n"""'


def _write(file: Path, text: str) -> None:
    """A file that is there already is the old one or the new one at every moment."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            write_atomically(file.resolve(), text.encode("utf-8"), mode=stat.S_IMODE(file.stat().st_mode))
        else:
            file.write_bytes(text.encode("utf-8"))
    except OSError as error:
        raise FeatureFolderError(f"{file}: can't be written ({error.strerror}); name another folder") from error
