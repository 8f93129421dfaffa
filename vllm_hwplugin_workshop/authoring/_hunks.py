# SPDX-License-Identifier: Apache-2.0
"""The hunks of a feature, with their versions.

A version shares an existing hunk if the hunk makes a part of the version's edits; otherwise it gets a new hunk. A new
hunk has three lines of context, or as many as it needs to fit at only one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from packaging.version import Version

from vllm_hwplugin.base.versions import Versions
from vllm_hwplugin.patching import Feature
from vllm_hwplugin.patching.texts import Edit, FileDiff, Hunk, Source, apply_edits, edits_of, locate

from ._carry import CONTEXT, Carried, Edited, carry_all
from ._change import Change, Step
from ._line import Line


class Written(NamedTuple):
    """A feature to write: its versions, and its diffs by file name."""

    versions: str
    diffs: Mapping[str, tuple[FileDiff, ...]]


@dataclass
class _Held:
    hunk: Hunk
    intervals: frozenset[int]


def written(carried: Sequence[Carried], feature: Feature | None = None, context: int = CONTEXT) -> Written:
    """Return a feature's hunks for the carried versions.

    Args:
        carried: The change on each version, in any order.
        feature: The existing feature; the carried versions, with the unknown versions after each, are replaced in it.
            None: a new feature.
        context: Lines of context of new hunks; more where a hunk then fits more than one place.
    """
    in_order = sorted(carried, key=lambda result: Version(result.version))
    files = feature.files if feature is not None else ()
    stated = [hunk.versions for file in files for hunk in file.hunks if hunk.versions is not None]
    if feature is not None:
        stated.append(feature.versions)
    line = Line(stated, [result.version for result in in_order])
    had = line.of(feature.versions) if feature is not None else frozenset[int]()
    taken = {result.version: line.about(result.version) for result in in_order}
    # Saving a version must not add unlisted versions after it to the feature.
    taken = {version: numbers & had if min(numbers) in had else numbers for version, numbers in taken.items()}
    given = frozenset(number for numbers in taken.values() for number in numbers)
    held: dict[tuple[str, str], list[_Held]] = {}
    for file in files:
        # A diff may have a file in two sections.
        hunks = held.setdefault((file.origin.rpartition("/")[2], file.path), [])
        hunks += [_Held(hunk, line.of(hunk.versions) & had - given) for hunk in file.hunks]
    at = {path: name for name, path in reversed(held)}
    for result in in_order:
        for path, edited in result.files.items():
            if edited.edits:
                _add(
                    held.setdefault((at.get(path, _name(path)), path), []), path, edited, taken[result.version], context
                )
    among = had | given
    diffs: dict[str, tuple[FileDiff, ...]] = {}
    for (name, path), hunks in held.items():
        # A range that is still right stays as it was written.
        ranged = [
            part.hunk
            if part.intervals == line.of(part.hunk.versions) & among
            else part.hunk._replace(versions=Versions(text) if (text := line.text(part.intervals, among)) else None)
            for part in hunks
            if part.intervals
        ]
        if ranged:
            diffs[name] = (*diffs.get(name, ()), FileDiff(path, tuple(ranged), name))
    versions = str(feature.versions) if feature is not None and given <= had else line.text(among)
    return Written(versions, diffs)


def _add(held: list[_Held], path: str, edited: Edited, version: frozenset[int], context: int) -> None:
    """Give a version its hunks, in the order of its text."""
    used: list[tuple[int, _Held]] = []
    left = list(edited.edits)
    for part in held:
        ((_, place),) = locate(FileDiff(path, (part.hunk,), path), edited.pristine)
        made = edits_of(part.hunk, place, "") if place is not None else []
        if place is not None and made and all(edit in left for edit in made):
            used.append((place, part))
            left = [edit for edit in left if edit not in made]
    parts = _with_new(used, path, Edited(edited.pristine, tuple(left)), context)
    shared = [part for part in held if any(part is other for _, other in used)]
    in_place = [part for part in parts if part in shared] == shared
    if not in_place or not _makes(FileDiff(path, tuple(part.hunk for part in parts), path), edited):
        parts = _with_new([], path, edited, context)
    behind = len(held)
    for part in reversed(parts):
        part.intervals |= version
        known = next((at for at, other in enumerate(held) if other is part), None)
        if known is None:
            held.insert(behind, part)
        else:
            behind = known


def _with_new(used: Sequence[tuple[int, _Held]], path: str, edited: Edited, context: int) -> list[_Held]:
    """Return used hunks and new hunks in order of their places."""
    new = make_diff(path, edited, context).hunks if edited.edits else ()
    places = [*used, *((max(hunk.source_start - 1, 0), _Held(hunk, frozenset())) for hunk in new)]
    return [part for _, part in sorted(places, key=lambda placed: placed[0])]


def _makes(diff: FileDiff, edited: Edited) -> bool:
    edits: list[Edit] = []
    for hunk, (_, place) in zip(diff.hunks, locate(diff, edited.pristine), strict=True):
        if place is None:
            return False
        edits += edits_of(hunk, place, "")
    return apply_edits(edited.pristine, edits) == edited.result


def carry_again(made: Carried, sources: Iterable[Source]) -> list[Carried]:
    """Apply one version's edits to other versions; raises as `carry`."""
    steps = tuple(Step(make_diff(path, edited)) for path, edited in made.files.items() if edited.edits)
    return carry_all(Change("", made.label, "", steps), sources)


def make_diff(path: str, edited: Edited, context: int = CONTEXT) -> FileDiff:
    """Return a version's diff, whose hunks fit at only one place."""
    lines = edited.pristine.lines
    around = [context] * len(edited.edits)
    while True:
        spans = _together(edited.edits, around, len(lines))
        diff = FileDiff(path, _hunks(edited, spans), path)
        narrow = [
            index
            for index, (_, place) in enumerate(locate(diff, edited.pristine))
            if place is None and diff.hunks[index].source_length < len(lines)
        ]
        if not narrow:
            return diff
        for index in narrow:
            for edit in spans[index].edits:
                around[edit] += 1


class _Span(NamedTuple):
    """The lines of a hunk (0-based, end excluded), and the indexes of its edits."""

    start: int
    end: int
    edits: tuple[int, ...]


def _together(edits: Sequence[Edit], around: Sequence[int], length: int) -> list[_Span]:
    """Group edits into hunks; edits with overlapping context share a hunk."""
    # `around` has the lines of context of each edit.
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
        # An empty side is stated by the line before it.
        start, target = span.start + (before > 0), span.start + shift + (after > 0)
        hunks.append(Hunk(number, start, before, target, after, tuple(body)))
        shift += after - before
    return tuple(hunks)


def render(diffs: Iterable[FileDiff]) -> str:
    """Return the text of a diff file with ranges of versions."""
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
    """Return a diff's file name, such as `worker-utils.diff`."""
    # A package has its folder's name.
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return "-".join(parts[-2:]).replace("_", "-") + ".diff"


def _side(start: int, length: int) -> str:
    return f"{start}" if length == 1 else f"{start},{length}"
