# SPDX-License-Identifier: Apache-2.0
"""Exact application of hunks: every context and removed line is equal, at exactly one place of the file.

There is no fuzz and no partial result. A hunk becomes edits of the lines that it changes, so features may share
context. Edits are located in the pristine text and applied together at the end, so their order does not matter.
"""

from __future__ import annotations

import io
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, groupby, takewhile
from typing import NamedTuple

from ._model import FileDiff, Hunk, HunkVerdict, Nearest


class Edit(NamedTuple):
    """A replacement of lines `start` to `end` (0-based, end excluded; equal for an insertion) of the pristine text."""

    start: int
    end: int
    lines: tuple[str, ...]
    feature: str

    def touches(self, other: Edit) -> bool:
        """Whether both change one line, or insert text at the same place."""
        if self.start == self.end or other.start == other.end:
            return self.start <= other.end and other.start <= self.end
        return self.start < other.end and other.start < self.end


class Text:
    """A pristine text with an index of its lines."""

    def __init__(self, text: str):
        self.text = text
        self.lines = split_lines(text)
        # The offset of each line, then the length of the text.
        self._begins = [*accumulate(map(len, self.lines), initial=0)]

    def begin(self, line: int) -> int:
        """Return the offset of line `line` (0-based); at most the text's length."""
        return self._begins[min(line, len(self.lines))]

    def has(self, block: Sequence[str], place: int) -> bool:
        """Whether `block` stands at line `place` (0-based)."""
        if not block:
            return not self.text
        return place >= 0 and self._stands("".join(block), self.begin(place))

    def _stands(self, wanted: str, at: int) -> bool:
        """Whether `wanted`, found at a line's start, ends with a line."""
        return self.text.startswith(wanted, at) and (wanted.endswith("\n") or at + len(wanted) == len(self.text))

    def places(self, block: Sequence[str]) -> list[int]:
        """Return the lines (0-based) where `block` stands, `[0]` if both are empty."""
        if not block:
            return [] if self.text else [0]
        # As text: a search through 300 kB takes less time than indexing the lines.
        wanted, places = "".join(block), []
        at = self.text.find(wanted)
        while at >= 0:
            if (at == 0 or self.text[at - 1] == "\n") and self._stands(wanted, at):
                places.append(bisect_left(self._begins, at))
            at = self.text.find(wanted, at + 1)
        return places


def split_lines(text: str) -> list[str]:
    """Split after "\\n" only: form feeds and lone "\\r" stay in lines."""
    return io.StringIO(text, newline="\n").readlines()


#: Finds the place most like a hunk's lines, near a line (0-based), in a text's lines.
Hint = Callable[[Sequence[str], Sequence[str], int], Nearest | None]


def locate(diff: FileDiff, text: Text | None, hint: Hint | None = None) -> list[tuple[HunkVerdict, int | None]]:
    """Return each hunk's verdict and, if it applies, its line (0-based).

    `text` is None if the version has no such file. `hint` is asked about a hunk that does not fit.
    """
    if text is None:
        return [(_drifted(diff, hunk)._replace(status="missing"), None) for hunk in diff.hunks]
    located = [_locate_hunk(diff, hunk, text, hint) for hunk in diff.hunks]
    end_of_last = 0
    for index, (hunk, (_, place)) in enumerate(zip(diff.hunks, located, strict=True)):
        if place is None:
            continue
        if place < end_of_last:
            # The file's blocks changed order: each hunk fits, but together they are not the diff's change.
            located[index] = _drifted(diff, hunk)._replace(nearest=Nearest(place + 1, 1.0, "")), None
        else:
            end_of_last = place + hunk.source_length
    return located


