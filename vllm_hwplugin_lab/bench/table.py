# SPDX-License-Identifier: Apache-2.0
"""What a benchmark of engines measured, row by row, the tables at its end, and the verdict: the speedup, and why."""

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
#: Two runs of one engine differ by so much: a smaller ratio is noise.
NOISE = 1.03
#: A GPU that works for so much of the time waits for next to nothing.
_BUSY = 0.9
#: Microseconds a step; a phase that takes less is in the results file alone.
LEAST_US = 5.0

#: Side -> its name in tables, in their order.
SIDE_NAMES = {
    "stock": "stock",
    "plugin": "plugin",
    "patched": "patched",
    "mrv2": "MRV2",
    "mrv2-plugin": "MRV2 plugin",
    "mrv2-patched": "MRV2 patched",
    "server": "server",
    "before": "before",
    "after": "after",
}
#: What is compared with what: the same runner, the one that vLLM takes by default, and two runs of one load.
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
    """One batch size of one case; a side that was not measured is None."""

    case: Mapping[str, Any]
    batch: str
    sides: Mapping[str, Mapping[str, Any] | None]

    @property
    def label(self) -> str:
        return f"{self.case['shape']} {self.case['method']} k={self.case['k']}"

    def ratio(self, side: str = "patched", over: str = "stock") -> float | None:
        """Tokens/s of ``side`` by those of ``over``, both at their best round; None where they cannot be compared.

        Where vLLM accepts drafts by coin, the coin falls alike for both in the long run: then it is the steps' time.
        The best of more rounds is better by chance alone, so a side that failed half-way is compared with none.
        """
        one, other = self.sides.get(side), self.sides.get(over)
        if one is None or other is None or one["rounds"] != other["rounds"]:
            return None
        if self.case.get("synthetic_acceptance_length") is not None:
            mine, theirs = step_ms(one), step_ms(other)
            return None if mine is None or theirs is None else theirs / mine
        return float(one["tokens_per_second"]["best"] / other["tokens_per_second"]["best"])


def rows(results: Mapping[str, Any]) -> Iterator[Row]:
    """Each batch size of each case of a results file."""
    for case in results["cases"]:
        measured = {side: entry["batches"] for side, entry in case["sides"].items()}
        for batch in next(iter(measured.values())):
            yield Row(case, batch, {side: measured.get(side, {}).get(batch) for side in sides_of(results)})


def sides_of(results: Mapping[str, Any]) -> list[str]:
    """Those that were asked for, so that one that is missing shows."""
    present = {side for case in results["cases"] for side in case["sides"]} | set(results["settings"]["sides"])
    return [side for side in SIDE_NAMES if side in present]


