# SPDX-License-Identifier: Apache-2.0
"""The hunks of a feature, each with the versions that it is for.

A version takes a hunk that the feature has already where that makes a part of what was made on the version, and else
gets one of its own. Its context is three lines, and more where that is needed to stand at one place alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from packaging.version import Version

from vllm_hwplugin.patching import Edit, Feature, FileDiff, Hunk, Source, apply_edits, edits_of, locate
from vllm_hwplugin.versions import Versions

from ._carry import Carried, Edited, carry_all
from ._change import Change, Step
from ._line import Line

_CONTEXT: Final = 3


class Written(NamedTuple):
    """What is to be written of a feature: which versions it is for, and its diffs by their file names."""

    versions: str
    diffs: Mapping[str, tuple[FileDiff, ...]]


@dataclass
class _Held:
    hunk: Hunk
    intervals: frozenset[int]


def written(carried: Sequence[Carried], feature: Feature | None = None) -> Written:
    """The hunks for versions that a change was made on.

    Args:
        carried: of each version that the change applies to, in any order.
        feature: what these versions leave, with the versions behind each of which nobody knows. The others keep what
            they have.
    """
    in_order = sorted(carried, key=lambda item: Version(item.version))
    files = feature.files if feature is not None else ()
    stated = [hunk.versions for file in files for hunk in file.hunks if hunk.versions is not None]
    if feature is not None:
        stated.append(feature.versions)
    line = Line(stated, [item.version for item in in_order])
    had = line.of(feature.versions) if feature is not None else frozenset[int]()
    taken = {item.version: line.about(item.version) for item in in_order}
    # What was no version of the feature's before does not become one because that before it was saved anew.
    taken = {version: numbers & had if min(numbers) in had else numbers for version, numbers in taken.items()}
    given = frozenset(number for numbers in taken.values() for number in numbers)
    held: dict[tuple[str, str], list[_Held]] = {}
    for file in files:
        # A diff may have a file in two sections.
        hunks = held.setdefault((file.origin.rpartition("/")[2], file.path), [])
        hunks += [_Held(hunk, line.of(hunk.versions) & had - given) for hunk in file.hunks]
    at = {path: name for name, path in reversed(held)}
    for item in in_order:
        for path, edited in item.files.items():
            if edited.edits:
                _add(held.setdefault((at.get(path, _name(path)), path), []), path, edited, taken[item.version])
    among = had | given
    diffs: dict[str, tuple[FileDiff, ...]] = {}
    for (name, path), hunks in held.items():
        # A range that says what it has to stays as somebody has written it.
        kept = [
            one.hunk
            if one.intervals == line.of(one.hunk.versions) & among
            else one.hunk._replace(versions=Versions(text) if (text := line.text(one.intervals, among)) else None)
            for one in hunks
            if one.intervals
        ]
        if kept:
            diffs[name] = (*diffs.get(name, ()), FileDiff(path, tuple(kept), name))
    versions = str(feature.versions) if feature is not None and given <= had else line.text(among)
    return Written(versions, diffs)


def _add(held: list[_Held], path: str, edited: Edited, version: frozenset[int]) -> None:
    """Give a version what makes its edits, in the order in which that stands in its text."""
    used: list[tuple[int, _Held]] = []
    left = list(edited.edits)
    for one in held:
        ((_, place),) = locate(FileDiff(path, (one.hunk,), path), edited.pristine, hints=False)
        made = edits_of(one.hunk, place, "") if place is not None else []
        if place is not None and made and all(edit in left for edit in made):
            used.append((place, one))
            left = [edit for edit in left if edit not in made]
    found = _with_new(used, path, Edited(edited.pristine, tuple(left)))
    both = [one for one in held if any(one is other for _, other in used)]
    if [one for one in found if one in both] != both or not _makes(FileDiff(path, _hunks_of(found), path), edited):
        found = _with_new([], path, edited)
    behind = len(held)
    for one in reversed(found):
        one.intervals |= version
        known = next((at for at, other in enumerate(held) if other is one), None)
        if known is None:
            held.insert(behind, one)
        else:
            behind = known


def _with_new(used: Sequence[tuple[int, _Held]], path: str, edited: Edited) -> list[_Held]:
    """Those hunks and new ones for these edits, in the order of their places."""
    new = make_diff(path, edited).hunks if edited.edits else ()
    places = [*used, *((max(hunk.source_start - 1, 0), _Held(hunk, frozenset())) for hunk in new)]
    return [one for _, one in sorted(places, key=lambda item: item[0])]


def _hunks_of(held: Iterable[_Held]) -> tuple[Hunk, ...]:
    return tuple(one.hunk for one in held)


def _makes(diff: FileDiff, item: Edited) -> bool:
    edits: list[Edit] = []
    for hunk, (_, place) in zip(diff.hunks, locate(diff, item.pristine, hints=False), strict=True):
        if place is None:
            return False
        edits += edits_of(hunk, place, "")
    return apply_edits(item.pristine, edits) == item.result


def carry_again(made: Carried, sources: Iterable[Source]) -> list[Carried]:
    """What was made on one version, on each of others.

    Raises:
        HwpluginError: a source cannot be read.
    """
    steps = tuple(Step(make_diff(path, edited)) for path, edited in made.files.items() if edited.edits)
    return carry_all(Change("", made.label, "", steps), sources)


def make_diff(path: str, edited: Edited) -> FileDiff:
    """The diff that makes a version's edits, and could mean no other place of its text."""
    lines = edited.pristine.lines
    around = [_CONTEXT] * len(edited.edits)
    while True:
        spans = _together(edited.edits, around, len(lines))
        diff = FileDiff(path, _hunks(edited, spans), path)
        narrow = [
            index
            for index, (_, place) in enumerate(locate(diff, edited.pristine, hints=False))
            if place is None and diff.hunks[index].source_length < len(lines)
        ]
        if not narrow:
            return diff
        for index in narrow:
            for edit in spans[index].edits:
                around[edit] += 1


