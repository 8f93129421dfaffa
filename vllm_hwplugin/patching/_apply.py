# SPDX-License-Identifier: Apache-2.0
"""Put hunks on a text, exactly: every context and removed line equal, at one place of the file and no other.

No fuzz and no partial result. A hunk becomes edits of the lines it really changes, so that features may share context;
edits are found on the pristine text and put together at the end, so that their order does not matter.
"""

from __future__ import annotations

import io
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby, takewhile
from typing import NamedTuple

from ._model import FileDiff, Hunk, HunkStatus, HunkVerdict, Nearest
from ._nearest import nearest


class Edit(NamedTuple):
    """Replace lines `start` to `end` (from 0, end excluded; equal for an insertion) of the pristine text."""

    start: int
    end: int
    lines: tuple[str, ...]
    feature: str

    def touches(self, other: Edit) -> bool:
        """Whether the two change a line in common, or leave open which text comes first."""
        if self.start == self.end or other.start == other.end:
            return self.start <= other.end and other.start <= self.end
        return self.start < other.end and other.start < self.end


class Text:
    """A pristine text."""

    def __init__(self, text: str):
        self.text = text
        self.lines = split_lines(text)
        # Where each line begins, and behind them the end of the text.
        self._begins = [*accumulate(map(len, self.lines), initial=0)]

    def begin(self, line: int) -> int:
        """Where line `line` (from 0) begins; of a line that there is not, the end of the text."""
        return self._begins[min(line, len(self.lines))]

    def has(self, block: Sequence[str], place: int) -> bool:
        """Whether `block` stands at line `place` (from 0)."""
        if not block:
            return not self.text
        return place >= 0 and self._stands("".join(block), self.begin(place))

    def _stands(self, wanted: str, at: int) -> bool:
        """Whether whole lines, as which `wanted` begins, stand at `at` and end there as whole lines."""
        return self.text.startswith(wanted, at) and (wanted.endswith("\n") or at + len(wanted) == len(self.text))

    def places(self, block: Sequence[str]) -> list[int]:
        """Every line number (from 0) at which `block` stands; an empty block stands in an empty text only."""
        if not block:
            return [] if self.text else [0]
        # As text: looking through a file of 300 kB for a hunk takes less time than an index of its lines takes to make.
        wanted, found = "".join(block), []
        at = self.text.find(wanted)
        while at >= 0:
            if (at == 0 or self.text[at - 1] == "\n") and self._stands(wanted, at):
                found.append(bisect_left(self._begins, at))
            at = self.text.find(wanted, at + 1)
        return found


def split_lines(text: str) -> list[str]:
    """Lines with their newline, split at "\\n" alone: a form feed or a lone "\\r" inside a line stays where it is."""
    return io.StringIO(text, newline="\n").readlines()


def locate(diff: FileDiff, text: Text | None, *, hints: bool = True) -> list[tuple[HunkVerdict, int | None]]:
    """Find each hunk of `diff`: the verdict, and its line (from 0) where it can be applied.

    Args:
        text: the file, or None where the version has none.
        hints: look for the nearest place of a hunk that is not found.
    """
    if text is None:
        return [(_verdict(diff, hunk, "missing"), None) for hunk in diff.hunks]
    found = [_locate_hunk(diff, hunk, text, hints) for hunk in diff.hunks]
    end_of_last = 0
    for index, (hunk, (_, place)) in enumerate(zip(diff.hunks, found, strict=True)):
        if place is None:
            continue
        if place < end_of_last:
            # The file's blocks changed order: each hunk is found, but not the change that the diff describes.
            found[index] = _verdict(diff, hunk, "drifted", nearest=Nearest(place + 1, 1.0, "")), None
        else:
            end_of_last = place + hunk.source_length
    return found


