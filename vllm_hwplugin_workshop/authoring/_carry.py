# SPDX-License-Identifier: Apache-2.0
"""A change, made to the text of one version: exactly, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from packaging.version import Version

from vllm_hwplugin.patching import Edit, Hunk, HunkVerdict, Source, Text, apply_edits, edits_of, locate, trouble_in

from ._change import Change, blob_name


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
        reason: one line where it does not simply apply.
        is_base: whether the diff was made from this very text, as git's names of its files say.
    """

    version: str
    label: str
    outcome: Outcome
    files: dict[str, Edited]
    rejected: tuple[Rejected, ...] = ()
    offset: int = 0
    reason: str = ""
    is_base: bool = False


def carry(change: Change, source: Source, *, hints: bool = True) -> Carried:
    """Make the change to a version's text.

    A hunk is made where its context and removed lines stand: at one place of the file alone, or at its stated line
    where git's name says that this is the very text that the diff was made from. Nothing else is tried.

    Args:
        hints: look for the nearest place of each hunk that is not found.

    Raises:
        HwpluginError: the source cannot be read.
    """
    files: dict[str, Edited] = {}
    rejected: list[Rejected] = []
    absent: list[str] = []
    made = present = offset = 0
    is_base = True
    for step in change.steps:
        path, hunks = step.diff.path, step.diff.hunks
        text = source.read(path)
        if text is None:
            absent.append(path)
            rejected += [Rejected(hunk, item) for hunk, (item, _) in zip(hunks, locate(step.diff, None), strict=True)]
            continue
        pristine, name = Text(text), blob_name(text)
        is_base = is_base and _is(name, step.before)
        edits: list[Edit] = []
        if _is(name, step.after):
            present += len(hunks)
        else:
            for hunk, (verdict, place) in zip(hunks, locate(step.diff, pristine, hints=hints), strict=True):
                stated = max(hunk.source_start - 1, 0)
                if place is None and _is(name, step.before) and pristine.has(hunk.before, stated):
                    edits += edits_of(hunk, stated, "")
                    made += 1
                elif place is not None:
                    edits += edits_of(hunk, place, "")
                    made += 1
                    offset = max(offset, abs(verdict.offset))
                elif verdict.status == "upstream":
                    present += 1
                else:
                    rejected.append(Rejected(hunk, verdict))
        files[path] = Edited(pristine, tuple(edits))
    outcome, reason = _judge(made, present, rejected, absent)
    if outcome is Outcome.APPLIES:
        reason = next(filter(None, (trouble_in(path, item.result) for path, item in files.items())), "")
        outcome = Outcome.CONFLICT if reason else outcome
    return Carried(source.version, source.label, outcome, files, tuple(rejected), offset, reason, is_base)


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


def carry_all(change: Change, sources: Iterable[Source], *, hints: bool = True) -> list[Carried]:
    """The change on each version, in the order of `sources`.

    A version that comes after one that has the change has most likely got it in another form, or was rid of it: where
    it would fit there, it is refused for a person to look, unless the diff was made from that very text.

    Args:
        hints: as for `carry`.

    Raises:
        HwpluginError: a source cannot be read.
    """
    found = [carry(change, source, hints=hints) for source in sources]
    since = min((Version(item.version) for item in found if item.outcome is Outcome.UPSTREAM), default=None)
    for number, item in enumerate(found):
        is_after = since is not None and Version(item.version) > since
        if is_after and item.outcome is Outcome.APPLIES and not item.is_base:
            reason = (
                f"it would fit, but vLLM {since} has the change already: look what became of it since; if it is still "
                "needed, `patches edit` and `save` make it"
            )
            found[number] = item._replace(outcome=Outcome.CONFLICT, reason=reason)
    return found
