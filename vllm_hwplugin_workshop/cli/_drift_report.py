# SPDX-License-Identifier: Apache-2.0
"""The result of the drift check as data, lines, JSON, a page and an exit status."""

from __future__ import annotations

import contextlib
import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from packaging.version import Version

from vllm_hwplugin.base.versions import SUPPORTED, is_version
from vllm_hwplugin.patching import VLLM, Catalogue, Feature
from vllm_hwplugin.patching.texts import (
    FeatureVerdict,
    HunkVerdict,
    Source,
    Status,
    Text,
    blob_of,
    locate,
    target_name,
)

from ..authoring import where_it_stands
from ..sources import SourceError
from ..verdicts import evaluate_as, evaluate_together, last_listed, told_apart
from ._lines import inert, note
from .catalogues import condition_of

EXPECTED = (Status.APPLIES, Status.UPSTREAM, Status.NOT_NEEDED)

_WORDS = {
    Status.UPSTREAM: "upstream",
    Status.NOT_NEEDED: "not needed",
    Status.CONFLICT: "conflict",
    Status.OTHER_TEXT: "other text",
    Status.OTHER_CLASS: "other class",
    Status.TARGET_MISSING: "target missing",
    Status.UNREADABLE: "could not read",
    Status.UNLISTED: "unlisted",
    Status.NO_PYTHON: "no Python",
}

_FITS = "✅"
_MADE_BY = "Made by `vllm-hwplugin drift --all --markdown docs/compatibility.md`; do not edit."


class Changed(NamedTuple):
    """A file that features rely on, with another text than in the last listed version.

    Attributes:
        diff: The diff from the last version's text, without heading; None: that text could not be read.
    """

    path: str
    features: tuple[str, ...]
    diff: tuple[str, ...] | None

    @property
    def lines(self) -> str:
        """Numbers of added and removed lines, such as "+3 -1"."""
        if self.diff is None:
            return "changed"
        added, removed = (sum(line.startswith(sign) for line in self.diff) for sign in "+-")
        return f"+{added} -{removed}"


@dataclass(frozen=True, slots=True)
class TargetReport:
    """The verdict on each feature for a version, or why it could not be checked.

    Attributes:
        ahead: Whether the version is checked because it is new: patches that fit need not list it.
        fitting: Features that do not list the version but would fit.
        last: The newest listed version, if this version is newer.
        changed: Files for review, because no hunk covers their changes.
    """

    target: str
    label: str
    version: str | None
    verdicts: tuple[FeatureVerdict, ...] = ()
    error: str | None = None
    distribution: str = VLLM
    ahead: bool = False
    fitting: frozenset[str] = frozenset()
    last: str | None = None
    changed: tuple[Changed, ...] = ()

    def expects(self, verdict: FeatureVerdict) -> bool:
        """Whether users get the feature or do not need it.

        See also `ahead`.
        """
        return verdict.status in EXPECTED or (self.ahead and verdict.feature in self.fitting)


def check(
    catalogue: Catalogue,
    target: str,
    source: Source,
    chosen: Catalogue | None = None,
    *,
    ahead: bool = False,
    released: Callable[[str], Source] | None = None,
) -> TargetReport:
    """Evaluate the features of a catalogue on one version.

    Features that fit individually but change the same lines are in conflict: a process could not apply both.

    Args:
        catalogue: Features of the source's distribution.
        chosen: Features to report; the rest of `catalogue` only counts for conflicts. None: all.
        released: Returns the text of a version of `SUPPORTED`. None: do not read other versions.
    """
    chosen = catalogue if chosen is None else chosen
    version = _known(source.version)
    last = last_listed(chosen) if ahead else None
    if last is not None and version is not None and version <= Version(last):
        last = None
    judged, conflicts = evaluate_together(catalogue, source, last=last)
    clashes: dict[str, list[str]] = {}
    for conflict in conflicts:
        for feature_id, other in (conflict.features, conflict.features[::-1]):
            clashes.setdefault(feature_id, []).append(f"changes the same lines of {conflict.path} as {other}")
    verdicts = []
    fitting = set()
    by_feature = {verdict.feature: verdict for verdict in judged}
    for feature in chosen.features:
        verdict = by_feature[feature.id]
        if verdict.status is Status.UNLISTED:
            verdict, fits = _tried(feature, source, verdict, is_ahead=last is not None)
            if fits:
                fitting.add(feature.id)
            elif released is not None and (reason := _in_another_form(feature, source, released)):
                verdict = verdict._replace(status=Status.UPSTREAM, hunks=(), reason=reason)
            elif released is not None and (since := _fixed_in(feature, source, released)):
                cure = f'; vLLM {since} has the change: add [[not_needed]] with versions = ">={since}"'
                verdict = verdict._replace(reason=verdict.reason + cure)
        if feature.id in clashes:
            verdict = verdict._replace(status=Status.CONFLICT, reason="; ".join(clashes[feature.id]))
        verdicts.append(verdict)
    return TargetReport(
        target,
        source.label,
        None if version is None else source.version,
        tuple(verdicts),
        distribution=chosen.features[0].distribution if chosen.features else VLLM,
        ahead=ahead,
        fitting=frozenset(fitting),
        last=last,
        changed=() if last is None else tuple(_changed(chosen, source, last, released)),
    )


