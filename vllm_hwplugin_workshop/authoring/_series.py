# SPDX-License-Identifier: Apache-2.0
"""A series of changes, each made on the result of the changes before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from vllm_hwplugin.patching.texts import Edit, Source, Text

from ._carry import CONTEXT, Carried, Edited, Named, Outcome, after_upstream, carry
from ._change import Change
from ._worktree import edits_between


class _Result(NamedTuple):
    """A version with the changes before."""

    source: Source
    texts: Mapping[str, str]

    @property
    def version(self) -> str:
        return self.source.version

    @property
    def label(self) -> str:
        return self.source.label

    def read(self, path: str) -> str | None:
        text = self.texts.get(path)
        return self.source.read(path) if text is None else text

    def named(self, name: str) -> list[str]:
        return self.source.named(name) if isinstance(self.source, Named) else []


def carry_series(
    changes: Sequence[Change], sources: Iterable[Source], *, together: bool, context: int = CONTEXT
) -> list[list[Carried]]:
    """Apply changes in order to each version, as `carry_all` does.

    Args:
        together: As one change. Otherwise a change that stands on lines of an earlier one is refused, because features
            are applied to vLLM's own text.

    Returns:
        For each change (or the one change) its result on each version, in the order of `sources`.
    """
    stacks = [_stack(changes, source, together=together, context=context) for source in sources]
    columns = [after_upstream(list(results)) for results in zip(*stacks, strict=True)]
    for earlier, column in pairwise(columns):
        for number, result in enumerate(column):
            if result.outcome is Outcome.APPLIES and earlier[number].outcome is Outcome.CONFLICT:
                reason = "an earlier change of the series does not fit"
                column[number] = result._replace(outcome=Outcome.CONFLICT, reason=reason)
    return columns


def _stack(changes: Sequence[Change], source: Source, *, together: bool, context: int) -> list[Carried]:
    texts: dict[str, str] = {}
    done: dict[str, tuple[Edit, ...]] = {}
    results = []
    for change in changes:
        result = carry(change, _Result(source, texts), context=context)
        if result.outcome is Outcome.APPLIES:
            own = {path: _below(edited.edits, done.get(path, ())) for path, edited in result.files.items()}
            for path, edited in result.files.items():
                texts[path] = edited.result
                done[path] = edits_between(_lines(source, path), Text(edited.result).lines)
            if any(edits is None for edits in own.values()) and not together:
                reason = "it changes lines of an earlier change of the series: make one feature of all (--one)"
                result = result._replace(outcome=Outcome.CONFLICT, reason=reason)
            files = {path: Edited(Text(source.read(path) or ""), edits or ()) for path, edits in own.items()}
            result = result._replace(files=files)
        results.append(result)
    return [_as_one(results, source, texts)] if together else results


def _as_one(results: Sequence[Carried], source: Source, texts: Mapping[str, str]) -> Carried:
    """Return one change's result with the texts of all."""
    first = next((result for result in results if result.outcome is Outcome.CONFLICT), results[0])
    applied = [result for result in results if result.outcome is Outcome.APPLIES]
    files = {
        path: Edited(Text(source.read(path) or ""), edits_between(_lines(source, path), Text(text).lines))
        for path, text in texts.items()
    }
    if first.outcome is Outcome.CONFLICT or not applied:
        return first._replace(files=files, rejected=tuple(hunk for result in results for hunk in result.rejected))
    return applied[0]._replace(
        files=files,
        offset=max(result.offset for result in applied),
        is_base=all(result.is_base for result in applied),
    )


def _below(edits: Sequence[Edit], earlier: Sequence[Edit]) -> tuple[Edit, ...] | None:
    """Return edits of the text before `earlier`; None if they touch it."""
    below: list[Edit] = []
    for edit in edits:
        shift = 0
        for other in earlier:
            start = other.start + shift
            if Edit(start, start + len(other.lines), (), "").touches(edit):
                return None
            if start >= edit.end:
                break
            shift += len(other.lines) - (other.end - other.start)
        below.append(edit._replace(start=edit.start - shift, end=edit.end - shift))
    if any(edit.touches(other) for edit in below for other in earlier):
        return None
    return tuple(below)


def _lines(source: Source, path: str) -> list[str]:
    return Text(source.read(path) or "").lines
