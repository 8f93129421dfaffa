# SPDX-License-Identifier: Apache-2.0
"""Apply a change to the text of a version: exactly, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final, NamedTuple, Protocol, runtime_checkable

from packaging.version import Version

from vllm_hwplugin.patching.texts import (
    Edit,
    FileDiff,
    Hunk,
    HunkVerdict,
    Source,
    Text,
    apply_edits,
    edits_of,
    locate,
    trouble_in,
)

from ..nearest import nearest
from ._change import Change, blob_name

#: Lines of context that diffs have.
CONTEXT: Final = 3
# Files of one name in a version that are read to find where a file has moved.
_MOST_READ: Final = 10


class Outcome(Enum):
    """The result of a change on a version."""

    APPLIES = "applies"
    UPSTREAM = "upstream"
    CONFLICT = "conflict"


@runtime_checkable
class Named(Protocol):
    """A source that knows its files."""

    def named(self, name: str) -> list[str]:
        """Return the paths of vLLM's files of this name."""


class Edited(NamedTuple):
    """A file of a version, and the edits that fit it."""

    pristine: Text
    edits: tuple[Edit, ...]

    @property
    def result(self) -> str:
        return apply_edits(self.pristine, self.edits)


class Rejected(NamedTuple):
    """A hunk that does not fit, and why; with so many lines of context it fits (0: with none tried)."""

    hunk: Hunk
    verdict: HunkVerdict
    fits_with: int = 0


class Carried(NamedTuple):
    """A change on a version.

    Attributes:
        files: Path -> the file with the edits that fit: all edits if the change applies.
        offset: The largest distance of a hunk from its stated line, in lines.
        reason: One line unless the change applies or is there.
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


def carry(change: Change, source: Source, *, hints: bool = True, context: int = CONTEXT) -> Carried:
    """Apply the change to a version's text.

    A hunk fits if its context and removed lines occur at exactly one place of the file, or at the stated line if git's
    blob id shows that the diff was made from exactly this text. There is no fuzz.

    Args:
        hints: Also look for the nearest place of each hunk that does not fit, and for fewer lines of context that do.
        context: A hunk that does not fit may have as few lines of context, if it then fits.

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
            absent.append(_moved_to(step.diff, source) if hints else path)
            verdicts = (verdict for verdict, _ in locate(step.diff, None))
            rejected += map(Rejected, hunks, verdicts)
            continue
        pristine, name = Text(text), blob_name(text)
        is_base = is_base and _is(name, step.before)
        edits: list[Edit] = []
        if _is(name, step.after):
            present += len(hunks)
        else:
            for hunk, (verdict, place) in zip(
                hunks, locate(step.diff, pristine, nearest if hints else None), strict=True
            ):
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
                    least, thin = _with_less(step.diff, hunk, pristine) if hints or context < CONTEXT else (0, [])
                    if context <= least and not any(edit.touches(other) for edit in thin for other in edits):
                        edits += thin
                        made += 1
                    else:
                        rejected.append(Rejected(hunk, verdict, least))
        files[path] = Edited(pristine, tuple(sorted(edits)))
    outcome, reason = _judge(made, present, rejected, absent)
    if outcome is Outcome.APPLIES:
        reason = next(filter(None, (trouble_in(path, edited.result) for path, edited in files.items())), "")
        outcome = Outcome.CONFLICT if reason else outcome
    elif rejected and all(hunk.fits_with for hunk in rejected):
        least = min(hunk.fits_with for hunk in rejected)
        if hints and carry(change, source, hints=False, context=least).outcome is Outcome.APPLIES:
            reason += f"; the change fits with {context_lines(least)} (--context {least})"
    return Carried(source.version, source.label, outcome, files, tuple(rejected), offset, reason, is_base)


def context_lines(count: int) -> str:
    """Return a number of lines of context in words."""
    return f"{'one line' if count == 1 else f'{count} lines'} of context"


def _with_less(diff: FileDiff, hunk: Hunk, text: Text) -> tuple[int, list[Edit]]:
    """Return lines of context that make a hunk fit, and its edits."""
    # 0: no fewer lines make it fit one place.
    for lines in range(CONTEXT - 1, 0, -1):
        parts = _thin(hunk, lines)
        places = [place for _, place in locate(FileDiff(diff.path, parts, diff.origin), text)]
        if all(place is not None for place in places):
            return lines, [
                edit for part, place in zip(parts, places, strict=True) for edit in edits_of(part, place or 0, "")
            ]
    return 0, []