def _locate_hunk(diff: FileDiff, hunk: Hunk, text: Text, hint: Hint | None) -> tuple[HunkVerdict, int | None]:
    before, after = hunk.before, hunk.after
    stated, verdict = max(hunk.source_start - 1, 0), _drifted(diff, hunk)
    places = text.places(before)
    results = text.places(after) if after else []
    if any(is_open(hunk, text, place) for place in places):
        # Also if one place is the stated line: another copy may stand there now, and Python keeps the last of two
        # definitions of a class or function.
        if len(places) == 1:
            places = sorted({*places, *_elsewhere(hunk, text, places[0], results)})
        if len(places) > 1:
            return verdict._replace(status="ambiguous", found_at=tuple(place + 1 for place in places)), None
        offset = places[0] - stated
        return verdict._replace(status="moved" if offset else "exact", offset=offset), places[0]
    if len(results) == 1 and _is_whole(hunk, text, results[0]):
        return verdict._replace(status="upstream"), None
    return verdict._replace(nearest=hint(text.lines, before, stated) if hint is not None else None), None


def _elsewhere(hunk: Hunk, text: Text, place: int, results: Sequence[int]) -> list[int]:
    """Return where the change is already, since `place` may be a twin."""
    # A hunk that removes one of several equal lines finds its result among these lines.
    within = range(place, place + len(hunk.before) - len(hunk.after) + 1)
    return [result for result in results if result not in within and _is_whole(hunk, text, result)]


def is_open(hunk: Hunk, text: Text, place: int) -> bool:
    """Whether the hunk, whose context stands at `place`, is still to apply.

    A hunk that only adds lines above or below its context still finds that context after it was applied. So the text
    around `place` must not be the hunk's result. A hunk that removes the newline at the end of the file must stand at
    that end, or it would join two lines.
    """
    before, after = hunk.before, hunk.after
    if after and not after[-1].endswith("\n") and place + len(before) != len(text.lines):
        return False
    return not any(
        after[above : above + len(before)] == before and text.has(after, place - above)
        for above in range(len(after) - len(before) + 1)
    )


def _is_whole(hunk: Hunk, text: Text, place: int) -> bool:
    """Whether the hunk's result at `place` shows all of its change.

    The result does not show lines that the hunk removes at its top or bottom edge. Such lines are gone only if the file
    begins or ends there; otherwise other lines stand in their place.
    """
    above = {sign for sign, _ in takewhile(lambda line: line[0] != " ", hunk.lines)}
    below = {sign for sign, _ in takewhile(lambda line: line[0] != " ", reversed(hunk.lines))}
    if above == {"-"} and place != 0:
        return False
    return below != {"-"} or place + len(hunk.after) == len(text.lines)


def _drifted(diff: FileDiff, hunk: Hunk) -> HunkVerdict:
    """Return the verdict on a hunk that fits nowhere."""
    expected = tuple(line.removesuffix("\n") for line in hunk.before)
    return HunkVerdict(diff.path, hunk.number, diff.origin, "drifted", expected=expected)


def edits_of(hunk: Hunk, place: int, feature: str) -> list[Edit]:
    """Return the edits of a hunk at `place` (0-based), without unchanged lines."""
    edits: list[Edit] = []
    line = place
    for is_context, run in groupby(hunk.lines, key=lambda line: line[0] == " "):
        signed = list(run)
        if is_context:
            line += len(signed)
            continue
        removed = [text for sign, text in signed if sign == "-"]
        added = [text for sign, text in signed if sign == "+"]
        head = _common(removed, added)
        tail = _common(removed[head:][::-1], added[head:][::-1])
        start, end = line + head, line + len(removed) - tail
        if start < end or head + tail < len(added):
            edits.append(Edit(start, end, tuple(added[head : len(added) - tail]), feature))
        line += len(removed)
    return edits


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return how many leading lines are equal."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def first_clash(edits: Iterable[Edit]) -> tuple[Edit, Edit] | None:
    """Return the text's first two edits that touch each other, or None."""
    ordered = sorted(edits, key=lambda edit: (edit.start, edit.end))
    for index, edit in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if other.start > edit.end:
                break
            if edit.touches(other):
                return edit, other
    return None


def apply_edits(text: Text, edits: Iterable[Edit]) -> str:
    """Return the text with all edits, which must not touch one another."""
    result: list[str] = []
    done = 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        result += text.text[done : text.begin(edit.start)], *edit.lines
        done = text.begin(edit.end)
    return "".join([*result, text.text[done:]])
