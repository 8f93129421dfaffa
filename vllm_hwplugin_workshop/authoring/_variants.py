# SPDX-License-Identifier: Apache-2.0
"""One diff for as many versions as it fits, and the ranges of versions that make variants of a feature.

A diff is made anew from the text of the oldest version of its group. Its context is three lines, and more where that is
needed to stand at one place alone, in each version of the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from packaging.version import Version

from vllm_hwplugin.patching import (
    SUPPORTED,
    Edit,
    FileDiff,
    Hunk,
    Source,
    Text,
    apply_edits,
    edits_of,
    is_supported,
    locate,
)
from vllm_hwplugin.versions import UNKNOWN_FROM

from ._carry import Carried, Edited, Outcome, carry
from ._change import Change, Step

_CONTEXT: Final = 3
# On the older and on the newer side.
_TRIED: Final = 2


class MadeDiff(NamedTuple):
    """The diff of one file for a group of versions; `versions[0]` is the one that it was made from."""

    diff: FileDiff
    versions: tuple[str, ...]


class MadeVariant(NamedTuple):
    """A range of versions, and the diffs of its files: keys of the mapping that `make_variants` returns."""

    versions: str
    diffs: tuple[str, ...]
    members: tuple[str, ...]


def make_variants(
    carried: Sequence[Carried], *, numbered: bool = False
) -> tuple[tuple[MadeVariant, ...], dict[str, FileDiff]]:
    """Group the versions that a change applies to.

    Args:
        carried: of each version that it applies to, in any order.
        numbered: each diff's name has its oldest version; otherwise only those of files that have several diffs.

    Returns:
        The variants, oldest first, and each diff by its file name.
    """
    in_order = sorted(carried, key=lambda item: Version(item.version))
    paths = sorted({path for item in in_order for path, edited in item.files.items() if edited.edits})
    names = short_names(paths)
    diffs: dict[str, FileDiff] = {}
    used: dict[str, list[str]] = {item.version: [] for item in in_order}
    for path in paths:
        groups = _groups([(item.version, item.files[path]) for item in in_order if item.files[path].edits], path)
        for group in groups:
            alone = len(groups) == 1 and not numbered
            name = f"{names[path]}{'' if alone else f'-{_spoken(group.versions[0])}'}.diff"
            diffs[name] = group.diff._replace(origin=name)
            for version in group.versions:
                used[version].append(name)
    variants = [
        MadeVariant(text, key, tuple(members))
        for key, versions in _by_diffs(used)
        for text, members in ranges(versions)
    ]
    return tuple(sorted(variants, key=lambda item: Version(item.members[0]))), diffs


def _by_diffs(used: Mapping[str, list[str]]) -> list[tuple[tuple[str, ...], list[str]]]:
    found: dict[tuple[str, ...], list[str]] = {}
    for version, names in used.items():
        found.setdefault(tuple(names), []).append(version)
    return list(found.items())


def carry_all(change: Change, sources: Sequence[Source], *, hints: bool = True) -> list[Carried]:
    """The change on each version, in the order of `sources`.

    Where it fits in several places, and where a commit of a series does not fit by itself, it is tried once more as it
    looks on the nearest versions that it applies to: in one diff a file, with context that means one place of both.
    A version that comes after one that has the change has most likely got it in another form, or was rid of it: where
    it would fit there, it is refused for a person to look, unless the diff names that very text.

    Args:
        hints: as for `carry`.

    Raises:
        HwpluginError: a source cannot be read.
    """
    found = [carry(change, source, hints=hints) for source in sources]
    by_age = sorted(range(len(found)), key=lambda index: Version(found[index].version))
    good = [place for place, index in enumerate(by_age) if found[index].outcome is Outcome.APPLIES]
    for place, index in enumerate(by_age):
        if _is_open(change, found[index]):
            near = sorted(good, key=lambda other: abs(other - place))[:_TRIED]
            for base in (found[by_age[other]] for other in near):
                again = _again(change, base, found[index], sources[index])
                if again.outcome is not Outcome.CONFLICT:
                    found[index] = again
                    break
    since = next((found[index].version for index in by_age if found[index].outcome is Outcome.UPSTREAM), None)
    return found if since is None else [_not_after(item, since) for item in found]


def _not_after(item: Carried, since: str) -> Carried:
    if item.outcome is not Outcome.APPLIES or Version(item.version) < Version(since) or item.is_verified:
        return item
    reason = (
        f"it would fit, but vLLM {since} has the change already: look what became of it since; if it is still needed, "
        "`patches edit` and `save` make it"
    )
    return item._replace(outcome=Outcome.CONFLICT, reason=reason)


def _is_open(change: Change, refused: Carried) -> bool:
    """Whether another diff of the same change may say more than the one that was refused."""
    if refused.outcome is not Outcome.CONFLICT or len(refused.files) != len(change.paths):
        return False
    series = len(change.steps) > len(change.paths)
    return series or any(item.verdict.status == "ambiguous" for item in refused.rejected)


def _again(change: Change, base: Carried, refused: Carried, source: Source) -> Carried:
    steps = tuple(
        Step(make_diff(path, [edited], [refused.files[path].pristine]) or _alone(path, edited))
        for path, edited in base.files.items()
        if edited.edits
    )
    return carry(change._replace(steps=steps), source, hints=False)


def carry_again(made: Carried, sources: Sequence[Source]) -> list[Carried]:
    """What was made on one version, on each of others.

    Raises:
        HwpluginError: a source cannot be read.
    """
    steps = tuple(Step(_alone(path, edited)) for path, edited in made.files.items() if edited.edits)
    return carry_all(Change("", made.label, "", steps), sources)


def _groups(edited: Sequence[tuple[str, Edited]], path: str) -> list[MadeDiff]:
    made: list[MadeDiff] = []
    members: list[Edited] = []
    for version, item in edited:
        joined = make_diff(path, [*members, item]) if members else None
        if joined is not None:
            made[-1] = MadeDiff(joined, (*made[-1].versions, version))
            members.append(item)
        else:
            members = [item]
            made.append(MadeDiff(_alone(path, item), (version,)))
    return made


def _alone(path: str, item: Edited) -> FileDiff:
    diff = make_diff(path, [item])
    # A hunk that is as long as the file stands at one place.
    assert diff is not None
    return diff


def make_diff(path: str, versions: Sequence[Edited], also: Sequence[Text] = ()) -> FileDiff | None:
    """The diff that makes from each version's text that version's result, and could mean no other place of it.

    It is made from the first of them. None where the others are too different.

    Args:
        also: texts that it has to fit as well, whatever comes of them.
    """
    base = versions[0]
    around = [_CONTEXT] * len(base.edits)
    while True:
        members = _together(base.edits, around, len(base.pristine.lines))
        hunks = _hunks(base, members)
        diff = FileDiff(path, hunks, path)
        narrow: set[int] = set()
        for text in (*(item.pristine for item in versions), *also):
            for index, (verdict, place) in enumerate(locate(diff, text, hints=False)):
                # What a hunk adds may stand beside its place already; a wider one is told from that.
                if verdict.status in ("ambiguous", "upstream") or (place is None and text is base.pristine):
                    narrow.add(index)
                elif place is None:
                    return None
        if not narrow:
            return diff if all(_makes(diff, item) for item in versions) else None
        for index in narrow:
            if hunks[index].source_length == len(base.pristine.lines):
                return None
            for edit in members[index].edits:
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
        start, end = max(edit.start - lines, 0), min(edit.end + lines, length)
        if spans and start <= spans[-1].end:
            last = spans.pop()
            spans.append(_Span(min(start, last.start), max(end, last.end), (*last.edits, index)))
            while len(spans) > 1 and spans[-1].start <= spans[-2].end:
                last = spans.pop()
                first = spans.pop()
                spans.append(_Span(first.start, max(first.end, last.end), first.edits + last.edits))
        else:
            spans.append(_Span(start, end, (index,)))
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


def _makes(diff: FileDiff, item: Edited) -> bool:
    edits = [
        edit
        for hunk, (_, place) in zip(diff.hunks, locate(diff, item.pristine, hints=False), strict=True)
        if place is not None
        for edit in edits_of(hunk, place, "")
    ]
    return apply_edits(item.pristine, edits) == item.result


def render(diff: FileDiff) -> str:
    """The diff as `diff -u` would write it."""
    parts = [f"--- a/{diff.path}\n+++ b/{diff.path}\n"]
    for hunk in diff.hunks:
        before, after = _side(hunk.source_start, hunk.source_length), _side(hunk.target_start, hunk.target_length)
        parts.append(f"@@ -{before} +{after} @@\n")
        for sign, line in hunk.lines:
            parts.append(sign + line if line.endswith("\n") else f"{sign}{line}\n\\ No newline at end of file\n")
    return "".join(parts)


def _side(start: int, length: int) -> str:
    return f"{start}" if length == 1 else f"{start},{length}"


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """For each path as much of its end as tells it from the others: `worker-utils` beside `core-utils`."""
    parts = {path: [part.strip("_") for part in path.removesuffix(".py").split("/")] for path in paths}
    names: dict[str, str] = {}
    for path, own in parts.items():
        # A package is not called `init`.
        count = 2 if path.endswith("/__init__.py") else 1
        others = [other for item, other in parts.items() if item != path]
        while count < len(own) and any(_joined(other, count) == _joined(own, count) for other in others):
            count += 1
        names[path] = _joined(own, count)
    return names


def _joined(parts: Sequence[str], count: int) -> str:
    return "-".join(parts[-count:]).replace("_", "-")


def ranges(versions: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Version ranges that hold these versions and no other supported one.

    A version that is not supported is spelled out, because a range says nothing of it.
    """
    listed = {public(version) for version in versions if is_supported(version)}
    runs: list[list[str]] = []
    for number, version in enumerate(SUPPORTED):
        if version in listed:
            if runs and runs[-1][-1] == SUPPORTED[number - 1]:
                runs[-1].append(version)
            else:
                runs.append([version])
    found = []
    for run in runs:
        behind = SUPPORTED.index(run[-1]) + 1
        end = SUPPORTED[behind] if behind < len(SUPPORTED) else f"{UNKNOWN_FROM}.0"
        found.append((f">={run[0]},<{end}", run))
    return [*found, *((f"=={version}", [version]) for version in versions if not is_supported(version))]


def public(version: str) -> str:
    """The name that `SUPPORTED` has for a version, however it is spelt and whoever built it."""
    wanted = Version(Version(version).public)
    return next((item for item in SUPPORTED if Version(item) == wanted), version)


def _spoken(version: str) -> str:
    """`0.24` for 0.24.0, as the diffs of a feature are named."""
    version = public(version)
    return version.removesuffix(".0") if version.count(".") == 2 else version