def _known(version: str) -> Version | None:
    return Version(version) if is_version(version) else None


def _tried(
    feature: Feature, source: Source, unlisted: FeatureVerdict, *, is_ahead: bool
) -> tuple[FeatureVerdict, bool]:
    """Try the best hunks on an unlisted version; return whether they fit."""
    # Ahead, try only the newest hunks: whether older hunks fit tells nothing about a newer vLLM.
    candidates = told_apart(feature)[: 1 if is_ahead else None]
    trials = [(version, evaluate_as(feature, source, version)) for version in candidates]
    # By share of hunks that do not fit, because versions have different numbers of hunks.
    version, best = min(trials, key=lambda trial: len(troubled_hunks(trial[1])) / max(1, len(trial[1].hunks)))
    if best.status is Status.UPSTREAM:
        outcome = f"is in this {feature.target} already"
    else:
        outcome = f"would {'apply' if best.status is Status.APPLIES else 'not apply'}: {summary(best)}"
        outcome += f" ({best.reason})" if best.status is Status.OTHER_CLASS else ""
    reason = f"{unlisted.reason}; what is for {version} {outcome}"
    return unlisted._replace(hunks=best.hunks, reason=reason), best.status in EXPECTED


def _in_another_form(feature: Feature, source: Source, released: Callable[[str], Source]) -> str:
    """Return why a build between two releases does not need a feature."""
    # Empty if it may need the feature, which the earlier release needs. The later release does not need the feature,
    # and where a hunk does not fit, the build has the later release's lines.
    version = _known(source.version)
    if version is None or feature.distribution != VLLM:
        return ""
    before = next((release for release in reversed(SUPPORTED) if Version(release) < version), None)
    after = next((release for release in SUPPORTED if Version(release) > version), None)
    not_needed = feature.not_needed_for(after) if after is not None else None
    if before is None or after is None or not_needed is None or not feature.versions.covers(before):
        return ""
    try:
        old, new = released(before), released(after)
        has_lines = False
        for diff in feature.files_for(before):
            texts = [Text(version_source.read(diff.path) or "") for version_source in (old, new, source)]
            for (_, place), (verdict, _), hunk in zip(
                locate(diff, texts[0]), locate(diff, texts[2]), diff.hunks, strict=True
            ):
                if verdict.status in ("exact", "moved"):
                    continue
                lines = [] if place is None else _became(texts[0], texts[1], place, place + hunk.source_length)
                if not lines or len(texts[2].places(lines)) != 1:
                    return ""
                has_lines = True
    except SourceError as error:
        note(f"note: {feature.id}: could not compare {source.label} with {after}: {error}")
        return ""
    return f"it has the lines of {after}, on which {not_needed.reason}" if has_lines else ""


def _fixed_in(feature: Feature, source: Source, released: Callable[[str], Source]) -> str:
    """Return the unlisted release before this version that has the change."""
    version, listed = _known(source.version), feature.versions.supported()
    if version is None or feature.distribution != VLLM or not listed:
        return ""
    for release in SUPPORTED[SUPPORTED.index(listed[-1]) + 1 :]:
        if Version(release) >= version:
            break
        with contextlib.suppress(SourceError):
            if evaluate_as(feature, released(release), listed[-1]).status is Status.UPSTREAM:
                return release
    return ""


def _became(old: Text, new: Text, start: int, end: int) -> list[str]:
    """Return the lines that replaced lines `start` to `end` (0-based, end excluded)."""
    blocks = difflib.SequenceMatcher(None, old.lines, new.lines, autojunk=False).get_matching_blocks()
    # The nearest lines before and after them that both texts have.
    first = max(((block.b + min(block.size, start - block.a)) for block in blocks if block.a <= start), default=0)
    last = min(block.b + max(0, end - block.a) for block in blocks if block.a + block.size >= end)
    return new.lines[first:last]


