# SPDX-License-Identifier: Apache-2.0
"""The folder of a feature: written whole, or given hunks that it did not have."""

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

from vllm_hwplugin.cachedir import write_atomically
from vllm_hwplugin.patching import GROUPS, VLLM, Catalogue, Feature, load_catalogue, outside
from vllm_hwplugin.versions import Versions

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
# A feature that is being written.
_UNFINISHED: Final = re.compile(r"\.[a-z0-9-]+\.[0-9]+\.new")
_HAS_IT: Final = "this vLLM has the change already"


class About(NamedTuple):
    """The texts of a feature's `patch.toml`. `gate` is None where the catalogue's name and the feature's make it."""

    title: str
    what: str
    origin: str
    removal: str
    gate: str | None = None


def slug(text: str) -> str:
    """A name for a folder: small letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def read_catalogue(folder: Path) -> Catalogue:
    """The features of a folder of patches: the project's own, or one with a `catalogue.toml`.

    Raises:
        CatalogueError, DiffError: it is not as it has to be.
    """
    if (folder / outside.MANIFEST).is_file() or not any(folder.glob(f"*/{FEATURE}")):
        return Catalogue(outside.load_outside(folder).features)
    return load_catalogue(folder)


def read_feature(folder: Path) -> Feature:
    """The feature of a folder.

    Raises:
        ChangeError: it is none.
        CatalogueError, DiffError: the catalogue around it is not as it has to be.
    """
    if not (folder / FEATURE).is_file():
        raise ChangeError(f"{folder}: no feature (there is no {FEATURE} in it); name the folder of one")
    folder = folder.resolve()
    above = folder.parent.parent if folder.parent.name in GROUPS else folder.parent
    found = next(item for item in read_catalogue(above).features if item.id.split("/")[-1] == folder.name)
    refuse_others(found.distribution, folder)
    return found


def refuse_others(distribution: str, folder: Path) -> None:
    """Raise ChangeError for what changes another distribution, whose versions are not at hand."""
    if distribution != VLLM:
        raise ChangeError(
            f"{folder}: changes {distribution}, and only vLLM's versions are read here; make its diffs by hand "
            "(docs/your-own-patches.md)"
        )


def check_catalogue(folder: Path, *, gate: str | None) -> None:
    """Whether a new feature can go there. A folder that is not there, or empty, becomes a catalogue with its first one.

    Raises:
        ChangeError: a folder is there that is no catalogue, or one whose features need a gate that is not given.
        CatalogueError: its `catalogue.toml` is not as it has to be.
    """
    if (folder / outside.MANIFEST).is_file():
        refuse_others(outside.read_manifest(folder).distribution, folder)
    elif any(folder.glob(f"*/{FEATURE}")):
        if gate is None:
            raise ChangeError(
                f"{folder}: without {outside.MANIFEST} each feature names its gate, VLLM_HWPLUGIN_...: give it with "
                "--gate"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ChangeError(f"{folder}: no catalogue (there is no {outside.MANIFEST} in it); name one, or a new folder")


def new_folder(catalogue: Path, name: str) -> Path:
    """Where a new feature goes.

    Raises:
        ChangeError: the name is no good, or taken.
    """
    if not name or slug(name) != name:
        better = slug(name) or "NAME"
        raise ChangeError(f"{name!r}: a feature's name has small letters, digits and hyphens; use --id {better}")
    folder = catalogue / name
    if folder.exists():
        raise ChangeError(f"{folder}: is there already; remove it, or use another name (--id)")
    return folder


def create(folder: Path, about: About, made: Written, upstream: Iterable[str] = ()) -> None:
    """Write a new feature, with its catalogue where there is none.

    Args:
        upstream: the versions that have the change already.

    Raises:
        ChangeError: it cannot be written; nothing is left of it.
        CatalogueError: it would not be read as it was written (a gate that is none); nothing is left of it.
    """
    lines = [f"id = {_basic(folder.name)}", f"title = {_basic(about.title)}"]
    if about.gate is not None:
        lines.append(f"gate = {_basic(about.gate)}")
    lines.append(f"what = {_long(about.what)}")
    lines += [f"origin = {_basic(about.origin)}", f"removal = {_basic(about.removal)}", "requires = []"]
    lines.append(f"versions = {_basic(made.versions)}")
    if text := ranges(upstream):
        lines += ["", "[[not_needed]]", f"versions = {_basic(text)}", f"reason = {_basic(_HAS_IT)}"]
    catalogue = folder.parent
    if not catalogue.exists() or not any(catalogue.iterdir()):
        write(catalogue / outside.MANIFEST, f"name = {json.dumps(slug(catalogue.resolve().name))}\n")
    with _locked(catalogue):
        # Another process may have made it, or left it aside.
        new_folder(catalogue, folder.name)
        _put(folder, made, "\n".join(lines) + "\n")


def extend(folder: Path, carried: Sequence[Carried]) -> Written:
    """Give versions of a feature what was made on them; all the others keep what they have.

    `patch.toml` stays as it is, besides `versions`.

    Raises:
        ChangeError: `patch.toml` is not as it has to be, or something cannot be written; all is as before then.
        CatalogueError: it would not be read as it was written; all is as before then.
    """
    with _locked(folder.resolve().parent):
        feature = read_feature(folder)
        made = written(carried, feature)
        _put(folder, made, _with_versions(folder, feature.versions, made.versions))
    return made


def list_version(folder: Path, version: str) -> None:
    """Let a feature be for one more version, with the hunks that it has.

    Raises:
        ChangeError: `patch.toml` is not as it has to be, or cannot be written.
    """
    with _locked(folder.resolve().parent):
        had = read_feature(folder).versions
        line = Line([had], [version])
        text = _with_versions(folder, had, line.text(line.of(had) | line.about(version)))
        file = folder / FEATURE
        write_atomically(file, text.encode(), mode=stat.S_IMODE(file.stat().st_mode))


def _with_versions(folder: Path, had: Versions, versions: str) -> str:
    """The text of a `patch.toml` with these versions, and otherwise as it is."""
    file = folder / FEATURE
    text = file.read_text(encoding="utf-8")
    if Versions(versions) == had:
        return text
    wanted = tomllib.loads(text) | {"versions": versions}
    # Several lines of a text may begin so, too.
    tried = (text[: at.start()] + f"versions = {_basic(versions)}" + text[at.end() :] for at in _LINE.finditer(text))
    text = next((one for one in tried if _is(one, wanted)), "")
    if not text:
        raise ChangeError(f"{file}: has no line 'versions = ...' that could be changed; write it so")
    return text


def put_back(catalogue: Path) -> list[str]:
    """Put features back that a command had put aside when it was killed, and return their names.

    Raises:
        ChangeError: the catalogue cannot be written.
    """
    if not (catalogue / outside.MANIFEST).is_file() and not any(catalogue.glob(f"*/{FEATURE}")):
        return []
    with _locked(catalogue) as names:
        return names


@contextmanager
def _locked(catalogue: Path) -> Iterator[list[str]]:
    """Keep other commands out of a catalogue, and put back what a killed one had put aside."""
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
        raise ChangeError(f"{catalogue}: can't be written ({error}); see that it is a folder of yours") from error


def _put(folder: Path, made: Written, text: str) -> None:
    """Write a feature's diffs and its `patch.toml`; where it could not be read then, all is as before."""
    # A folder without its `patch.toml` would put the whole catalogue out of force; with a dot before it, it is none.
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
            raise ChangeError(f"{folder}: can't be written ({error}); see that there is room") from error
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
    """A TOML string of one line."""
    # What a terminal or a mail had that is no text becomes a question mark; the rest JSON escapes as TOML does, but for
    # one character that it leaves.
    clean = " ".join(text.encode(errors="replace").decode().split())
    return json.dumps(clean, ensure_ascii=False).replace("\x7f", "\\u007F")


def _long(text: str) -> str:
    clean = "".join(c for c in text if c.isprintable() or c == "\n").replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    wrapped = [textwrap.fill(part, width=120) if part.lstrip() == part else part for part in clean.split("\n")]
    return '"""\n' + "\n".join(wrapped).strip() + '\n"""'


def write(file: Path, text: str) -> None:
    """Write a text with the folders that lead to it; raises ChangeError where that fails."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode("utf-8"))
    except OSError as error:
        raise ChangeError(f"{file}: can't be written ({error.strerror}); name another folder") from error