def _locate_hunk(diff: FileDiff, hunk: Hunk, text: Text, hints: bool) -> tuple[HunkVerdict, int | None]:
    before, after = hunk.before, hunk.after
    stated = max(hunk.source_start - 1, 0)
    places = text.places(before)
    results = text.places(after) if after else []
    if any(is_open(hunk, text, place) for place in places):
        # Also where one of them is the stated line: what stands there may be another copy of what stood there,
        # and of two copies of a class or function it is the last that Python keeps.
        if len(places) == 1:
            places = sorted({*places, *_elsewhere(hunk, text, places[0], results)})
        if len(places) > 1:
            found_at = tuple(place + 1 for place in places)
            return _verdict(diff, hunk, "ambiguous", found_at=found_at), None
        offset = places[0] - stated
        return _verdict(diff, hunk, "moved" if offset else "exact", offset=offset), places[0]
    if len(results) == 1 and _is_whole(hunk, text, results[0]):
        return _verdict(diff, hunk, "upstream"), None
    return _verdict(diff, hunk, "drifted", nearest=nearest(text.lines, before, stated) if hints else None), None


def _elsewhere(hunk: Hunk, text: Text, place: int, results: Sequence[int]) -> list[int]:
    """Where the text has the change already, so that the only open place may be the twin of the one that was meant."""
    # What is left of several equal lines of which one goes stands among these very lines.
    within = range(place, place + len(hunk.before) - len(hunk.after) + 1)
    return [result for result in results if result not in within and _is_whole(hunk, text, result)]


def is_open(hunk: Hunk, text: Text, place: int) -> bool:
    """Whether the hunk, whose context stands at `place`, can and need be applied there.

    A hunk that only adds lines above or below its context finds that context again after it was applied, so the text
    around `place` must not be what the hunk would make of it. And one that takes away the newline at the end of the
    file has to stand at that end, or it would join two lines.
    """
    before, after = hunk.before, hunk.after
    if after and not after[-1].endswith("\n") and place + len(before) != len(text.lines):
        return False
    return not any(
        after[above : above + len(before)] == before and text.has(after, place - above)
        for above in range(len(after) - len(before) + 1)
    )


def _is_whole(hunk: Hunk, text: Text, place: int) -> bool:
    """Whether the hunk's result, which stands at `place`, shows all of its change.

    Of lines that a hunk takes away at its top or bottom edge, the result shows nothing: they are gone only where the
    file itself begins or ends there, else something else stands in their place.
    """
    above = {sign for sign, _ in takewhile(lambda line: line[0] != " ", hunk.lines)}
    below = {sign for sign, _ in takewhile(lambda line: line[0] != " ", reversed(hunk.lines))}
    if above == {"-"} and place != 0:
        return False
    return below != {"-"} or place + len(hunk.after) == len(text.lines)


def _verdict(
    diff: FileDiff,
    hunk: Hunk,
    status: HunkStatus,
    *,
    offset: int = 0,
    nearest: Nearest | None = None,
    found_at: tuple[int, ...] = (),
) -> HunkVerdict:
    expected = tuple(line.removesuffix("\n") for line in hunk.before)
    return HunkVerdict(diff.path, hunk.number, diff.origin, status, offset, nearest, expected, found_at)


def edits_of(hunk: Hunk, place: int, feature: str) -> list[Edit]:
    """The runs of changed lines of a hunk that was found at `place` (from 0), without the lines that they keep."""
    edits: list[Edit] = []
    line = place
    for is_context, run in groupby(hunk.lines, key=lambda item: item[0] == " "):
        items = list(run)
        if is_context:
            line += len(items)
            continue
        removed = [text for sign, text in items if sign == "-"]
        added = [text for sign, text in items if sign == "+"]
        head = _common(removed, added)
        tail = _common(removed[head:][::-1], added[head:][::-1])
        start, end = line + head, line + len(removed) - tail
        if start < end or head + tail < len(added):
            edits.append(Edit(start, end, tuple(added[head : len(added) - tail]), feature))
        line += len(removed)
    return edits


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many leading lines two runs have in common."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def first_clash(edits: Iterable[Edit]) -> tuple[Edit, Edit] | None:
    """The first two edits, in the text's order, that touch each other."""
    ordered = sorted(edits, key=lambda edit: (edit.start, edit.end))
    for index, edit in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if other.start > edit.end:
                break
            if edit.touches(other):
                return edit, other
    return None


def apply_edits(text: Text, edits: Iterable[Edit]) -> str:
    """The text with every edit made. The edits must not touch one another."""
    result: list[str] = []
    done = 0
    for edit in sorted(edits, key=lambda item: (item.start, item.end)):
        result += text.text[done : text.begin(edit.start)], *edit.lines
        done = text.begin(edit.end)
    return "".join([*result, text.text[done:]])
