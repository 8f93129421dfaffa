# SPDX-License-Identifier: Apache-2.0
"""The last lines of a comparison: what the plugin gained, and why no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from vllm_hwplugin.spec_decode.step_counts import SERVED

from ._plan import on_v2
from ._table import SIDE_NAMES, comparisons, rows, sides_of

#: Less is within what two runs differ by.
NOTHING = 1.03
#: A GPU that works for so much of the time waits for next to nothing.
_BUSY = 0.9


@dataclass(frozen=True)
class Compared:
    """A side with the plugin and the one that it is held to, over all loads of a case that both have.

    Attributes:
        case: its name.
        sides: the two, that with the plugin first.
        ratios: tokens/s of the first by the second's, one a load.
        busy: shares of the time in which the GPU worked, of each side; empty where unknown.
        apart: how far rounds of one side and load are apart at most, as a ratio.
        left: why the first side left steps to vLLM -> their share of all steps.
    """

    case: str
    sides: tuple[str, str]
    ratios: Collection[float]
    busy: Sequence[Collection[float]]
    apart: float
    left: Mapping[str, float]


def between(figures: Iterable[float], form: str) -> str:
    """The range of the figures, as one number where both ends read the same."""
    known = sorted(figures)
    ends = [format(known[0], form), format(known[-1], form)]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def worth(ratios: Collection[float], whose: str = "stock") -> str:
    """Tokens/s by those of another side, in words."""
    text = f"{between(ratios, '.2f')} times {whose}'s"
    if max(ratios) < 1 / NOTHING:
        return f"a loss: {text}"
    if min(ratios) < 1 / NOTHING:
        return f"{text}: a loss at some size"
    return f"next to nothing: {text}" if max(ratios) <= NOTHING else text


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


def of_loads(case: Mapping[str, Any]) -> Iterator[Compared]:
    """As :func:`of_engines`, of the loads of a case of ``bench serve``."""
    for pair in _pairs([side for side in SIDE_NAMES if side in case["sides"]]):
        loads = zip(*(case["sides"][side]["loads"].values() for side in pair), strict=True)
        # The best of more rounds is better by chance alone.
        if both := [two for two in loads if None not in two and two[0]["rounds"] == two[1]["rounds"]]:
            sides = list(zip(*both, strict=True))
            busy = [[one["gpu_busy"] for one in side if one["gpu_busy"] is not None] for side in sides]
            speeds = [[one["tokens_per_second"] for one in side] for side in sides]
            ratios = [one["best"] / other["best"] for one, other in zip(*speeds, strict=True)]
            apart = max(one["best"] / min(one["all"]) for side in speeds for one in side)
            yield Compared(f"k={case['k']}", pair, ratios, busy, apart, _left(sides[0]))


def verdict(found: Compared, device: str) -> str:
    """One line of what was compared on a device of this type."""
    named, other = (SIDE_NAMES[side] for side in found.sides)
    within = [max(ratio, 1 / ratio) < found.apart for ratio in found.ratios if found.apart > NOTHING]
    text = worth(found.ratios, other)
    if within and all(within):
        text = f"not known: {between(found.ratios, '.2f')} times {other}'s"
    said = [f"{found.case}, {named}: {text} tokens/s."]
    after, before = found.busy
    if before and after:
        shares = [between(one, ".0%") for one in (before, after)]
        said.append(f"The GPU works {shares[0]} of the time with {other}, {shares[1]} with {named}.")
        if max(found.ratios) <= NOTHING:
            said.append(_why_not(found))
    elif device == "cpu":
        said.append("A CPU runs no CUDA graphs, from which most of the gain comes.")
    if any(within):
        said.append(f"Rounds of one side are up to {found.apart:.2f} times apart: a smaller ratio says little.")
    return " ".join(said)


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
