# SPDX-License-Identifier: Apache-2.0
"""Put hunks on a text, exactly: every context and removed line equal, at the stated line or at one other place only.

No fuzz and no partial result. A hunk becomes edits of the lines it really changes, so that features may share context;
edits are found on the pristine text and put together at the end, so that their order does not matter.
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ._model import FileDiff, Hunk, HunkVerdict, Nearest

_WINDOWS_TO_COMPARE = 8


@dataclass(frozen=True, slots=True)
class Edit:
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
    """A pristine text as lines, with an index that finds a block of lines without scanning."""

    def __init__(self, text: str):
        self.text = text
        self.lines = split_lines(text)
        self._at: defaultdict[str, list[int]] = defaultdict(list)
        for number, line in enumerate(self.lines):
            self._at[line].append(number)

    def places(self, block: Sequence[str]) -> list[int]:
        """Every line number (from 0) at which `block` stands."""
        if not block:
            return [0] if not self.lines else []
        offset = min(range(len(block)), key=lambda index: len(self._at.get(block[index], ())))
        starts = (place - offset for place in self._at.get(block[offset], ()))
        wanted = list(block)
        return [start for start in starts if start >= 0 and self.lines[start : start + len(wanted)] == wanted]

    def nearest(self, block: Sequence[str], stated: int) -> Nearest | None:
        """The window most like `block`: each line they share votes for a start, rare lines with more weight."""
        votes: Counter[int] = Counter()
        for offset, line in enumerate(block):
            places = self._at.get(line, ())
            for place in places:
                if place >= offset:
                    votes[place - offset] += 1 / len(places)  # type: ignore[assignment]
        best: tuple[float, int, int] | None = None
        for start, _ in votes.most_common(_WINDOWS_TO_COMPARE):
            window = self.lines[start : start + len(block)]
            ratio = difflib.SequenceMatcher(None, block, window, autojunk=False).ratio()
            rank = (ratio, -abs(start - stated), start)
            best = rank if best is None else max(best, rank)
        if best is None:
            return None
        ratio, _, start = best
        window = self.lines[start : start + len(block)]
        diff = "".join(
            line if line.endswith("\n") else line + "\n"
            for line in difflib.unified_diff(list(block), window, "expected", "found", n=1)
        )
        return Nearest(line=start + 1, similarity=ratio, diff=diff)


def split_lines(text: str) -> list[str]:
    """Lines with their newline, split at "\\n" alone: a form feed or a lone "\\r" inside a line stays where it is."""
    parts = text.split("\n")
    lines = [part + "\n" for part in parts[:-1]]
    return [*lines, parts[-1]] if parts[-1] else lines


def locate(diff: FileDiff, text: Text | None) -> list[tuple[HunkVerdict, int | None]]:
    """Find each hunk of `diff`: the verdict, and its line (from 0) where it can be applied.

    Args:
        text: the file, or None where the version has none.
    """
    found: list[tuple[HunkVerdict, int | None]] = []
    end_of_last = 0
    for hunk in diff.hunks:
        if text is None:
            found.append((_verdict(diff, hunk, "missing"), None))
            continue
        verdict, place = _locate_hunk(diff, hunk, text)
        if place is not None:
            if place < end_of_last:
                # The file's blocks changed order: each hunk is found, but not the change that the diff describes.
                verdict, place = _verdict(diff, hunk, "drifted", nearest=Nearest(place + 1, 1.0, "")), None
            else:
                end_of_last = place + hunk.source_length
        found.append((verdict, place))
    return found


def _locate_hunk(diff: FileDiff, hunk: Hunk, text: Text) -> tuple[HunkVerdict, int | None]:
    before = hunk.before
    stated = hunk.source_start - 1 if before else 0
    places = text.places(before)
    if stated in places:
        return _verdict(diff, hunk, "exact"), stated
    if len(places) == 1:
        return _verdict(diff, hunk, "moved", offset=places[0] - stated), places[0]
    if places:
        return _verdict(diff, hunk, "ambiguous", found_at=tuple(place + 1 for place in places)), None
    after = hunk.after
    if after and len(text.places(after)) == 1:
        return _verdict(diff, hunk, "upstream"), None
    return _verdict(diff, hunk, "drifted", nearest=text.nearest(before, stated)), None


def _verdict(diff: FileDiff, hunk: Hunk, status: str, **details: object) -> HunkVerdict:
    expected = tuple(line.removesuffix("\n") for line in hunk.before)
    return HunkVerdict(diff.path, hunk.index, diff.origin, status, expected=expected, **details)  # type: ignore[arg-type]


def edits_of(hunk: Hunk, place: int, feature: str) -> list[Edit]:
    """The runs of changed lines of a hunk that was found at `place` (from 0)."""
    edits: list[Edit] = []
    line, start, added = place, place, list[str]()
    changed = False
    for sign, text in [*hunk.lines, (" ", "")]:
        if sign == " ":
            if changed:
                edits.append(Edit(start, line, tuple(added), feature))
            line += 1
            start, added, changed = line, [], False
        else:
            changed = True
            if sign == "-":
                line += 1
            else:
                added.append(text)
    return edits


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
        result += text.lines[done : edit.start]
        result += edit.lines
        done = edit.end
    return "".join([*result, *text.lines[done:]])
