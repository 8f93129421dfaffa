# SPDX-License-Identifier: Apache-2.0
"""The folder of a feature: create it, or add hunks to it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from vllm_hwplugin.base.cachedir import write_atomically
from vllm_hwplugin.base.versions import Versions
from vllm_hwplugin.patching import VLLM, Catalogue, Feature, load_catalogue, outside
from vllm_hwplugin.patching.texts import GROUPS

from ._carry import Carried
from ._change import ChangeError
from ._hunks import Written, render, written
from ._line import Line, ranges

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FEATURE: Final = "patch.toml"
_LINE: Final = re.compile(r"^versions\b.*$", re.MULTILINE)
# The folder of an unfinished write.
_UNFINISHED: Final = re.compile(r"\.[a-z0-9-]+\.[0-9]+\.new")


class About(NamedTuple):
    """The texts of a feature's `patch.toml`; `gate` None: derived from the names of catalogue and feature."""

    title: str
    what: str
    origin: str
    removal: str
    gate: str | None = None


def slug(text: str) -> str:
    """Convert a text to lower-case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def read_catalogue(folder: Path) -> Catalogue:
    """Read the features of a folder of patches.

    The folder is the project's, or has a `catalogue.toml`.

    Raises:
        CatalogueError, DiffError: The folder is not a valid catalogue.
    """
    if (folder / outside.MANIFEST).is_file() or not any(folder.glob(f"*/{FEATURE}")):
        return Catalogue(outside.load_outside(folder).features)
    return load_catalogue(folder)


def read_feature(folder: Path) -> Feature:
    """Read the feature of a folder.

    Raises:
        ChangeError: The folder has no feature.
        CatalogueError, DiffError: The catalogue around it is invalid.
    """
    if not (folder / FEATURE).is_file():
        raise ChangeError(f"{folder}: not a feature (no {FEATURE} in it); name a feature's folder")
    folder = folder.resolve()
    above = folder.parent.parent if folder.parent.name in GROUPS else folder.parent
    feature = next(feature for feature in read_catalogue(above).features if feature.id.split("/")[-1] == folder.name)
    refuse_others(feature.distribution, folder)
    return feature


def refuse_others(distribution: str, folder: Path) -> None:
    """Raise ChangeError for a feature of another distribution than vLLM."""
    if distribution != VLLM:
        raise ChangeError(
            f"{folder}: changes {distribution}, and this command reads only vLLM's versions; make its diffs by hand "
            "(docs/your-own-patches.md)"
        )


def check_catalogue(folder: Path, *, gate: str | None) -> None:
    """Check that a feature can be added to this catalogue.

    A missing or empty folder becomes a catalogue.

    Raises:
        ChangeError: The folder is not a catalogue, or its features need a switch that is not given.
        CatalogueError: Its `catalogue.toml` is invalid.
    """
    if (folder / outside.MANIFEST).is_file():
        refuse_others(outside.read_manifest(folder).distribution, folder)
    elif any(folder.glob(f"*/{FEATURE}")):
        if gate is None:
            raise ChangeError(
                f"{folder}: without {outside.MANIFEST} each feature names its switch, VLLM_HWPLUGIN_...; add --gate "
                "NAME"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ChangeError(f"{folder}: not a catalogue (no {outside.MANIFEST} in it); name a catalogue, or a new folder")


def new_folder(catalogue: Path, name: str) -> Path:
    """Return a new feature's folder; raise ChangeError for an invalid name."""
    if not name or slug(name) != name:
        better = slug(name) or "NAME"
        raise ChangeError(f"{name!r}: expected a name of lower-case letters, digits and hyphens; use --id {better}")
    folder = catalogue / name
    if folder.exists():
        raise ChangeError(f"{folder} exists already; remove it, or use another name (--id)")
    return folder


def create(
    folder: Path, about: About, made: Written, upstream: Iterable[str] = (), requires: Sequence[str] = ()
) -> None:
    """Write a new feature, and a new catalogue around it if needed.

    Args:
        upstream: The versions that have the change already, oldest first. If the newest supported version is among
            them, newer versions do not need the feature either.
        requires: Features of the catalogue.

    Raises:
        ChangeError: The feature cannot be written; nothing of it remains.
        CatalogueError: The written feature cannot be read (an invalid switch); nothing of it remains.
    """
    lines = [f"id = {_basic(folder.name)}", f"title = {_basic(about.title)}"]
    if about.gate is not None:
        lines.append(f"gate = {_basic(about.gate)}")
    lines.append(f"what = {_long(about.what)}")
    lines += [f"origin = {_basic(about.origin)}", f"removal = {_basic(about.removal)}"]
    lines.append(f"requires = [{', '.join(map(_basic, requires))}]")
    lines.append(f"versions = {_basic(made.versions)}")
    if has_it := list(upstream):
        lines += ["", "[[not_needed]]", f"versions = {_basic(ranges(has_it, goes_on=True))}"]
        lines += [f"reason = {_basic(f'vLLM has the change from {has_it[0]} on')}"]
    catalogue = folder.parent
    if not catalogue.exists() or not any(catalogue.iterdir()):
        write(catalogue / outside.MANIFEST, f"name = {json.dumps(slug(catalogue.resolve().name))}\n")
    with _locked(catalogue):
        # Another process may have created it, or been killed while it did.
        new_folder(catalogue, folder.name)
        _put(folder, made, "\n".join(lines) + "\n")


