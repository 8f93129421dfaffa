# SPDX-License-Identifier: Apache-2.0
"""The plugin's gains, case by case: the newest measurement of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from packaging.version import Version

from vllm_hwplugin_lab.bench import SHAPES
from vllm_hwplugin_lab.bench.plan import TINY
from vllm_hwplugin_lab.bench.table import Row, comparisons, rows, sides_of

from ._read import Found

DRAFTER_NAMES = {"eagle": "Eagle", "eagle3": "Eagle3", "dflash": "DFlash", "dspark": "DSpark", "mtp": "MTP"}
_ORDER = (*SHAPES, TINY)


@dataclass(frozen=True)
class Gain:
    """One target and drafter on one device and vLLM version, on a runner with and without the plugin.

    Attributes:
        file: of the measurement.
        rows: one for each batch size.
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
        return f"{DRAFTER_NAMES.get(self.method, self.method)} k={self.rows[0].case['k']}"

    @property
    def target(self) -> str:
        return ("tiny, trained" if self.shape == TINY else SHAPES[self.shape].title) + self.file.asked

    def gpu_busy_ms(self, row: Row) -> float | None:
        """Return the least GPU time of a step over all profiled sides."""
        profiles = [side.get("profile", {}) for side in row.sides.values() if side is not None]
        return min((float(profile["gpu_busy_ms"]) for profile in profiles if profile.get("gpu_busy_ms")), default=None)

    def ratios(self, side: str = "patched", over: str = "stock") -> dict[int, float]:
        """Return tokens/s of ``side`` by ``over``'s, by batch size."""
        ratios = {int(row.batch): row.ratio(side, over) for row in self.rows}
        return {batch: ratio for batch, ratio in ratios.items() if ratio is not None}


def gains(files: Iterable[Found]) -> list[Gain]:
    """Return each comparable case in its newest file, if possible without failures.

    By version, newest first, and size.
    """
    newest: dict[tuple[object, ...], Gain] = {}
    for file in sorted(files, key=lambda file: str(file.results["date"])):
        for case in file.results["cases"]:
            gain = Gain(file, tuple(row for row in rows(file.results) if row.case is case))
            key = (file.device, file.vllm, file.asked, case["shape"], case["method"], case["k"])
            if key in newest and any(side["error"] for side in case["sides"].values()):
                continue
            if any(gain.ratios(*pair) for pair in comparisons(sides_of(file.results))):
                newest[key] = gain
    by_size = sorted(newest.values(), key=lambda gain: (_ORDER.index(gain.shape), gain.drafter))
    return sorted(by_size, key=lambda gain: Version(gain.vllm), reverse=True)


def failures(files: Iterable[Found]) -> list[tuple[Found, str, str]]:
    """Return file, case and side of failures that were not measured since."""
    files = list(files)
    good = {
        (gain.file.device, gain.vllm, gain.file.asked, row.label, side)
        for gain in gains(files)
        for row in gain.rows
        for side, figures in row.sides.items()
        if figures is not None and row.case["sides"][side]["error"] is None
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
