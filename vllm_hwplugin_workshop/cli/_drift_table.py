# SPDX-License-Identifier: Apache-2.0
"""The drift report for people: a table on a terminal, one line a verdict elsewhere, then every mismatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from vllm_hwplugin.cli.tables import table_for
from vllm_hwplugin.patching import Catalog, FeatureVerdict, HunkVerdict, Status, target_name

from ._drift_report import TargetReport, row_names, summary, troubled_hunks

_STYLES = {Status.APPLIES: "green", Status.UPSTREAM: "cyan", Status.NOT_NEEDED: "dim"}


@contextmanager
def progress(total: int, console: Console) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal while several targets are read; gives a function that counts one."""
    if total < 2 or not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("reading vLLM"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


def say_once(console: Console) -> Callable[[list[str]], None]:
    """A function that says, when it is first called, which targets are being waited for."""
    said = False

    def say(targets: list[str]) -> None:
        nonlocal said
        if not said:
            more = f" and {len(targets) - 3} more" if len(targets) > 3 else ""
            _line(console, f"note: still waiting for {', '.join(targets[:3])}{more}; Ctrl-C ends it")
        said = True

    return say


def say_notes(notes: Iterable[str], err: Console) -> None:
    """What a user should know about how the answers came about."""
    for note in notes:
        _line(err, f"note: {note}")


def print_report(catalog: Catalog, reports: Sequence[TargetReport], out: Console, err: Console) -> None:
    """Print the verdicts and mismatches to `out`; targets that could not be checked to `err`."""
    checked = [report for report in reports if report.error is None]
    names = row_names(checked)
    table = _table(catalog, names, checked, out) if checked and out.is_terminal else None
    if table is not None:
        out.print(table)
    for name, report in zip(names, checked, strict=True):
        for verdict in report.verdicts:
            if table is None:
                _line(out, f"{report.distribution} {name}: {verdict.feature}: {summary(verdict)}{_because(verdict)}")
            elif not report.expects(verdict):
                _line(out, f"\n{report.distribution} {name}: {verdict.feature}: {summary(verdict)}{_because(verdict)}")
            for hunk in troubled_hunks(verdict):
                _print_hunk(out, hunk)
    failures = Counter(report.error for report in reports if report.error is not None)
    for failure, count in failures.items():
        _line(err, f"error: {failure}" + (f" ({count} targets)" if count > 1 else ""))


def _table(catalog: Catalog, names: list[str], reports: Sequence[TargetReport], out: Console) -> Table | None:
    """None where the console is too narrow, also with headings that are split at their hyphens."""
    rows = [
        [Text(name), *(Text(summary(each), style=_STYLES.get(each.status, "bold red")) for each in report.verdicts)]
        for name, report in zip(names, reports, strict=True)
    ]
    ids = [feature.id for feature in catalog.features]
    target = target_name(reports[0].distribution)
    whole = table_for(out, "", [target, *ids], rows)
    return whole or table_for(out, "", [target, *(name.replace("-", "-\n") for name in ids)], rows)


def _because(verdict: FeatureVerdict) -> str:
    # Where hunks are shown one by one below, their list would only say it twice.
    told_below = verdict.status is Status.DRIFTED and troubled_hunks(verdict)
    return f" ({verdict.reason})" if verdict.reason and not told_below else ""


def _print_hunk(out: Console, hunk: HunkVerdict) -> None:
    where = f"  {hunk.path}: hunk {hunk.hunk_index} of {hunk.origin}"
    if hunk.status == "missing":
        _line(out, f"{where}: this version has no such file")
        return
    if hunk.status == "ambiguous":
        places = ", ".join(map(str, hunk.found_at))
        _line(out, f"{where}: ambiguous, fits, or is there already, at lines {places}; expected one place")
        return
    if hunk.nearest is not None and not hunk.nearest.diff:
        _line(out, f"{where}: found at line {hunk.nearest.line}, before the hunk that precedes it")
        return
    _line(out, f"{where}: drifted, expected:")
    for line in hunk.expected:
        _line(out, "      | " + line.rstrip("\r\n"))
    if hunk.nearest is None:
        _line(out, "    nothing in the file resembles it")
        return
    _line(out, f"    nearest: line {hunk.nearest.line}, {hunk.nearest.similarity:.0%} alike:")
    for line in hunk.nearest.diff.splitlines():
        _line(out, f"      {line}", {"-": "red", "+": "green"}.get(line[:1], ""))


def _line(console: Console, text: str, style: str = "") -> None:
    # Source lines may be longer than the terminal and hold what looks like markup: neither may change them.
    console.print(Text(text, style=style), soft_wrap=True)