def extend(folder: Path, carried: Sequence[Carried]) -> Written:
    """Replace a feature's hunks for the carried versions; other versions keep theirs.

    Of `patch.toml` only `versions` changes.

    Raises:
        ChangeError: `patch.toml` is invalid, or the feature cannot be written; it is unchanged then.
        CatalogueError: The written feature cannot be read; it is unchanged then.
    """
    with _locked(folder.resolve().parent):
        feature = read_feature(folder)
        made = written(carried, feature)
        _put(folder, made, _with_versions(folder, feature.versions, made.versions))
    return made


def list_version(folder: Path, version: str) -> None:
    """Add a version to a feature's `versions`, with its existing hunks.

    Raises:
        ChangeError: `patch.toml` is invalid, or cannot be written.
    """
    with _locked(folder.resolve().parent):
        had = read_feature(folder).versions
        line = Line([had], [version])
        text = _with_versions(folder, had, line.text(line.of(had) | line.about(version)))
        file = folder / FEATURE
        write_atomically(file, text.encode(), mode=stat.S_IMODE(file.stat().st_mode))


def _with_versions(folder: Path, had: Versions, versions: str) -> str:
    """Return the text of a `patch.toml` with only `versions` changed."""
    file = folder / FEATURE
    text = file.read_text(encoding="utf-8")
    if Versions(versions) == had:
        return text
    wanted = tomllib.loads(text) | {"versions": versions}
    # Lines of a multi-line string may begin in the same way.
    tried = (text[: at.start()] + f"versions = {_basic(versions)}" + text[at.end() :] for at in _LINE.finditer(text))
    text = next((candidate for candidate in tried if _is(candidate, wanted)), "")
    if not text:
        raise ChangeError(f"{file}: no line 'versions = ...' to change; write `versions` on one line")
    return text


def put_back(catalogue: Path) -> list[str]:
    """Restore features that a killed command moved aside; may raise ChangeError."""
    if not (catalogue / outside.MANIFEST).is_file() and not any(catalogue.glob(f"*/{FEATURE}")):
        return []
    with _locked(catalogue) as names:
        return names


@contextmanager
def _locked(catalogue: Path) -> Iterator[list[str]]:
    """Lock a catalogue, and restore features that were moved aside."""
    # A killed command leaves such features.
    try:
        descriptor = os.open(catalogue, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            names = []
            for aside in [file.parent for file in catalogue.glob(f".*{outside.ASIDE}/{FEATURE}")]:
                name = aside.name[1 : -len(outside.ASIDE)]
                if (catalogue / name).exists():
                    shutil.rmtree(aside)
                else:
                    aside.rename(catalogue / name)
                    names.append(name)
            for new in [file for file in catalogue.iterdir() if _UNFINISHED.fullmatch(file.name)]:
                shutil.rmtree(new)
            yield names
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ChangeError(f"{catalogue}: cannot be written ({error}); check that this user owns the folder") from error


def _put(folder: Path, made: Written, text: str) -> None:
    """Write a feature's folder, or restore it if it cannot be read."""
    # A folder without a `patch.toml` would invalidate the whole catalogue; folders with a leading dot are ignored.
    folder = folder.resolve()
    new = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    old = folder.with_name(f".{folder.name}{outside.ASIDE}")
    is_new = not folder.exists()
    try:
        if not is_new:
            shutil.copytree(folder, new, ignore=shutil.ignore_patterns("*.diff"))
        for name, diffs in made.diffs.items():
            write(new / name, render(diffs))
        write(new / FEATURE, text)
        if not is_new:
            folder.rename(old)
        new.rename(folder)
        read_feature(folder)
    except BaseException as error:
        if is_new or old.exists():
            shutil.rmtree(folder, ignore_errors=True)
        if old.exists():
            old.rename(folder)
        if isinstance(error, OSError):
            raise ChangeError(f"{folder}: cannot be written ({error}); check the free disk space") from error
        raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _is(text: str, wanted: Mapping[str, Any]) -> bool:
    try:
        return bool(tomllib.loads(text) == wanted)
    except tomllib.TOMLDecodeError:
        return False


def _basic(text: str) -> str:
    """Return a one-line TOML string."""
    # Undecodable bytes of a terminal or a mail become question marks. JSON escapes as TOML does, except for DEL.
    clean = " ".join(text.encode(errors="replace").decode().split())
    return json.dumps(clean, ensure_ascii=False).replace("\x7f", "\\u007F")


def _long(text: str) -> str:
    clean = "".join(c for c in text if c.isprintable() or c == "\n").replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    wrapped = [textwrap.fill(part, width=120) if part.lstrip() == part else part for part in clean.split("\n")]
    return '"""\n' + "\n".join(wrapped).strip() + '\n"""'


def write(file: Path, text: str) -> None:
    """Write a text, with the folders that lead to it; raises ChangeError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode("utf-8"))
    except OSError as error:
        raise ChangeError(f"{file}: cannot be written ({error.strerror}); name another folder") from error