def _changed(
    catalogue: Catalogue, source: Source, last: str, released: Callable[[str], Source] | None
) -> Iterator[Changed]:
    users: dict[str, list[str]] = {}
    known: dict[str, str | None] = {}
    for feature in catalogue.features:
        for relied in feature.texts if feature.versions.covers(last) else ():
            users.setdefault(relied.path, []).append(feature.id)
            known[relied.path] = relied.text_of(last)
    for path, features in sorted(users.items()):
        text = source.read(path)
        if (None if text is None else blob_of(text)) == known[path]:
            continue
        try:
            old = None if released is None else released(last).read(path) or ""
        except SourceError as error:
            note(f"note: {path}: could not count the changed lines: {error}")
            old = None
        diff = None
        if old is not None:
            shown = difflib.unified_diff(Text(old).lines, Text(text or "").lines, n=3)
            diff = tuple(line.rstrip("\n") for line in shown)[2:]
        yield Changed(path, tuple(features), diff)


def exit_status(reports: Iterable[TargetReport]) -> int:
    """Return 0 (no drift), 1 (drift) or 2 (could not tell)."""
    seen = list(reports)
    unexpected = {verdict.status for report in seen for verdict in report.verdicts if not report.expects(verdict)}
    if unexpected - {Status.UNREADABLE}:
        return 1
    return 2 if unexpected or any(report.error is not None for report in seen) else 0


def troubled_hunks(verdict: FeatureVerdict) -> list[HunkVerdict]:
    return [hunk for hunk in verdict.hunks if hunk.status in ("drifted", "ambiguous", "missing")]


def summary(verdict: FeatureVerdict) -> str:
    """Return a verdict in a few words."""
    if verdict.status is Status.APPLIES:
        offset = max((abs(hunk.offset) for hunk in verdict.hunks), default=0)
        return f"moved by {offset} line{'' if offset == 1 else 's'}" if offset else "exact"
    if verdict.status is Status.DRIFTED:
        lost = len(troubled_hunks(verdict))
        return f"drifted ({lost} of {len(verdict.hunks)} hunks)" if lost else "drifted (partly upstream)"
    return _WORDS[verdict.status]


def verdict_lines(reports: Sequence[TargetReport], *, quiet: bool = False, show: bool = False) -> Iterator[str]:
    """Yield a line per verdict with its hunks, then files to review.

    Args:
        quiet: Yield only drift.
        show: Also yield the diffs of the files to review.
    """
    checked = [report for report in reports if report.error is None]
    for name, report in zip(_names(checked), checked, strict=True):
        for verdict in report.verdicts:
            if quiet and report.expects(verdict):
                continue
            yield f"{report.distribution} {name}: {verdict.feature}: {summary(verdict)}{_because(verdict)}"
            for hunk in troubled_hunks(verdict):
                yield from (f"  {line}" for line in where_it_stands(hunk))
        for changed in report.changed:
            yield f"{report.distribution} {name}: read {_to_read(changed, report)}"
            if show:
                yield from (f"  {line}" for line in changed.diff or ())


def _to_read(changed: Changed, report: TargetReport) -> str:
    return f"{changed.path}: {changed.lines} since {report.last}, relied on by {', '.join(changed.features)}"


def say_failures(reports: Sequence[TargetReport]) -> None:
    """Print why targets could not be checked, each cause once."""
    failures = Counter(report.error for report in reports if report.error is not None)
    for failure, count in failures.items():
        note(f"error: {failure}" + (f" ({count} targets)" if count > 1 else ""))


def _because(verdict: FeatureVerdict) -> str:
    # The lines below show the hunks that the reason lists.
    shown_below = verdict.status is Status.DRIFTED and troubled_hunks(verdict)
    return f" ({verdict.reason})" if verdict.reason and not shown_below else ""


def as_json(reports: Iterable[TargetReport], plugin_version: str) -> dict[str, Any]:
    """Return the JSON report.

    `format` rises when a field changes its meaning or disappears.
    """
    seen = list(reports)
    named = ("target", "label", "version", "error", "distribution", "ahead", "last")
    return {
        "format": 1,
        "plugin_version": plugin_version,
        "exit_status": exit_status(seen),
        "targets": [
            {name: getattr(report, name) for name in named}
            | {"features": [_verdict_json(verdict, report.expects(verdict)) for verdict in report.verdicts]}
            | {
                "relied_on": [
                    {"path": changed.path, "features": list(changed.features), "changed": changed.lines}
                    for changed in report.changed
                ]
            }
            for report in seen
        ],
    }


def _verdict_json(verdict: FeatureVerdict, expected: bool) -> dict[str, Any]:
    return {
        "feature": verdict.feature,
        "status": verdict.status.value,
        "expected": expected,
        "exact": verdict.exact,
        "summary": summary(verdict),
        "reason": verdict.reason,
        "hunks": [
            {
                "path": hunk.path,
                "diff": hunk.origin,
                "hunk": hunk.hunk_index,
                "status": hunk.status,
                "offset": hunk.offset,
                "expected": [line.rstrip("\n") for line in hunk.expected],
                "found_at": hunk.found_at,
                "nearest": hunk.nearest and hunk.nearest._asdict(),
            }
            for hunk in verdict.hunks
        ],
    }