class _Span(NamedTuple):
    """The lines (from 0, end excluded) of a hunk, and which edits it makes."""

    start: int
    end: int
    edits: tuple[int, ...]


def _together(edits: Sequence[Edit], around: Sequence[int], length: int) -> list[_Span]:
    """Edits with so many lines around each; those that share or touch such lines make one hunk."""
    spans: list[_Span] = []
    for index, (edit, lines) in enumerate(zip(edits, around, strict=True)):
        new = _Span(max(edit.start - lines, 0), min(edit.end + lines, length), (index,))
        while spans and new.start <= spans[-1].end:
            last = spans.pop()
            new = _Span(min(new.start, last.start), max(new.end, last.end), last.edits + new.edits)
        spans.append(new)
    return spans


def _hunks(base: Edited, spans: Sequence[_Span]) -> tuple[Hunk, ...]:
    lines = base.pristine.lines
    hunks: list[Hunk] = []
    shift = 0
    for number, span in enumerate(spans, 1):
        body: list[tuple[str, str]] = []
        at = span.start
        for edit in (base.edits[index] for index in span.edits):
            body += ((" ", line) for line in lines[at : edit.start])
            body += (("-", line) for line in lines[edit.start : edit.end])
            body += (("+", line) for line in edit.lines)
            at = edit.end
        body += ((" ", line) for line in lines[at : span.end])
        before, after = (sum(sign != other for sign, _ in body) for other in ("+", "-"))
        # An empty side is stated as the line before it.
        start, target = span.start + (before > 0), span.start + shift + (after > 0)
        hunks.append(Hunk(number, start, before, target, after, tuple(body)))
        shift += after - before
    return tuple(hunks)


def render(diffs: Iterable[FileDiff]) -> str:
    """The text of a diff file, as `diff -u` would write it but for the ranges of versions."""
    parts: list[str] = []
    for diff in diffs:
        parts.append(f"--- a/{diff.path}\n+++ b/{diff.path}\n")
        for hunk in diff.hunks:
            before, after = _side(hunk.source_start, hunk.source_length), _side(hunk.target_start, hunk.target_length)
            parts.append(f"@@ -{before} +{after} @@{'' if hunk.versions is None else f' {hunk.versions}'}\n")
            for sign, line in hunk.lines:
                parts.append(sign + line if line.endswith("\n") else f"{sign}{line}\n\\ No newline at end of file\n")
    return "".join(parts)


def _name(path: str) -> str:
    """The file name of a diff: `worker-utils.diff`; a package is not called `init`."""
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return "-".join(parts[-2:]).replace("_", "-") + ".diff"


def _side(start: int, length: int) -> str:
    return f"{start}" if length == 1 else f"{start},{length}"
