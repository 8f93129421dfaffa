# SPDX-License-Identifier: Apache-2.0
"""Apply a change to the text of a version: exactly, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from packaging.version import Version

from vllm_hwplugin.patching.texts import (
    Edit,
    Hunk,
    HunkVerdict,
    Source,
    Text,
    apply_edits,
    edits_of,
    locate,
    trouble_in,
)

from ._change import Change, blob_name


class Outcome(Enum):
    """The result of a change on a version."""

    APPLIES = "applies"
    UPSTREAM = "upstream"
    CONFLICT = "conflict"


class Edited(NamedTuple):
    """A file of a version, and the edits that fit it."""

    pristine: Text
    edits: tuple[Edit, ...]

    @property
    def result(self) -> str:
        return apply_edits(self.pristine, self.edits)


class Rejected(NamedTuple):
    """A hunk that does not fit, and why."""

    hunk: Hunk
    verdict: HunkVerdict


class Carried(NamedTuple):
    """A change on a version.

    Attributes:
        files: Path -> the file with the edits that fit: all edits if the change applies.
        offset: The largest distance of a hunk from its stated line, in lines.
        reason: One line unless the change applies.
        is_base: Whether the diff was made from exactly this text, according to git's blob ids.
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
    """Apply the change to a version's text.

    A hunk fits if its context and removed lines occur at exactly one place of the file, or at the stated line if git's
    blob id shows that the diff was made from exactly this text. There is no fuzz.

    Args:
        hints: Also look for the nearest place of each hunk that does not fit.

    Raises:
        HwpluginError: The source cannot be read.
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
            verdicts = (verdict for verdict, _ in locate(step.diff, None))
            rejected += map(Rejected, hunks, verdicts)
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
        reason = next(filter(None, (trouble_in(path, edited.result) for path, edited in files.items())), "")
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
        return Outcome.CONFLICT, f"{present} of {total} hunks are in this vLLM already, and the rest are not"
    return Outcome.APPLIES, ""


def _is(name: str, beginning: str) -> bool:
    """Whether a blob id has this prefix of at least seven digits."""
    return len(beginning) >= 7 and name.startswith(beginning)


def carry_all(change: Change, sources: Iterable[Source], *, hints: bool = True) -> list[Carried]:
    """Apply the change to each version, in the order of `sources`.

    A version after one that has the change most likely has it in another form, or reverted it. If the change would fit
    there, it is refused for a person to check, unless the diff was made from exactly that text.

    Raises:
        HwpluginError: A source cannot be read.
    """
    results = [carry(change, source, hints=hints) for source in sources]
    since = min((Version(result.version) for result in results if result.outcome is Outcome.UPSTREAM), default=None)
    for number, result in enumerate(results):
        is_after = since is not None and Version(result.version) > since
        if is_after and result.outcome is Outcome.APPLIES and not result.is_base:
            reason = (
                f"it would fit, but vLLM {since} has the change already: check what later versions made of it; if they "
                "still need it, use `patches edit` and `save`"
            )
            results[number] = result._replace(outcome=Outcome.CONFLICT, reason=reason)
    return results
