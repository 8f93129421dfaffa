# SPDX-License-Identifier: Apache-2.0
"""What the plugin gains, case by case: the newest measurement of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from packaging.version import Version

from vllm_hwplugin_lab.bench import SHAPES
from vllm_hwplugin_lab.bench.plan import TINY
from vllm_hwplugin_lab.bench.table import Row, comparisons, rows, sides_of

from ._read import Found

_ORDER = (*SHAPES, TINY)


@dataclass(frozen=True)
class Gain:
    """One target and drafter on one device and vLLM version, measured on a runner with and without the plugin.

    Attributes:
        file: where it was measured.
        rows: one a batch size.
    """

    file: Found
    rows: tuple[Row, ...]

    @property
    def vllm(self) -> str:
        return self.file.vllm

    @property
    def shape(self) -> str:
        return str(self.rows[0].case["shape"])

    @property
    def method(self) -> str:
        return str(self.rows[0].case["method"])

    @property
    def drafter(self) -> str:
        names = {"eagle3": "Eagle3", "dflash": "DFlash", "mtp": "MTP"}
        return f"{names.get(self.method, self.method)} k={self.rows[0].case['k']}"

    @property
    def target(self) -> str:
        return ("tiny, trained" if self.shape == TINY else SHAPES[self.shape].title) + self.file.asked

    def gpu_busy_ms(self, row: Row) -> float | None:
        """Of a step, the least of all sides; None where no side was profiled."""
        profiles = [side.get("profile", {}) for side in row.sides.values() if side is not None]
        return min((float(one["gpu_busy_ms"]) for one in profiles if one.get("gpu_busy_ms")), default=None)

    def ratios(self, side: str = "patched", over: str = "stock") -> dict[int, float]:
        """Batch size -> tokens/s of ``side`` by those of ``over``, without batch sizes that lack one."""
        found = {int(row.batch): row.ratio(side, over) for row in self.rows}
        return {batch: ratio for batch, ratio in found.items() if ratio is not None}


def gains(files: Iterable[Found]) -> list[Gain]:
    """Each case of the files in which two sides can be compared, in its newest file without a failure, if there is one.

    By version and size.
    """
    newest: dict[tuple[object, ...], Gain] = {}
    for file in sorted(files, key=lambda one: str(one.results["date"])):
        for case in file.results["cases"]:
            own = tuple(row for row in rows(file.results) if row.case is case)
            found = Gain(file, own)
            key = (file.device, file.vllm, file.asked, case["shape"], case["method"], case["k"])
            if key in newest and any(side["error"] for side in case["sides"].values()):
                continue
            if any(found.ratios(*pair) for pair in comparisons(sides_of(file.results))):
                newest[key] = found
    return sorted(newest.values(), key=lambda one: (Version(one.vllm), _place(one.shape), one.drafter))


def failures(files: Iterable[Found]) -> list[tuple[Found, str, str]]:
    """File, case and side of what failed, if only half-way, and was not measured since."""
    files = list(files)
    good = {
        (one.file.device, one.vllm, one.file.asked, row.label, side)
        for one in gains(files)
        for row in one.rows
        for side, found in row.sides.items()
        if found is not None and row.case["sides"][side]["error"] is None
    }
    return [
        (file, label, side)
        for file in files
        for case in file.results["cases"]
        for side, entry in case["sides"].items()
        if entry["error"]
        and (file.device, file.vllm, file.asked, label := f"{case['shape']} {case['method']} k={case['k']}", side)
        not in good
    ]


def _place(shape: str) -> int:
    return _ORDER.index(shape) if shape in _ORDER else len(_ORDER)
