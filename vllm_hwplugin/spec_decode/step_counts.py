# SPDX-License-Identifier: Apache-2.0
"""Count the steps that each fast path takes while the engine runs, and why it missed the others.

A step adds 1 to an integer, here and nowhere else. Every few seconds a thread writes the sums to the run record, where
`doctor` and vLLM's metrics read them. It logs once which path hardly ever takes a step.
"""

from __future__ import annotations

import logging
import multiprocessing.util
import threading
import time
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from vllm_hwplugin.base import run_records

if TYPE_CHECKING:
    from typing_extensions import TypeIs

logger = logging.getLogger("vllm.hwplugin")

#: Seconds by which the run record may be behind.
INTERVAL: Final = 5.0
#: The outcome of a served step, next to the names of :class:`Reason`.
SERVED: Final = "served"

# Out of this many decode steps an active path should take a tenth.
_JUDGED: Final = 1000


class Reason(IntEnum):
    """Why a fast path did not take a step. The first reason that holds counts."""

    meaning: str

    def __new__(cls, meaning: str) -> Reason:
        value = len(cls.__members__) + 1
        reason = int.__new__(cls, value)
        reason._value_ = value
        reason.meaning = meaning
        return reason

    NOT_CAPTURED = "there is no graph: none was captured, or they were given up"
    PROMPT = "a request's prompt is computed, or again what it had before it was preempted"
    STRUCTURED_OUTPUT = "a request must follow a grammar"
    FEWER_DRAFTS = "a request has, or is to get, another number of drafts than graphs are for"
    LARGER_BATCH = "there are more requests or tokens than the largest graph takes"
    NO_FULL_GRAPH = "the batch runs in no FULL graph of the target, or of the draft"
    SAMPLING_PARAMETERS = "a request asks the sampler for more than the graphs do"
    ADAPTERS = "a request's adapter (LoRA) may change its logits"
    REQUESTS_CHANGED = "other requests than in the step before, or in another order"
    STEP_BEFORE = "the step before left nothing on the device to go on from"
    NO_FREE_ROW = "no row of the requests' state is free for the graph's padding"
    MOVED = "what the graph reads lies elsewhere in this step"

    @property
    def label(self) -> str:
        """The reason's name in run records and metrics."""
        return self.name.lower()


class StepCounts:
    """The counts of one part of a feature, named in one word. New counts for the same part replace the old."""

    def __init__(self, feature: str, part: str):
        self.feature, self.part = feature, part
        self.reset()
        _paths[f"{feature} {part}"] = self

    def reset(self) -> None:
        self._counts = [0] * (1 + len(Reason))
        self._judged = False

    def served(self) -> None:
        self._counts[0] += 1

    def missed(self, outcome: object) -> TypeIs[Reason]:
        """Count a step; return whether `outcome` is a reason for vLLM's way."""
        self._counts[outcome if isinstance(outcome, Reason) else 0] += 1
        return isinstance(outcome, Reason)

    def outcomes(self) -> dict[str, int]:
        """Return nonzero counts by outcome: `SERVED`, or a reason's label."""
        served, *missed = self._counts
        counts = {SERVED: served, **{reason.label: missed[reason - 1] for reason in Reason}}
        return {outcome: count for outcome, count in counts.items() if count}

    def judge(self) -> None:
        """Log once if under a tenth of 1000 decode steps were served."""
        counts = list(self._counts)
        counts[Reason.PROMPT] = 0
        steps, served = sum(counts), counts[0]
        if self._judged or steps < _JUDGED:
            return
        self._judged = True
        entry = run_records.current()
        use = None if entry is None else entry.uses.get(self.feature)
        if 10 * served < steps and use is not None and use["used"]:
            main = max(Reason, key=lambda reason: counts[reason])
            logger.info(
                "%s: %s of %d decode steps was served in %d; in %d of the others %s",
                *(self.feature, self.part, steps, served, counts[main], main.meaning),
            )


_paths: dict[str, StepCounts] = {}
_keeper: threading.Thread | None = None


def begin() -> None:
    """Count from 0 now, without warm-up, and start writing the sums."""
    global _keeper
    for counts in _paths.values():
        counts.reset()
    save()
    entry = run_records.current()
    # The thread does not run in a fork of its process.
    if entry is not None and (_keeper is None or not _keeper.is_alive()):
        _keeper = threading.Thread(target=_keep, args=(entry,), name="vllm-hwplugin steps", daemon=True)
        _keeper.start()
        # A `multiprocessing` process skips atexit handlers.
        multiprocessing.util.Finalize(None, save, exitpriority=0)


def save() -> None:
    outcomes = {path: counts.outcomes() for path, counts in list(_paths.items())}
    run_records.keep_steps({path: counted for path, counted in outcomes.items() if counted})


def _keep(entry: run_records.RunRecord) -> None:
    while True:
        time.sleep(INTERVAL)
        if run_records.current() is not entry:
            return
        save()
        for counts in list(_paths.values()):
            counts.judge()
