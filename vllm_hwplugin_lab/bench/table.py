# SPDX-License-Identifier: Apache-2.0
"""Rows, tables and verdicts of a benchmark of engines."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from rich.table import Table

from vllm_hwplugin.spec_decode.step_counts import SERVED

from .plan import on_v2

NOT_MEASURED = "-"
#: Ratio of two runs of one engine: a smaller ratio is noise.
NOISE = 1.03
#: A GPU that is busy for this share of the time hardly waits.
_BUSY = 0.9
#: Microseconds per step; shorter phases are only in the results file.
LEAST_US = 5.0

#: Side -> its name in tables, in their order.
SIDE_NAMES = {
    "stock": "unpatched",
    "plugin": "plugin",
    "patched": "patched",
    "mrv2": "V2 unpatched",
    "mrv2-plugin": "V2 plugin",
    "mrv2-patched": "V2 patched",
    "server": "server",
    "before": "before",
    "after": "after",
}
#: Pairs to compare: on the same runner, with the runner that vLLM takes by default, and two runs of one load.
COMPARED = (
    ("patched", "stock"),
    ("patched", "plugin"),
    ("patched", "mrv2"),
    ("mrv2-patched", "mrv2"),
    ("mrv2-patched", "mrv2-plugin"),
    ("after", "before"),
)


@dataclass(frozen=True)
class Row:
    """A batch size of a case; a side that was not measured is None."""

    case: Mapping[str, Any]
    batch: str
    sides: Mapping[str, Mapping[str, Any] | None]

    @property
    def label(self) -> str:
        return f"{self.case['shape']} {self.case['method']} k={self.case['k']}"

    def ratio(self, side: str = "patched", over: str = "stock") -> float | None:
        """Return tokens/s of ``side`` / tokens/s of ``over``, at best rounds.

        None: they cannot be compared. With synthetic acceptance it is the ratio of step times, because acceptance is
        random and equal in the long run. The best of more rounds is better by chance, so a side with fewer rounds is
        not compared.
        """
        measured, baseline = self.sides.get(side), self.sides.get(over)
        if measured is None or baseline is None or measured["rounds"] != baseline["rounds"]:
            return None
        if self.case.get("synthetic_acceptance_length") is not None:
            return float(baseline["step_ms"]["best"] / measured["step_ms"]["best"])
        return float(measured["tokens_per_second"]["best"] / baseline["tokens_per_second"]["best"])


def rows(results: Mapping[str, Any]) -> Iterator[Row]:
    """Yield each batch size of each case of a results file."""
    for case in results["cases"]:
        measured = {side: entry["batches"] for side, entry in case["sides"].items()}
        for batch in next(iter(measured.values())):
            yield Row(case, batch, {side: measured.get(side, {}).get(batch) for side in sides_of(results)})


def sides_of(results: Mapping[str, Any]) -> list[str]:
    """Return the requested sides, even those without results."""
    present = {side for case in results["cases"] for side in case["sides"]} | set(results["settings"]["sides"])
    return [side for side in SIDE_NAMES if side in present]


def comparisons(sides: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs of sides whose ratio is shown."""
    return [pair for pair in COMPARED if set(pair) <= set(sides)]


def ratio_name(side: str, over: str) -> str:
    """Return the heading of a column of ratios."""
    return f"{SIDE_NAMES[side]} / {SIDE_NAMES[over]}"


def tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """Yield a table per case, a row per batch size and side."""
    sides = sides_of(results)
    pairs = comparisons(sides)
    overs = list(dict.fromkeys(over for _, over in pairs))
    for label, some in groupby(rows(results), lambda row: row.label):
        drawn = Table(title=f"{label}: ms are of the best round (of the median one)")
        for name in ("batch", "side", "ms a step", "GPU idle", "tokens/s", "acceptance"):
            drawn.add_column(name, justify="left" if name == "side" else "right")
        for over in overs:
            drawn.add_column(f"/ {SIDE_NAMES[over]}", justify="right")
        for row, side in ((row, side) for row in some for side in sides):
            measured = row.sides[side]
            ratios = {over: row.ratio(side, over) for compared, over in pairs if compared == side}
            drawn.add_row(
                row.batch if side == sides[0] else "",
                SIDE_NAMES[side],
                steps(measured),
                idle(measured),
                NOT_MEASURED if measured is None else f"{measured['tokens_per_second']['best']:.0f}",
                length(measured),
                *("" if (ratio := ratios.get(over)) is None else f"{ratio:.2f}" for over in overs),
                end_section=side == sides[-1],
            )
        yield drawn


