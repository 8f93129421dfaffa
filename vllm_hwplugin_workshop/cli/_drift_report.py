# SPDX-License-Identifier: Apache-2.0
"""What the drift check found, as data, and what is made of it: lines, JSON, a page, and the exit status."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from vllm_hwplugin.patching import (
    VLLM,
    Catalogue,
    Feature,
    FeatureVerdict,
    HunkVerdict,
    Source,
    Status,
    evaluate_as,
    evaluate_together,
    target_name,
    told_apart,
)

from ..authoring import where_it_stands

EXPECTED = (Status.APPLIES, Status.UPSTREAM, Status.NOT_NEEDED)

_WORDS = {
    Status.UPSTREAM: "upstream",
    Status.NOT_NEEDED: "not needed",
    Status.CONFLICT: "conflict",
    Status.OTHER_TEXT: "other text",
    Status.TARGET_MISSING: "target missing",
    Status.UNREADABLE: "could not read",
    Status.UNLISTED: "unlisted",
    Status.NO_PYTHON: "no Python",
}

_MADE_BY = "Made by `vllm-hwplugin drift --all --markdown docs/compatibility.md`; do not edit."


@dataclass(frozen=True, slots=True)
class TargetReport:
    """One vLLM, or another distribution: the verdict on each feature, or why it could not be checked.

    Attributes:
        ahead: the version was asked for because it is new. That a patch does not list it is expected then, if it fits.
        fitting: features that do not list it, and that would fit.
    """

    target: str
    label: str
    version: str | None
    verdicts: tuple[FeatureVerdict, ...] = ()
    error: str | None = None
    distribution: str = VLLM
    ahead: bool = False
    fitting: frozenset[str] = frozenset()

    def expects(self, verdict: FeatureVerdict) -> bool:
        """Whether there is nothing to mend: a user gets the feature or does not need it; see also `ahead`."""
        return verdict.status in EXPECTED or (self.ahead and verdict.feature in self.fitting)


def check(
    catalogue: Catalogue, target: str, source: Source, chosen: Catalogue | None = None, *, ahead: bool = False
) -> TargetReport:
    """Judge every feature of the catalogue on one vLLM.

    Features that fit alone but change the same lines are in conflict: neither verdict would hold in a process.

    Args:
        catalogue: features of one distribution, which is the source's.
        chosen: those of them to judge; the others only count where they are in conflict with one of these.
        ahead: see :class:`TargetReport`.
    """
    chosen = catalogue if chosen is None else chosen
    judged, conflicts = evaluate_together(catalogue, source)
    clashes: dict[str, list[str]] = {}
    for conflict in conflicts:
        for one, other in (conflict.features, conflict.features[::-1]):
            clashes.setdefault(one, []).append(f"changes the same lines of {conflict.path} as {other}")
    verdicts = []
    fitting = set()
    by_feature = {verdict.feature: verdict for verdict in judged}
    for feature in chosen.features:
        verdict = by_feature[feature.id]
        if verdict.status is Status.UNLISTED:
            verdict, fits = _tried(feature, source, verdict)
            if fits:
                fitting.add(feature.id)
        if feature.id in clashes:
            verdict = verdict._replace(status=Status.CONFLICT, reason="; ".join(clashes[feature.id]))
        verdicts.append(verdict)
    return TargetReport(
        target,
        source.label,
        source.version,
        tuple(verdicts),
        distribution=chosen.features[0].distribution if chosen.features else VLLM,
        ahead=ahead,
        fitting=frozenset(fitting),
    )


def _tried(feature: Feature, source: Source, unlisted: FeatureVerdict) -> tuple[FeatureVerdict, bool]:
    """What the hunks that fit best would do to a version that is not listed: the work that a new vLLM makes."""
    trials = [(version, evaluate_as(feature, source, version)) for version in told_apart(feature)]
    # By share: one hunk that does not fit at all is less trouble than two of ten.
    version, best = min(trials, key=lambda trial: len(troubled_hunks(trial[1])) / max(1, len(trial[1].hunks)))
    if best.status is Status.UPSTREAM:
        outcome = f"is in this {feature.target} already"
    else:
        outcome = f"would {'apply' if best.status is Status.APPLIES else 'not apply'}: {summary(best)}"
    reason = f"{unlisted.reason}; what is for {version} {outcome}"
    return unlisted._replace(hunks=best.hunks, reason=reason), best.status in EXPECTED


def exit_status(reports: Iterable[TargetReport]) -> int:
    """0 as expected, 1 drift, 2 could not check. Drift that was found outweighs a target that could not be read."""
    seen = list(reports)
    unexpected = {verdict.status for report in seen for verdict in report.verdicts if not report.expects(verdict)}
    if unexpected - {Status.UNREADABLE}:
        return 1
    return 2 if unexpected or any(report.error is not None for report in seen) else 0


def troubled_hunks(verdict: FeatureVerdict) -> list[HunkVerdict]:
    return [hunk for hunk in verdict.hunks if hunk.status in ("drifted", "ambiguous", "missing")]


def summary(verdict: FeatureVerdict) -> str:
    """A verdict in a few words."""
    if verdict.status is Status.APPLIES:
        offset = _furthest(verdict)
        return f"moved by {offset} line{'' if offset == 1 else 's'}" if offset else "exact"
    if verdict.status is Status.DRIFTED:
        lost = len(troubled_hunks(verdict))
        return f"drifted ({lost} of {len(verdict.hunks)} hunks)" if lost else "drifted (partly upstream)"
    return _WORDS[verdict.status]


def verdict_lines(reports: Sequence[TargetReport]) -> Iterator[str]:
    """A line a verdict, and under it what does not fit and the nearest place."""
    checked = [report for report in reports if report.error is None]
    for name, report in zip(_names(checked), checked, strict=True):
        for verdict in report.verdicts:
            yield f"{report.distribution} {name}: {verdict.feature}: {summary(verdict)}{_because(verdict)}"
            for hunk in troubled_hunks(verdict):
                yield from (f"  {line}" for line in where_it_stands(hunk))


def say_failures(reports: Sequence[TargetReport]) -> None:
    """Why targets could not be checked: each cause once."""
    for failure, count in Counter(report.error for report in reports if report.error is not None).items():
        print(f"error: {failure}" + (f" ({count} targets)" if count > 1 else ""), file=sys.stderr)


def _because(verdict: FeatureVerdict) -> str:
    # Where hunks are shown one by one below, their list would only say it twice.
    told_below = verdict.status is Status.DRIFTED and troubled_hunks(verdict)
    return f" ({verdict.reason})" if verdict.reason and not told_below else ""


def as_json(reports: Iterable[TargetReport], plugin_version: str) -> dict[str, Any]:
    """The report for other programs. `format` changes when a field changes its meaning or goes away."""
    seen = list(reports)
    named = ("target", "label", "version", "error", "distribution", "ahead")
    return {
        "format": 1,
        "plugin_version": plugin_version,
        "exit_status": exit_status(seen),
        "targets": [
            {name: getattr(report, name) for name in named}
            | {"features": [_verdict_json(verdict, report.expects(verdict)) for verdict in report.verdicts]}
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
    """The report as a page: a table of versions and features, then what lies behind each cell.

    The text depends on the patches and the vLLM sources alone, so that a test can compare it with the stored page.
    """
    seen = list(reports)
    target = catalogue.features[0].target if catalogue.features else target_name(VLLM)
    lines = [
        f"# Which patches fit which {target} versions",
        "",
        # A catalogue from outside has its own name before each of its features.
        *(() if any("/" in feature.id for feature in catalogue.features) else (_MADE_BY, "")),
        *_table(catalogue, seen, target),
    ]
    for feature in catalogue.features:
        lines += ["", f"## `{feature.id}`", "", f"{feature.title}. Gate: `{feature.gate}`.", ""]
        lines += _reasons(feature.id, seen)
    failures = [f"- {report.target}: {report.error}" for report in seen if report.error is not None]
    if failures:
        lines += ["", "## Could not be checked", "", *failures]
    return "\n".join(lines).rstrip() + "\n"


def _table(catalogue: Catalogue, reports: list[TargetReport], target: str) -> list[str]:
    lines = [
        "*exact*: every hunk matches at its stated line. A number N: every hunk matches at exactly one place, up to N "
        f"lines from the stated one. *upstream*: {target} has the change. A dash: {target} does not have the fault, so "
        "the feature is not needed. *would fit*: the patch does not list the version, and fits it. Anything else: the "
        "feature is off on that version. Each feature's section says what is applied where, and why not elsewhere.",
        "",
        f"| feature | {' | '.join(_names(reports))} |",
        "|---" * (1 + len(reports)) + "|",
    ]
    for feature in catalogue.features:
        cells = [_in_short(report, feature.id) for report in reports]
        lines.append(f"| [`{feature.id}`](#{feature.id.replace('/', '')}) | {' | '.join(cells)} |")
    return lines


def _in_short(report: TargetReport, feature: str) -> str:
    verdict = next((one for one in report.verdicts if one.feature == feature), None)
    if verdict is None:
        return "could not check"
    if verdict.status is Status.NOT_NEEDED:
        return "-"
    if verdict.status is Status.UNLISTED:
        return "would fit" if feature in report.fitting else "drifted"
    return str(_furthest(verdict) or "exact") if verdict.status is Status.APPLIES else summary(verdict)


def _furthest(verdict: FeatureVerdict) -> int:
    """How many lines from where it says the furthest hunk stands."""
    return max((abs(hunk.offset) for hunk in verdict.hunks), default=0)


def _names(reports: Sequence[TargetReport]) -> list[str]:
    """A name for each row: the version, or the label where that alone would not tell two rows apart."""
    versions = [report.version for report in reports]
    return [
        report.version if report.version is not None and versions.count(report.version) == 1 else report.label
        for report in reports
    ]


def _reasons(feature: str, reports: list[TargetReport]) -> list[str]:
    # Rows of one outcome and reason are told once, in the order in which they first occur.
    told: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for name, report in zip(_names(reports), reports, strict=True):
        for verdict in report.verdicts:
            if verdict.feature == feature:
                outcome = "applies" if verdict.status is Status.APPLIES else summary(verdict)
                hunks = tuple(line for hunk in troubled_hunks(verdict) for line in where_it_stands(hunk))
                told.setdefault((outcome, verdict.reason, hunks), []).append(name)
    lines = []
    for (outcome, reason, hunks), names in told.items():
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} versions)"
        lines.append(f"- {span}: {outcome}" + (f" ({reason})" if reason else ""))
        if hunks:
            shown = [f"    {line}" for line in hunks]
            lines += ["", "<details><summary>what does not fit</summary>", "", *shown, "", "</details>", ""]
    return lines


def in_order(reports: Iterable[TargetReport]) -> list[TargetReport]:
    """By version, oldest first; what could not be read comes last, in the order in which it was named."""
    seen = list(reports)
    known = [report for report in seen if report.version is not None]
    return sorted(known, key=lambda report: Version(str(report.version))) + [r for r in seen if r.version is None]