def comparisons(sides: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of sides whose ratio is shown."""
    return [pair for pair in COMPARED if set(pair) <= set(sides)]


def ratio_name(side: str, over: str) -> str:
    """Above a column of ratios."""
    return f"{SIDE_NAMES[side]} / {SIDE_NAMES[over]}"


def tables(results: Mapping[str, Any]) -> Iterator[Table]:
    """For the terminal: a table a case, with a row a batch size and side."""
    sides = sides_of(results)
    pairs = comparisons(sides)
    overs = list(dict.fromkeys(over for _, over in pairs))
    for label, some in groupby(rows(results), lambda row: row.label):
        drawn = Table(title=f"{label}: ms are of the best round (of the median one)")
        for name in ("batch", "side", "ms a step", "GPU idle", "tokens/s", "acceptance"):
            drawn.add_column(name, justify="left" if name == "side" else "right")
        for over in overs:
            drawn.add_column(f"by {SIDE_NAMES[over]}'s", justify="right")
        for row, side in ((row, side) for row in some for side in sides):
            found = row.sides[side]
            ratios = {over: row.ratio(side, over) for one, over in pairs if one == side}
            drawn.add_row(
                row.batch if side == sides[0] else "",
                SIDE_NAMES[side],
                steps(found),
                idle(found),
                NOT_MEASURED if found is None else f"{found['tokens_per_second']['best']:.0f}",
                length(found),
                *("" if (ratio := ratios.get(over)) is None else f"{ratio:.2f}" for over in overs),
                end_section=side == sides[-1],
            )
        yield drawn


def host_line(results: Mapping[str, Any]) -> str:
    """How the host's speed changed within the run; empty where it was not timed."""
    times = [us for row in rows(results) for side in row.sides.values() for us in (side or {}).get("host_us", ())]
    if not times:
        return ""
    return (
        f"The same piece of Python took {min(times):.0f} to {max(times):.0f} us beside the rounds (median "
        f"{statistics.median(times):.0f}): a ratio of two rounds apart may be off by {max(times) / min(times):.2f}."
    )


@dataclass(frozen=True)
class Phase:
    """A function within a step, as ``bench --profile`` has found it.

    Attributes:
        path: from the outermost function to this one.
        calls: a step.
        us: microseconds a step.
        own: of these, what no function below it accounts for; all together add up to a step.
    """

    path: tuple[str, ...]
    calls: float
    us: float
    own: float


def phases_of(rows: Iterable[Sequence[Any]]) -> list[Phase]:
    """The rows of a results file, in their order (see ``_phases.PhaseRow``)."""
    path: list[str] = []
    found: list[Phase] = []
    inside: Counter[tuple[str, ...]] = Counter()
    for depth, name, calls, us in rows:
        path[depth:] = [name]
        inside[tuple(path[:-1])] += us
        found.append(Phase(tuple(path), calls, us, us))
    return [replace(one, own=one.us - inside[one.path]) for one in found]


def shown_phases(rows: Iterable[Sequence[Any]]) -> list[Phase]:
    """As :func:`phases_of`, those that are worth a line."""
    return [one for one in phases_of(rows) if one.us >= LEAST_US]


def speed(side: Mapping[str, Any] | None) -> str:
    """Tokens/s of the best round, and of the median one."""
    if side is None:
        return NOT_MEASURED
    speeds = side["tokens_per_second"]
    return f"{speeds['best']:.0f} ({speeds['median']:.0f})"


def step_ms(side: Mapping[str, Any] | None) -> float | None:
    """Milliseconds of a step of the best round."""
    return None if side is None else float(side["step_ms"]["best"])


def step(side: Mapping[str, Any] | None) -> str:
    """As :func:`step_ms`."""
    found = step_ms(side)
    return NOT_MEASURED if found is None else f"{found:.2f}"


def steps(side: Mapping[str, Any] | None) -> str:
    """Milliseconds of a step of the best round, and of the median one."""
    return step(side) if side is None else f"{step(side)} ({side['step_ms']['median']:.2f})"


def idle(side: Mapping[str, Any] | None) -> str:
    """Share of a step in which the GPU had nothing to do."""
    share = (side or {}).get("gpu_idle_share")
    return NOT_MEASURED if share is None else f"{share:.0%}"


def length(side: Mapping[str, Any] | None) -> str:
    """Tokens a step, the target's own included."""
    return NOT_MEASURED if side is None or not side["drafts"] else f"{side['acceptance_length']:.3f}"


def profiled(side: Mapping[str, Any] | None, name: str) -> str:
    """A figure of the profile; milliseconds with two digits."""
    value = (side or {}).get("profile", {}).get(name)
    return NOT_MEASURED if value is None else f"{value:.2f}" if name == "gpu_busy_ms" else f"{value:g}"


#: How two sides differ: over all loads beyond the noise, in both directions, within `NOISE`, or less than rounds do.
Outcome = Literal["faster", "slower", "mixed", "same", "unknown"]


@dataclass(frozen=True)
class Compared:
    """A side and its baseline, over all loads of a case that both have.

    Attributes:
        case: its name.
        sides: the two, the baseline last.
        ratios: the speedup of each load: tokens/s, or end-to-end time where requests come at a rate.
        busy: shares of the time in which the GPU worked, of each side; empty where unknown.
        apart: the largest ratio between two rounds of one side and load.
        left: why the first side left steps to vLLM -> their share of all steps.
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
    """The range of the figures, as one number where both ends read the same."""
    known = sorted(figures)
    ends = [format(known[0], form), format(known[-1], form)]
    return ends[0] if ends[0] == ends[1] else to.join(ends)


def outcome(ratios: Collection[float], apart: float = 1.0) -> Outcome:
    """Return how sides differ whose rounds are up to ``apart`` from each other."""
    noise = max(apart, NOISE)
    least, most = min(ratios), max(ratios)
    if max(most, 1 / least) <= noise:
        return "same" if apart <= NOISE else "unknown"
    if least < 1 / noise:
        return "mixed" if most >= 1 / noise else "slower"
    return "faster"


_IN_WORDS: Mapping[Outcome, str] = {"slower": " (slower)", "mixed": " (slower for some)", "same": " (within noise)"}


def worth(ratios: Collection[float]) -> str:
    """A speedup in words; higher is better."""
    return f"{between(ratios, '.2f', '–')}×{_IN_WORDS.get(outcome(ratios), '')}"


def of_engines(results: Mapping[str, Any]) -> Iterator[Compared]:
    """Each case and pair of sides on one model runner of ``bench``."""
    for label, some in ((label, list(some)) for label, some in groupby(rows(results), lambda row: row.label)):
        for pair in _pairs(sides_of(results)):
            both = [(ratio, *(row.sides[side] for side in pair)) for row in some if (ratio := row.ratio(*pair))]
            if both:
                ratios, *sides = zip(*both, strict=True)
                busy = [[1 - one["gpu_idle_share"] for one in side if "gpu_idle_share" in one] for side in sides]
                times = [one["step_ms"] for side in sides for one in side]
                yield Compared(label, pair, ratios, busy, max(one["median"] / one["best"] for one in times), {})


def of_loads(results: Mapping[str, Any]) -> Iterator[Compared]:
    """As :func:`of_engines`, of the loads of ``bench serve``."""
    for case in results["cases"]:
        for pair in _pairs([side for side in SIDE_NAMES if side in case["sides"]]):
            loads = [case["sides"][side]["loads"] for side in pair]
            both = [(loads[0][name], load) for name, load in loads[1].items() if loads[0].get(name) and load]
            known = [(ratio, *two) for two in both if (ratio := speedup(*two)) is not None]
            if known:
                ratios, *sides = zip(*known, strict=True)
                busy = [[one["gpu_busy"] for one in side if one["gpu_busy"] is not None] for side in sides]
                apart = max(_apart(_rounds(one)) for side in sides for one in side)
                # Sides of one run take turns, so they meet the same host; two runs need not.
                if pair == ("after", "before"):
                    apart = max(apart, host_ratio(*sides))
                yield Compared(case_name(results, case), pair, ratios, busy, apart, _left(sides[0]))


def case_name(results: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    """Of ``bench serve``: the method and k, or the model of a server that was not started here."""
    method = results["settings"].get("method")
    return str(results["settings"]["model"]) if method is None else f"{method} k={case['k']}"


def speedup(load: Mapping[str, Any], baseline: Mapping[str, Any]) -> float | None:
    """Return how much faster a load is; None where rounds are missing, or nothing was answered.

    The best of more rounds is better by chance alone, so both must have as many. Requests that come at a rate decide
    tokens/s, so there the mean time to the last token counts.
    """
    if load["rounds"] != baseline["rounds"]:
        return None
    if load.get("request_rate"):
        one, other = _rounds(load), _rounds(baseline)
        return min(other) / min(one) if one and other else None
    best, other_best = (float(one["tokens_per_second"]["best"]) for one in (load, baseline))
    return best / other_best if best and other_best else None


def _rounds(load: Mapping[str, Any]) -> list[float]:
    """The figure of each round by which loads are compared."""
    found: list[float] = load.get("round_e2e_ms", []) if load.get("request_rate") else load["tokens_per_second"]["all"]
    return found


def _apart(rounds: Sequence[float]) -> float:
    """The largest ratio between rounds; infinite where one gave nothing."""
    return max(rounds) / min(rounds) if min(rounds) else math.inf


def host_ratio(*sides: Iterable[Mapping[str, Any]]) -> float:
    """How much the host's speed differs between sides: median times of one piece of Python next to the rounds."""
    times = [[us for load in side for us in load.get("host_us", ())] for side in sides]
    medians = [statistics.median(one) for one in times if one]
    return max(medians) / min(medians) if medians else 1.0


def headline(found: Compared) -> str:
    """What a comparison found, in one sentence without a full stop."""
    named, other = (SIDE_NAMES[side] for side in found.sides)
    times = f"{between(found.ratios, '.2f', '–')}×"
    said: Mapping[Outcome, str] = {
        "faster": f"{named} is faster than {other}: {times}",
        "slower": f"{named} is slower than {other}: {times}",
        "mixed": f"{named} is slower than {other} for some loads: {times}",
        "same": f"{named} is as fast as {other}: {times}, within noise",
        "unknown": f"unknown whether {named} is faster than {other}: {times}",
    }
    return f"{found.case}: {said[found.outcome]}"


def verdict(found: Compared, device: str | None) -> str:
    """One line of what was compared; ``device``: vLLM's device type, None where the server was not started here."""
    return " ".join([f"{headline(found)}.", *reasons(found, device)])


def reasons(found: Compared, device: str | None) -> Iterator[str]:
    """Yield what a verdict rests on, sentence by sentence; ``device`` as of :func:`verdict`."""
    named, other = (SIDE_NAMES[side] for side in found.sides)
    after, before = found.busy
    if before and after:
        shares = [between(one, ".0%", "–") for one in (before, after)]
        yield f"GPU busy: {shares[0]} of the time with {other}, {shares[1]} with {named}."
        if max(found.ratios) <= NOISE:
            yield _why_not(found)
    elif device == "cpu":
        yield "A CPU runs no CUDA graphs, from which most of the speedup comes."
    if found.apart > NOISE and any(max(ratio, 1 / ratio) < found.apart for ratio in found.ratios):
        yield f"Rounds of one side, or the host, differ by up to {found.apart:.2f}×: a smaller ratio says little."


def _why_not(found: Compared) -> str:
    if min(found.busy[1]) >= _BUSY:
        return "A GPU that hardly waits leaves nothing to win."
    if found.left:
        reason = max(found.left, key=lambda one: found.left[one])
        return f"The plugin left {sum(found.left.values()):.0%} of the steps to vLLM, most of them for `{reason}`."
    return "`vllm-hwplugin bench --profile` says where the host's time goes."


def _pairs(sides: Sequence[str]) -> list[tuple[str, str]]:
    """What is compared, without what two model runners make of it."""
    return [pair for pair in comparisons(sides) if on_v2(pair[0]) == on_v2(pair[1])]


def _left(loads: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Why no path of the plugin served a step -> share of the steps."""
    steps: Counter[str] = Counter()
    for row in (row for load in loads for row in load["kinds"]):
        outcomes = list(row["paths"].values())
        steps[outcomes[0] if outcomes and SERVED not in outcomes else SERVED] += row["steps"]
    return {reason: count / steps.total() for reason, count in steps.items() if reason != SERVED and count}
