# SPDX-License-Identifier: Apache-2.0
"""The drift report for people: one line a verdict, and under it every mismatch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from vllm_hwplugin.patching import FeatureVerdict, HunkVerdict, Status

from ._drift_report import TargetReport, row_names, summary, troubled_hunks


def verdict_lines(reports: Sequence[TargetReport]) -> Iterator[str]:
    """A line a verdict, and under it what does not fit and the nearest place."""
    checked = [report for report in reports if report.error is None]
    for name, report in zip(row_names(checked), checked, strict=True):
        for verdict in report.verdicts:
            yield f"{report.distribution} {name}: {verdict.feature}: {summary(verdict)}{_because(verdict)}"
            for hunk in troubled_hunks(verdict):
                yield from _hunk_lines(hunk)


def say_failures(reports: Sequence[TargetReport]) -> None:
    """Why targets could not be checked: each cause once."""
    for failure, count in Counter(report.error for report in reports if report.error is not None).items():
        print(f"error: {failure}" + (f" ({count} targets)" if count > 1 else ""), file=sys.stderr)


def _because(verdict: FeatureVerdict) -> str:
    # Where hunks are shown one by one below, their list would only say it twice.
    told_below = verdict.status is Status.DRIFTED and troubled_hunks(verdict)
    return f" ({verdict.reason})" if verdict.reason and not told_below else ""


def _hunk_lines(hunk: HunkVerdict) -> Iterator[str]:
    where = f"  {hunk.path}: hunk {hunk.hunk_index} of {hunk.origin}"
    if hunk.status == "missing":
        yield f"{where}: this version has no such file"
        return
    if hunk.status == "ambiguous":
        places = ", ".join(map(str, hunk.found_at))
        yield f"{where}: ambiguous, fits, or is there already, at lines {places}; expected one place"
        return
    if hunk.nearest is not None and not hunk.nearest.diff:
        yield f"{where}: found at line {hunk.nearest.line}, before the hunk that precedes it"
        return
    yield f"{where}: drifted, expected:"
    yield from ("      | " + line.rstrip("\r\n") for line in hunk.expected)
    if hunk.nearest is None:
        yield "    nothing in the file resembles it"
        return
    yield f"    nearest: line {hunk.nearest.line}, {hunk.nearest.similarity:.0%} alike:"
    yield from (f"      {line}" for line in hunk.nearest.diff.splitlines())