def host_line(results: Mapping[str, Any]) -> str:
    """Return how the host's speed changed; empty: it was not timed."""
    times = [us for row in rows(results) for side in row.sides.values() for us in (side or {}).get("host_us", ())]
    if not times:
        return ""
    return (
        f"Host speed: a fixed piece of Python took {min(times):.0f}–{max(times):.0f} us with the rounds (median "
        f"{statistics.median(times):.0f}): a ratio of two distant rounds may be off by {max(times) / min(times):.2f}×."
    )


@dataclass(frozen=True)
class Phase:
    """A function in a step, from ``bench --profile``.

    Attributes:
        path: Names from the outermost function to this function.
        calls: Calls per step.
        us: Microseconds per step.
        own: Microseconds without the functions below it; the sum over all functions is the step.
    """

    path: tuple[str, ...]
    calls: float
    us: float
    own: float


def phases_of(rows: Iterable[Sequence[Any]]) -> list[Phase]:
    """Return the phases of a results file's rows.

    See ``_phases.PhaseRow``.
    """
    path: list[str] = []
    phases: list[Phase] = []
    inside: Counter[tuple[str, ...]] = Counter()
    for depth, name, calls, us in rows:
        path[depth:] = [name]
        inside[tuple(path[:-1])] += us
        phases.append(Phase(tuple(path), calls, us, us))
    return [replace(phase, own=phase.us - inside[phase.path]) for phase in phases]


def speed(side: Mapping[str, Any] | None) -> str:
    """Return tokens/s of the best round and the median round."""
    if side is None:
        return NOT_MEASURED
    speeds = side["tokens_per_second"]
    return f"{speeds['best']:.0f} ({speeds['median']:.0f})"


def step_ms(side: Mapping[str, Any] | None) -> float | None:
    """Return a step's milliseconds in the best round."""
    return None if side is None else float(side["step_ms"]["best"])


def step(side: Mapping[str, Any] | None) -> str:
    """Format :func:`step_ms`."""
    milliseconds = step_ms(side)
    return NOT_MEASURED if milliseconds is None else f"{milliseconds:.2f}"


def steps(side: Mapping[str, Any] | None) -> str:
    """Return a step's milliseconds in the best and the median round."""
    return step(side) if side is None else f"{step(side)} ({side['step_ms']['median']:.2f})"


def idle(side: Mapping[str, Any] | None) -> str:
    """Return the share of a step in which the GPU is idle."""
    share = (side or {}).get("gpu_idle_share")
    return NOT_MEASURED if share is None else f"{share:.0%}"


def length(side: Mapping[str, Any] | None) -> str:
    """Return tokens per step, with the target's own token."""
    return NOT_MEASURED if side is None or not side["drafts"] else f"{side['acceptance_length']:.3f}"


def profiled(side: Mapping[str, Any] | None, name: str) -> str:
    """Format a figure of the profile; milliseconds have two digits."""
    value = (side or {}).get("profile", {}).get(name)
    return NOT_MEASURED if value is None else f"{value:.2f}" if name == "gpu_busy_ms" else f"{value:g}"


#: How two sides differ over all loads: beyond the noise, in both directions, within `NOISE`, or less than rounds do.
Outcome = Literal["faster", "slower", "mixed", "same", "unknown"]


