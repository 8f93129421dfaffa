# SPDX-License-Identifier: Apache-2.0
"""Loads on real engines, and what their KV caches hold after each step: runs with rejected drafts, and runs that were
told in advance which drafts will be rejected and never write them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..musa_sim.loads import Request, at_once, run_child

#: Features with graphs of a step. On V2 the restore is a node of the sampling graph where they serve a step, on V1 it
#: follows that graph. An engine that never sleeps does not use the third of V2's.
GRAPHS = {
    "V1": ("draft-full-graph", "draft-loop-graph", "v1-draft-phase", "v1-step-inputs"),
    "V2": ("v2-tail-graph", "v2-step-inputs", "v2-graph-addresses"),
}


@dataclass(frozen=True)
class Job:
    """An engine and its load.

    Attributes:
        options: of ``LLM``.
        requests: of the load.
        oracle: the job whose rejected drafts this one never writes; of the same process an earlier one.
        zeros: whether it writes zeros there.
    """

    options: Mapping[str, Any]
    requests: Sequence[Request]
    oracle: str | None = None
    zeros: bool = False


@dataclass(frozen=True)
class Run:
    """What came of a job.

    Attributes:
        answers: tokens by request.
        rejected: for each step that the scheduler heard of, how many drafts of each request.
        digests: for each step, ``target`` and ``drafter``: by layer, a digest of each block of its KV cache.
        preempted: requests that lost their KV cache to others.
        runner: V1 or V2.
        used: features of the plugin that did their work.
        decisions: of the process's run record.
    """

    answers: Mapping[str, Sequence[int]]
    rejected: Sequence[Mapping[str, int]]
    digests: Sequence[Mapping[str, Mapping[str, Sequence[str]]]]
    preempted: int
    runner: str
    used: Sequence[str]
    decisions: Mapping[str, str]

    @property
    def num_rejected(self) -> int:
        return sum(sum(step.values()) for step in self.rejected)


def side_by_side(folder: Path, processes: Mapping[str, tuple[Mapping[str, Job], Mapping[str, str]]]) -> dict[str, Run]:
    """Processes by name: the jobs of each, whose engines come one after the other, and its environment. One whose job
    waits for another process's comes after it. What they say and find goes into folders, which are made.

    Returns:
        Runs by the names of jobs, each of which is there once.
    """
    found = folder / "found"
    found.mkdir(parents=True)
    at_once(
        {
            name: partial(run_child, "tests.nwor.cache_child", jobs, found, environment, folder / name)
            for name, (jobs, environment) in processes.items()
        }
    )
    return {file.stem: Run(**json.loads(file.read_text())) for file in found.glob("*.json")}


def differing(found: Run, expected: Run, kind: str) -> list[tuple[int, str, list[int]]]:
    """The steps after which a layer of the target or of the drafter does not hold what it should, with its blocks.

    Raises:
        AssertionError: the runs are not of the same steps, so that nothing can be compared.
    """
    assert found.answers == expected.answers
    assert found.rejected == expected.rejected
    assert len(found.digests) == len(expected.digests) >= len(found.rejected)
    wrong = []
    for step in range(len(found.rejected)):
        for layer, blocks in expected.digests[step][kind].items():
            pairs = enumerate(zip(found.digests[step][kind][layer], blocks, strict=True))
            if others := [block for block, (left, right) in pairs if left != right]:
                wrong.append((step, layer, others))
    return wrong
