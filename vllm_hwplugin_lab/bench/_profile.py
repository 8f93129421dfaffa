# SPDX-License-Identifier: Apache-2.0
"""Launches and GPU time per verify step, from torch's profiler.

A step is the time between the starts of two successive ``execute_model`` calls. Only steps that verify drafts for every
running request count, which excludes prefill and the end of a batch. The draft phase is the drafter's ``propose``.
"""

from __future__ import annotations

import gzip
import json
import statistics
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from ._inside import drafter_of, drafting_of

STEP = "hwplugin.verify-step"
OTHER_STEP = "hwplugin.other-step"
DRAFT = "hwplugin.draft"

_GPU_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})


class Profile:
    """The profile of a ``profiled`` block; reading it takes time."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.profiler: Any = None

    @cached_property
    def trace(self) -> list[dict[str, Any]]:
        """Events of the Chrome trace, after the block."""
        with tempfile.TemporaryDirectory(prefix="hwplugin-trace-") as folder:
            path = Path(folder) / "trace.json" if self._file is None else self._file
            self.profiler.export_chrome_trace(str(path))
            opened = gzip.open if path.suffix == ".gz" else open
            with opened(path, "rt", encoding="utf-8") as trace:
                return list(json.load(trace)["traceEvents"])

    def counts(self) -> dict[str, Any]:
        """Return :func:`counts_per_step` of the trace."""
        return counts_per_step(self.trace)


@contextmanager
def profiled(runner: Any, file: Path | None = None) -> Iterator[Profile]:
    """Profile the block.

    Args:
        runner: vLLM's model runner (V1 or V2); its steps and drafts are marked.
        file: File for the Chrome trace (for Perfetto), written when the profile is read; compressed if it ends with
            ``.gz``. None: no file stays.
    """
    import torch
    from torch.profiler import record_function, supported_activities

    def marked(original: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with record_function(name(*args, **kwargs)):
                return original(*args, **kwargs)

        return call

    def step_name(scheduler_output: Any, *_: Any, **__: Any) -> str:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        tokens = scheduler_output.num_scheduled_tokens
        # Without a drafter a decoding request has one token.
        decode = len(drafts) == len(tokens) if drafts_here else set(tokens.values()) == {1}
        return STEP if tokens and decode and not scheduler_output.scheduled_new_reqs else OTHER_STEP

    result = Profile(file)
    drafter, drafts_here = drafting_of(runner), drafter_of(runner) is not None
    runner.execute_model = marked(runner.execute_model, step_name)
    if drafter is not None:
        drafter.propose = marked(drafter.propose, lambda *_, **__: DRAFT)
    try:
        with torch.profiler.profile(activities=supported_activities()) as result.profiler:
            yield result
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    finally:
        # Both were set on the instances.
        del runner.execute_model
        if drafter is not None:
            del drafter.propose


def counts_per_step(trace: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the verify steps of a Chrome trace.

    Times are in microseconds. The GPU runs behind the host, so its busy time is not measured per step: it is the time
    that kernels, copies and sets cover in all windows, divided by the steps.
    """
    spans = [e for e in trace if e.get("ph") == "X"]
    marks = sorted((e for e in spans if e.get("cat") == "user_annotation"), key=lambda e: e["ts"])
    starts = [(e["ts"], e["name"]) for e in marks if e["name"] in (STEP, OTHER_STEP)]
    windows = [(start, following) for (start, name), (following, _) in pairwise(starts) if name == STEP]
    if not windows:
        return {"steps": 0}
    calls = sorted((e["ts"], _kind(e["name"])) for e in spans if e.get("cat") in _RUNTIME)
    calls = [c for c in calls if c[1]]
    times = [c[0] for c in calls]
    drafts = [(e["ts"], e["ts"] + e["dur"]) for e in marks if e["name"] == DRAFT]

    def count(start: float, end: float, kind: str) -> int:
        return sum(1 for _, k in calls[bisect_left(times, start) : bisect_left(times, end)] if k == kind)

    def per_step(kind: str) -> float:
        return statistics.median(count(a, b, kind) for a, b in windows)

    def per_draft(kind: str) -> float | None:
        inside = [d for d in drafts if any(a <= d[0] < b for a, b in windows)]
        return statistics.median(count(a, b, kind) for a, b in inside) if inside else None

    work = [(e["ts"], e["ts"] + e["dur"]) for e in spans if e.get("cat") in _GPU_WORK]
    return {
        "steps": len(windows),
        "step_ms_profiled": statistics.median(b - a for a, b in windows) / 1e3,
        "gpu_busy_ms": _covered(work, windows) / 1e3 / len(windows),
        "graph_launches": per_step("graph"),
        "kernel_launches": per_step("kernel"),
        "copies": per_step("copy"),
        "draft_graph_launches": per_draft("graph"),
        "draft_kernel_launches": per_draft("kernel"),
    }


def _kind(name: str) -> str:
    if name.startswith(("cudaGraphLaunch", "cuGraphLaunch")):
        return "graph"
    if name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel")):
        return "kernel"
    if name.startswith(("cudaMemcpyAsync", "cuMemcpy")):
        return "copy"
    return ""


def _covered(work: list[tuple[float, float]], windows: list[tuple[float, float]]) -> float:
    """Return how much of the windows the work intervals cover."""
    merged: list[list[float]] = []
    for start, end in sorted(work):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return sum(
        max(0.0, min(end, b) - max(start, a)) for start, end in merged for a, b in windows if start < b and end > a
    )