def as_markdown(catalogue: Catalogue, reports: Iterable[TargetReport]) -> str:
    """Return the report as a page: a table, and the reasons.

    The text depends only on the patches and the vLLM sources, so a test can compare it with the stored page.
    """
    seen = list(reports)
    target = catalogue.features[0].target if catalogue.features else target_name(VLLM)
    lines = [
        f"# Which patches fit which {target} versions",
        "",
        *_table(catalogue, seen, target),
    ]
    for feature in catalogue.features:
        frozen = " Ended before 0.29: fixes only." if feature.group == "frozen" else ""
        condition = f" Only {_text(limits)}." if (limits := condition_of(feature)) else ""
        lines += [
            "",
            f"## {_code(feature.id)}",
            "",
            f"{_text(feature.title)}. Switch: {_code(feature.gate)}.{condition}{frozen}",
            "",
        ]
        lines += _reasons(feature.id, seen)
    for name, report in zip(_names(seen), seen, strict=True):
        if report.changed:
            lines += [
                "",
                f"## To be read in {_text(name)}",
                "",
                "Features rely on these files, and no hunk looks there:",
            ]
            lines += ["", *(f"- {_text(_to_read(changed, report))}" for changed in report.changed)]
    failures = [f"- {_text(report.target)}: {_text(report.error)}" for report in seen if report.error is not None]
    if failures:
        lines += ["", "## Could not be checked", "", *failures]
    # Only the project's own features have ids without the name of a catalogue.
    if not any("/" in feature.id for feature in catalogue.features):
        lines += ["", _MADE_BY]
    return "\n".join(lines).rstrip() + "\n"


def _table(catalogue: Catalogue, reports: list[TargetReport], target: str) -> list[str]:
    lines = [
        f"{_FITS}: the patch applies, because every hunk fits exactly one place. *upstream*: {target} has the change. "
        f"A dash: {target} does not have the bug, so the feature is not needed. *would fit*: the patch does not list "
        "the version, and fits it. Anything else: the feature is off on that version. Each feature's section says why.",
        "",
        f"| feature | {' | '.join(map(_text, _names(reports)))} |",
        "|---" * (1 + len(reports)) + "|",
    ]
    for feature in catalogue.features:
        cells = [_in_short(report, feature.id) for report in reports]
        lines.append(f"| [{_code(feature.id)}](#{feature.id.replace('/', '')}) | {' | '.join(cells)} |")
    return lines


def _text(text: str) -> str:
    """Escape foreign text: no tags, table cells or line breaks."""
    return inert(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")


def _code(text: str) -> str:
    """Return a foreign name as a code span."""
    return f"`{inert(text).replace('`', chr(39)).replace('|', chr(39))}`"


def _in_short(report: TargetReport, feature: str) -> str:
    verdict = next((verdict for verdict in report.verdicts if verdict.feature == feature), None)
    if verdict is None:
        return "could not check"
    if verdict.status is Status.NOT_NEEDED:
        return "-"
    if verdict.status is Status.UNLISTED:
        return "would fit" if feature in report.fitting else "drifted"
    return _FITS if verdict.status is Status.APPLIES else summary(verdict)


def _names(reports: Sequence[TargetReport]) -> list[str]:
    """Return each report's version, or its label if versions are equal."""
    versions = [report.version for report in reports]
    return [
        report.version if report.version is not None and versions.count(report.version) == 1 else report.label
        for report in reports
    ]


def _reasons(feature: str, reports: list[TargetReport]) -> list[str]:
    # Versions with the same outcome and reason share a row, in the order of their first occurrence.
    rows: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for name, report in zip(_names(reports), reports, strict=True):
        for verdict in report.verdicts:
            if verdict.feature == feature:
                outcome = "applies" if verdict.status is Status.APPLIES else summary(verdict)
                hunks = tuple(line for hunk in troubled_hunks(verdict) for line in where_it_stands(hunk))
                rows.setdefault((outcome, verdict.reason, hunks), []).append(name)
    lines = []
    for (outcome, reason, hunks), names in rows.items():
        names = [*map(_text, names)]
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} versions)"
        lines.append(f"- {span}: {outcome}" + (f" ({_text(reason)})" if reason else ""))
        if hunks:
            shown = [f"    {inert(line)}" for line in hunks]
            lines += ["", "<details><summary>what does not fit</summary>", "", *shown, "", "</details>", ""]
    return lines


def in_order(reports: Iterable[TargetReport]) -> list[TargetReport]:
    """Sort reports by version, oldest first; unreadable targets come last."""
    return sorted(reports, key=lambda report: (report.version is None, Version(report.version or "0")))
