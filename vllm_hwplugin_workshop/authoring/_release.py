# SPDX-License-Identifier: Apache-2.0
"""Carry a catalogue to the next release, as far as that needs no judgement."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from vllm_hwplugin.base.versions import SUPPORTED, Versions
from vllm_hwplugin.patching import Catalogue, Feature
from vllm_hwplugin.patching.texts import Source, Status, blob_of

from ..verdicts import evaluate_as
from ._carry import carry
from ._change import Change, ChangeError, Step
from ._folder import FEATURE, extend, list_version, write
from ._line import Line

TEXTS: Final = "texts.json"
_NOT_NEEDED: Final = re.compile(r'^versions = "([^"]*)"$', re.MULTILINE)

Table = dict[str, dict[str, str | None]]


class ForAPerson(NamedTuple):
    """A feature that a person must carry, and why."""

    feature: str
    reason: str


def carry_catalogue(
    catalogue: Catalogue, folder: Path, source: Source, version: str
) -> tuple[list[str], list[ForAPerson]]:
    """Give a release the previous release's hunks if they fit exactly.

    Args:
        version: A version of `SUPPORTED`, not the first.

    Returns:
        The features that were written, and those that are left to a person.

    Raises:
        ChangeError: A feature cannot be written.
        SourceError: The release cannot be read.
    """
    last = SUPPORTED[SUPPORTED.index(version) - 1]
    done: list[str] = []
    left: list[ForAPerson] = []
    for feature in catalogue.features:
        home = folder / feature.home
        if feature.versions.covers(version) or feature.not_needed_for(version):
            continue
        if not feature.versions.covers(last):
            if feature.not_needed_for(last):
                _widen_not_needed(home, feature, last, version)
                done.append(feature.id)
            continue
        verdict = evaluate_as(feature, source, last)
        if verdict.status is Status.APPLIES:
            hunks = feature.files_for(last)
            if feature.files_for(version) == hunks:
                list_version(home, version)
            else:
                steps = tuple(map(Step, hunks))
                extend(home, [carry(Change(feature.title, feature.origin, feature.what, steps), source)])
            done.append(feature.id)
        elif verdict.status is Status.UPSTREAM:
            left.append(ForAPerson(feature.id, "in this vLLM already: check, and write [[not_needed]] with the reason"))
        else:
            left.append(ForAPerson(feature.id, verdict.reason))
    return done, left


def _widen_not_needed(folder: Path, feature: Feature, last: str, version: str) -> None:
    """Extend the `[[not_needed]]` range that ends after `last` to `version`."""
    file = folder / FEATURE
    text = file.read_text(encoding="utf-8")
    for match in _NOT_NEEDED.finditer(text):
        had = Versions(match[1])
        if had.covers(last) and had != feature.versions:
            line = Line([had], [version])
            wide = line.text(line.of(had) | line.about(version))
            write(file, f"{text[: match.start(1)]}{wide}{text[match.end(1) :]}")
            return
    raise ChangeError(f"{file}: no line 'versions = ...' of [[not_needed]] to change; write `versions` on one line")


def relied_texts(paths: Iterable[str], source: Callable[[str], Source], versions: Iterable[str] = SUPPORTED) -> Table:
    """Return each file's blob ids, by versions that changed it."""
    table: Table = {path: {} for path in sorted(set(paths))}
    for version in versions:
        add_texts(table, source(version), version)
    return table


def add_texts(table: Table, source: Source, version: str) -> list[str]:
    """Add a version's texts to the table; return the changed files."""
    changed = []
    for path, texts in table.items():
        text = source.read(path)
        name = None if text is None else blob_of(text)
        if name != next(reversed(texts.values()), None):
            texts[version] = name
            changed.append(path)
    return changed


def read_texts(folder: Path) -> Table:
    """Read a catalogue's table of texts; empty if it has none."""
    file = folder / TEXTS
    table: Table = json.loads(file.read_bytes()) if file.exists() else {}
    return table


def write_texts(folder: Path, table: Mapping[str, Mapping[str, str | None]]) -> None:
    """Write a catalogue's table of texts; raise ChangeError if that fails."""
    lines = [textwrap.fill(f"{json.dumps(path)}: {json.dumps(texts)}", 120) for path, texts in table.items()]
    write(folder / TEXTS, "{\n" + ",\n".join(lines) + "\n}\n")
