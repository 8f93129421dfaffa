# SPDX-License-Identifier: Apache-2.0
"""A change, made to the text of one version: exactly, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from vllm_hwplugin.patching import (
    Edit,
    FileDiff,
    Hunk,
    HunkStatus,
    HunkVerdict,
    Source,
    Text,
    apply_edits,
    edits_of,
    is_open,
    locate,
    trouble_in,
)

from ._change import Change, Step, blob_name


class Outcome(Enum):
    """What became of a change on one version."""

    APPLIES = "applies"
    UPSTREAM = "upstream"
    CONFLICT = "conflict"


class Edited(NamedTuple):
    """A file of one version, and the edits of its text that could be made."""

    pristine: Text
    edits: tuple[Edit, ...]

    @property
    def result(self) -> str:
        return apply_edits(self.pristine, self.edits)


class Rejected(NamedTuple):
    """A hunk that was not made, and why."""

    hunk: Hunk
    verdict: HunkVerdict


class Carried(NamedTuple):
    """A change on one version.

    Attributes:
        files: by path, with the hunks that could be made: all of them where the change applies.
        offset: of its hunks the furthest from its stated line, in lines.
        verified: the files whose text that came out is, by git's name of it, the one that the diff was made to.
        reason: one line where it does not simply apply.
    """

    version: str
    label: str
    outcome: Outcome
    files: dict[str, Edited]
    rejected: tuple[Rejected, ...] = ()
    offset: int = 0
    verified: tuple[str, ...] = ()
    reason: str = ""

    @property
    def is_verified(self) -> bool:
        """Whether that is so of all its files."""
        return bool(self.verified) and len(self.verified) == len(self.files)


class _File:
    """A file on its way through the steps. Each line knows which one of the pristine text it is."""

    def __init__(self, text: str) -> None:
        self.pristine = Text(text)
        self._lines: list[tuple[str, int | None]] = [(line, at) for at, line in enumerate(self.pristine.lines)]
        self.text = self.pristine

    def make(self, edits: Sequence[Edit]) -> None:
        for edit in sorted(edits, key=lambda item: (item.start, item.end), reverse=True):
            self._lines[edit.start : edit.end] = [(line, None) for line in edit.lines]
        self.text = Text("".join(line for line, _ in self._lines))

    def edits(self) -> tuple[Edit, ...]:
        """All that was made, as edits of the pristine text."""
        found: list[Edit] = []
        added: list[str] = []
        done = 0
        pristine = self.pristine.lines
        for line, origin in [*self._lines, ("", len(pristine))]:
            if origin is None:
                added.append(line)
                continue
            edit = trimmed(Edit(done, origin, tuple(added), ""), pristine)
            if edit is not None:
                found.append(edit)
            added, done = [], origin + 1
        return tuple(found)


def trimmed(edit: Edit, lines: Sequence[str]) -> Edit | None:
    """The edit without lines at its ends that stay as they are; None where nothing is left of it."""
    start, end, added = edit.start, edit.end, edit.lines
    while start < end and added and lines[start] == added[0]:
        start, added = start + 1, added[1:]
    while start < end and added and lines[end - 1] == added[-1]:
        end, added = end - 1, added[:-1]
    return edit._replace(start=start, end=end, lines=added) if start < end or added else None


def carry(change: Change, source: Source, *, hints: bool = True) -> Carried:
    """Make the change to a version's text.

    A hunk is made where its context and removed lines stand: at one place of the file alone, at the one of several
    that the order of the file's other hunks leaves, or at its stated line where git's name says that this is the very
    text that the diff was made from. Nothing else is tried.

    Args:
        hints: look for the nearest place of each hunk that is not found.

    Raises:
        HwpluginError: the source cannot be read.
    """
    files: dict[str, _File] = {}
    rejected: list[Rejected] = []
    made = present = offset = 0
    verified: dict[str, bool] = {}
    absent: dict[str, None] = {}
    for step in change.steps:
        path = step.diff.path
        if path not in files:
            text = source.read(path)
            if text is None:
                absent[path] = None
                verdicts = locate(step.diff, None)
                rejected += [Rejected(hunk, item) for hunk, (item, _) in zip(step.diff.hunks, verdicts, strict=True)]
                continue
            files[path] = _File(text)
        file = files[path]
        name = blob_name(file.text.text)
        if _is(name, step.after):
            present += len(step.diff.hunks)
            continue
        edits: list[Edit] = []
        for hunk, (verdict, place) in zip(step.diff.hunks, _places(step, file.text, name, hints), strict=True):
            if place is not None:
                edits += edits_of(hunk, place, "")
                made += 1
                offset = max(offset, abs(verdict.offset))
            elif verdict.status == "upstream":
                present += 1
            else:
                rejected.append(Rejected(hunk, verdict))
        file.make(edits)
        verified[path] = _is(blob_name(file.text.text), step.after)
    outcome, reason = _judge(made, present, rejected, list(absent))
    done = {path: Edited(file.pristine, file.edits()) for path, file in files.items()}
    if outcome is Outcome.APPLIES:
        reason = next(filter(None, (trouble_in(path, item.result) for path, item in done.items())), "")
        if not any(item.edits for item in done.values()):
            reason = "its commits undo one another, and leave every line as it is"
        outcome = Outcome.CONFLICT if reason else outcome
    same = tuple(path for path, whole in verified.items() if whole)
    return Carried(source.version, source.label, outcome, done, tuple(rejected), offset, same, reason)


def _judge(made: int, present: int, rejected: list[Rejected], absent: list[str]) -> tuple[Outcome, str]:
    if absent:
        return Outcome.CONFLICT, f"vLLM has no {', '.join(absent)}"
    total = made + present + len(rejected)
    if rejected:
        return Outcome.CONFLICT, f"{len(rejected)} of {total} hunks do not fit"
    if not made:
        return Outcome.UPSTREAM, "this vLLM has the change already"
    if present:
        return Outcome.CONFLICT, f"{present} of {total} hunks are in this vLLM already, and the others are not"
    return Outcome.APPLIES, ""


def _is(name: str, beginning: str) -> bool:
    """Whether git's name begins so; a diff states at least seven digits of it."""
    return len(beginning) >= 7 and name.startswith(beginning)


