# SPDX-License-Identifier: Apache-2.0
"""What a benchmark of engines measured, row by row, and the table at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

NOT_MEASURED = "-"

#: Side -> its name in tables, in their order.
SIDE_NAMES = {"stock": "stock", "patched": "patched", "mrv2": "MRV2"}


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
        """Tokens/s of ``side`` by those of ``over``, both at their best round; None where one was not measured."""
        one, other = self.sides.get(side), self.sides.get(over)
        if one is None or other is None:
            return None
        return float(one["tokens_per_second"]["best"] / other["tokens_per_second"]["best"])


def rows(results: Mapping[str, Any]) -> Iterator[Row]:
    """Each batch size of each case of a results file."""
    for case in results["cases"]:
        measured = {side: entry["batches"] for side, entry in case["sides"].items()}
        for batch in next(iter(measured.values())):
            yield Row(case, batch, {side: measured.get(side, {}).get(batch) for side in sides_of(results)})


def sides_of(results: Mapping[str, Any]) -> list[str]:
    """Stock and patched always, so that a side that is missing shows; Model Runner V2 where any case has it."""
    present = {side for case in results["cases"] for side in case["sides"]} | {"stock", "patched"}
    return [side for side in SIDE_NAMES if side in present]


def table(results: Mapping[str, Any]) -> Table:
    """For the terminal: speed, ratio, time of a step, acceptance and launches of each side."""
    sides = sides_of(results)
    drawn = Table(title="tokens/s: best (median)")
    ratios = ["ratio", "patched / MRV2"] if "mrv2" in sides else ["ratio"]
    last = ("step ms", "acceptance length", "launches a step")
    for name in ("case", "batch", *(SIDE_NAMES[side] for side in sides), *ratios, *last):
        drawn.add_column(name, justify="left" if name == "case" else "right")
    for row in rows(results):
        shown = [row.sides[side] for side in sides]
        by = [row.ratio(over=other) for other in ("stock", "mrv2")[: len(ratios)]]
        drawn.add_row(
            row.label,
            row.batch,
            *map(speed, shown),
            *(NOT_MEASURED if ratio is None else f"{ratio:.2f}" for ratio in by),
            " → ".join(map(step, shown)),
            " → ".join(map(length, shown)),
            " → ".join(profiled(side, "kernel_launches") for side in shown),
        )
    return drawn


def speed(side: Mapping[str, Any] | None) -> str:
    """Tokens/s of the best round, and of the median one."""
    if side is None:
        return NOT_MEASURED
    speeds = side["tokens_per_second"]
    return f"{speeds['best']:.0f} ({speeds['median']:.0f})"


def step(side: Mapping[str, Any] | None) -> str:
    """Milliseconds of a step."""
    return NOT_MEASURED if side is None or side["step_ms"] is None else f"{side['step_ms']:.2f}"


def length(side: Mapping[str, Any] | None) -> str:
    """Tokens a step, the target's own included."""
    return NOT_MEASURED if side is None or not side["drafts"] else f"{side['acceptance_length']:.3f}"


def profiled(side: Mapping[str, Any] | None, name: str) -> str:
    """A figure of the profile; milliseconds with two digits."""
    value = (side or {}).get("profile", {}).get(name)
    return NOT_MEASURED if value is None else f"{value:.2f}" if name == "gpu_busy_ms" else f"{value:g}"