@dataclass(frozen=True)
class Compared:
    """A side and its baseline, over all loads of a case that both have.

    Attributes:
        case: Name of the case.
        sides: The side and its baseline.
        ratios: Speedup of each load in tokens/s, or in end-to-end time if requests come at a rate.
        busy: Each side's shares of time with a busy GPU; empty: not known.
        apart: The largest ratio between two rounds of one side and load.
        left: Why the side left steps to vLLM -> their share of all steps.
    """

    case: str
    sides: tuple[str, str]
    ratios: Collection[float]
    busy: Sequence[Collection[float]]
    apart: float
    left: Mapping[str, float]

    @property
    def outcome(self) -> Outcome:
        return outcome(self.ratios, self.apart)


def between(figures: Iterable[float], form: str, to: str = " to ") -> str:
    """Return a range, or one number if both ends read the same."""
    known = sorted(figures)
    ends = [format(known[0], form), format(known[-1], form)]
    return ends[0] if ends[0] == ends[1] else to.join(ends)


def outcome(ratios: Collection[float], apart: float = 1.0) -> Outcome:
    """Return how sides differ if rounds differ by up to ``apart``."""
    noise = max(apart, NOISE)
    least, most = min(ratios), max(ratios)
    if max(most, 1 / least) <= noise:
        return "same" if apart <= NOISE else "unknown"
    if least < 1 / noise:
        return "mixed" if most >= 1 / noise else "slower"
    return "faster"


_IN_WORDS: Mapping[Outcome, str] = {"slower": " (slower)", "mixed": " (slower for some)", "same": " (within noise)"}


def worth(ratios: Collection[float]) -> str:
    """Return a speedup in words; higher is better."""
    return f"{between(ratios, '.2f', '–')}×{_IN_WORDS.get(outcome(ratios), '')}"


def of_engines(results: Mapping[str, Any]) -> Iterator[Compared]:
    """Yield the comparisons of ``bench``'s cases, on one model runner."""
    for label, some in ((label, list(some)) for label, some in groupby(rows(results), lambda row: row.label)):
        for pair in _pairs(sides_of(results)):
            both = [(ratio, *(row.sides[side] for side in pair)) for row in some if (ratio := row.ratio(*pair))]
            if both:
                ratios, *sides = zip(*both, strict=True)
                busy = [[1 - row["gpu_idle_share"] for row in side if "gpu_idle_share" in row] for side in sides]
                times = [row["step_ms"] for side in sides for row in side]
                yield Compared(label, pair, ratios, busy, max(time["median"] / time["best"] for time in times), {})


def of_loads(results: Mapping[str, Any]) -> Iterator[Compared]:
    """Yield the comparisons of ``bench serve``'s loads."""
    for case in results["cases"]:
        for pair in _pairs([side for side in SIDE_NAMES if side in case["sides"]]):
            loads = [case["sides"][side]["loads"] for side in pair]
            both = [(loads[0][name], load) for name, load in loads[1].items() if loads[0].get(name) and load]
            known = [(ratio, *two) for two in both if (ratio := speedup(*two)) is not None]
            if known:
                ratios, *sides = zip(*known, strict=True)
                busy = [[load["gpu_busy"] for load in side if load["gpu_busy"] is not None] for side in sides]
                apart = max(_apart(_rounds(load)) for side in sides for load in side)
                # Sides of one run take turns, so the host's speed is equal for them; two runs may differ in it.
                if pair == ("after", "before"):
                    apart = max(apart, host_ratio(*sides))
                yield Compared(case_name(results, case), pair, ratios, busy, apart, _left(sides[0]))