def _thin(hunk: Hunk, context: int) -> tuple[Hunk, ...]:
    """Return a hunk with fewer lines of context, maybe as several."""
    spans: list[tuple[int, int]] = []
    for at, (sign, _) in enumerate(hunk.lines):
        if sign != " ":
            start, end = max(at - context, 0), min(at + context + 1, len(hunk.lines))
            if spans and start <= spans[-1][1]:
                start = spans.pop()[0]
            spans.append((start, end))
    parts = []
    for start, end in spans:
        lines = hunk.lines[start:end]
        above, before, after = hunk.lines[:start], *(sum(s != sign for s, _ in lines) for sign in "+-")
        skipped = [sum(s != sign for s, _ in above) for sign in "+-"]
        parts.append(
            Hunk(hunk.number, hunk.source_start + skipped[0], before, hunk.target_start + skipped[1], after, lines)
        )
    return tuple(parts)


def _moved_to(diff: FileDiff, source: Source) -> str:
    """Return a missing file's path, and where its hunks fit."""
    places = source.named(diff.path.rpartition("/")[2]) if isinstance(source, Named) else []
    fits = []
    for path in places if len(places) <= _MOST_READ else ():
        text = source.read(path)
        if text is not None and all(place is not None for _, place in locate(diff, Text(text))):
            fits.append(path)
    return f"{diff.path} (it fits {fits[0]}: use `patches edit`)" if len(fits) == 1 else diff.path


def _judge(made: int, present: int, rejected: list[Rejected], absent: list[str]) -> tuple[Outcome, str]:
    if absent:
        return Outcome.CONFLICT, f"vLLM has no {', '.join(absent)}"
    total = made + present + len(rejected)
    if rejected:
        return Outcome.CONFLICT, f"{len(rejected)} of {total} hunks do not fit"
    if not made:
        return Outcome.UPSTREAM, ""
    if present:
        return Outcome.CONFLICT, f"{present} of {total} hunks are in this vLLM already, and the rest are not"
    return Outcome.APPLIES, ""


def _is(name: str, beginning: str) -> bool:
    """Whether a blob id has this prefix of at least seven digits."""
    return len(beginning) >= 7 and name.startswith(beginning)


def carry_all(
    change: Change, sources: Iterable[Source], *, hints: bool = True, context: int = CONTEXT
) -> list[Carried]:
    """Apply the change to each version, in the order of `sources`.

    A version after one that has the change most likely has it in another form, or reverted it. If the change would fit
    there, it is refused for a person to check, unless the diff was made from exactly that text. If no hunk has a place
    there, the version counts as one that has the change.

    Raises:
        HwpluginError: A source cannot be read.
    """
    return after_upstream([carry(change, source, hints=hints, context=context) for source in sources])


def after_upstream(results: list[Carried]) -> list[Carried]:
    """Judge the results after a version that has the change, see `carry_all`."""
    since = min((Version(result.version) for result in results if result.outcome is Outcome.UPSTREAM), default=None)
    for number, result in enumerate(results):
        is_after = since is not None and Version(result.version) > since
        if is_after and result.outcome is Outcome.APPLIES and not result.is_base:
            reason = (
                f"it would fit, but vLLM {since} has the change already: check what later versions made of it; if they "
                "still need it, use `patches edit` and `save`"
            )
            results[number] = result._replace(outcome=Outcome.CONFLICT, reason=reason)
        elif is_after and _has_no_place(result):
            reason = f"vLLM {since} has the change, and has changed its lines since"
            results[number] = result._replace(outcome=Outcome.UPSTREAM, rejected=(), reason=reason)
    return results


def _has_no_place(result: Carried) -> bool:
    """Whether none of the change's old lines are in the version's files."""
    return (
        bool(result.rejected)
        and all(hunk.verdict.status == "drifted" and not hunk.fits_with for hunk in result.rejected)
        and not any(edited.edits for edited in result.files.values())
    )