def _places(step: Step, text: Text, name: str, hints: bool) -> list[tuple[HunkVerdict, int | None]]:
    """As `locate`, with what is known besides of hunks that fit in several places."""
    found = locate(step.diff, text, hints=hints)
    base = _is(name, step.before)
    for index, (hunk, (verdict, place)) in enumerate(zip(step.diff.hunks, found, strict=True)):
        if place is not None:
            continue
        stated = max(hunk.source_start - 1, 0)
        if base and text.has(hunk.before, stated):
            found[index] = verdict._replace(status="exact", offset=0, nearest=None, found_at=()), stated
        elif verdict.status == "ambiguous" and len(left := _between(step.diff, index, found)) == 1:
            (only,) = left
            if text.has(hunk.before, only) and is_open(hunk, text, only):
                status: HunkStatus = "exact" if only == stated else "moved"
                found[index] = verdict._replace(status=status, offset=only - stated, found_at=()), only
    return found


def _between(diff: FileDiff, index: int, found: Sequence[tuple[HunkVerdict, int | None]]) -> list[int]:
    """The places (from 0) of a hunk that lie behind those before it and before those behind it."""
    before = [
        place + hunk.source_length
        for hunk, (_, place) in zip(diff.hunks[:index], found[:index], strict=True)
        if place is not None
    ]
    behind = [place for _, place in found[index + 1 :] if place is not None]
    low, high = max(before, default=0), min(behind, default=None)
    length = diff.hunks[index].source_length
    return [
        line - 1 for line in found[index][0].found_at if line - 1 >= low and (high is None or line - 1 + length <= high)
    ]