def case_name(results: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    """Return a case's method and k, or the running server's model."""
    method = results["settings"].get("method")
    return str(results["settings"]["model"]) if method is None else f"{method} k={case['k']}"


def speedup(load: Mapping[str, Any], baseline: Mapping[str, Any]) -> float | None:
    """Return a load's speedup; None: rounds or answers are missing.

    The best of more rounds is better by chance, so both need equally many rounds. If requests come at a rate, the rate
    determines tokens/s, so the mean time to the last token counts. Requests without a bound count as such, because the
    client may send them at a rate that rises.
    """
    if load["rounds"] != baseline["rounds"]:
        return None
    if _by_arrivals(load):
        times, baseline_times = _rounds(load), _rounds(baseline)
        return min(baseline_times) / min(times) if times and baseline_times else None
    best, baseline_best = (float(measured["tokens_per_second"]["best"]) for measured in (load, baseline))
    return best / baseline_best if best and baseline_best else None


def _rounds(load: Mapping[str, Any]) -> list[float]:
    """Return the figure of each round that comparisons use."""
    figures: list[float]
    figures = load.get("round_e2e_ms", []) if _by_arrivals(load) else load["tokens_per_second"]["all"]
    return figures


def _by_arrivals(load: Mapping[str, Any]) -> bool:
    return bool(load.get("request_rate")) or load.get("concurrency") == 0


def _apart(rounds: Sequence[float]) -> float:
    """Return the largest ratio between rounds."""
    # Infinite if a round has no result.
    return max(rounds) / min(rounds) if min(rounds) else math.inf


def host_ratio(*sides: Iterable[Mapping[str, Any]]) -> float:
    """Return the ratio of the host's speed between sides.

    It compares median times of one piece of Python next to the rounds.
    """
    times = [[us for load in side for us in load.get("host_us", ())] for side in sides]
    medians = [statistics.median(of_side) for of_side in times if of_side]
    return max(medians) / min(medians) if medians else 1.0


def headline(comparison: Compared) -> str:
    """Return a comparison's result as a sentence without a full stop."""
    named, other = (SIDE_NAMES[side] for side in comparison.sides)
    times = f"{between(comparison.ratios, '.2f', '–')}×"
    sentences: Mapping[Outcome, str] = {
        "faster": f"{named} is faster than {other}: {times}",
        "slower": f"{named} is slower than {other}: {times}",
        "mixed": f"{named} is slower than {other} for some loads: {times}",
        "same": f"{named} is as fast as {other}: {times}, within noise",
        "unknown": f"unknown whether {named} is faster than {other}: {times}",
    }
    return f"{comparison.case}: {sentences[comparison.outcome]}"


def verdict(comparison: Compared, device: str | None) -> str:
    """Return one line on a comparison.

    ``device``: vLLM's device type; None: the server was not started here.
    """
    return " ".join([f"{headline(comparison)}.", *reasons(comparison, device)])


def reasons(comparison: Compared, device: str | None) -> Iterator[str]:
    """Yield the reasons of a verdict, sentence by sentence.

    ``device`` as for :func:`verdict`.
    """
    named, other = (SIDE_NAMES[side] for side in comparison.sides)
    after, before = comparison.busy
    if before and after:
        shares = [between(busy, ".0%", "–") for busy in (before, after)]
        yield f"GPU busy: {shares[0]} of the time ({other}), {shares[1]} ({named})."
        if max(comparison.ratios) <= NOISE:
            yield _why_not(comparison)
    elif device == "cpu":
        yield "A CPU has no CUDA graphs, and most of the speedup comes from them."
    if comparison.apart > NOISE and any(max(ratio, 1 / ratio) < comparison.apart for ratio in comparison.ratios):
        yield f"Rounds of one side, or the host, differ by up to {comparison.apart:.2f}×: a smaller ratio is uncertain."


def _why_not(comparison: Compared) -> str:
    if min(comparison.busy[1]) >= _BUSY:
        return "The GPU hardly waits for the host, so there is nothing to gain."
    if comparison.left:
        reason = max(comparison.left, key=lambda reason: comparison.left[reason])
        return f"The plugin left {sum(comparison.left.values()):.0%} of the steps to vLLM, most of them for `{reason}`."
    return "`vllm-hwplugin bench --profile` shows where the host's time goes."


def _pairs(sides: Sequence[str]) -> list[tuple[str, str]]:
    """Return the pairs to compare, on the same model runner."""
    return [pair for pair in comparisons(sides) if on_v2(pair[0]) == on_v2(pair[1])]


def _left(loads: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return why vLLM ran steps -> their share of all steps."""
    steps: Counter[str] = Counter()
    for row in (row for load in loads for row in load["kinds"]):
        outcomes = list(row["paths"].values())
        steps[outcomes[0] if outcomes and SERVED not in outcomes else SERVED] += row["steps"]
    return {reason: count / steps.total() for reason, count in steps.items() if reason != SERVED and count}
