# SPDX-License-Identifier: Apache-2.0
"""Loads on real engines, and what their KV caches hold after each step: runs with rejected drafts, and runs that were
told in advance which drafts will be rejected and never write them.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..musa_sim.loads import Request


@dataclass(frozen=True)
class Job:
    """An engine and its load.

    Attributes:
        options: of ``LLM``.
        requests: of the load.
        oracle: the job of the same process whose rejected drafts this one never writes.
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
        digests: for each step, ``target`` and ``drafter``: a digest of all bytes of each layer's KV cache.
        preempted: requests that lost their KV cache to others.
        runner: V1 or V2.
        used: features of the plugin that did their work.
        decisions: of the process's record.
    """

    answers: Mapping[str, Sequence[int]]
    rejected: Sequence[Mapping[str, int]]
    digests: Sequence[Mapping[str, Mapping[str, str]]]
    preempted: int
    runner: str
    used: Sequence[str]
    decisions: Mapping[str, str]

    @property
    def num_rejected(self) -> int:
        return sum(sum(step.values()) for step in self.rejected)


def run(folder: Path, jobs: Mapping[str, Job], environment: Mapping[str, str]) -> dict[str, Run]:
    """One process, and its engines one after the other; what it says goes into a folder, which is made."""
    folder.mkdir(parents=True)
    asked, found, log = folder / "jobs.json", folder / "runs.json", folder / "log"
    asked.write_text(json.dumps({name: asdict(job) for name, job in jobs.items()}))
    variables = {"VLLM_HWPLUGIN_CACHE_DIR": str(folder / "cache"), "VLLM_CACHE_ROOT": str(folder / "vllm")}
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "tests.nwor.cache_child", str(asked), str(found)],
            env={**environment, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=850,
        )
    assert done.returncode == 0, log.read_text(errors="replace")[-6000:]
    return {name: Run(**one) for name, one in json.loads(found.read_text()).items()}


def side_by_side(folder: Path, processes: Mapping[str, tuple[Mapping[str, Job], Mapping[str, str]]]) -> dict[str, Run]:
    """Processes at the same time, one for each core: by the name of a folder, the jobs and the environment of each."""
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        runs = [pool.submit(run, folder / name, *process) for name, process in processes.items()]
        return {name: found for one in runs for name, found in one.result().items()}


def differing(found: Run, expected: Run, kind: str) -> list[int]:
    """The steps after which a layer of the target or of the drafter does not hold what it should.

    Raises:
        AssertionError: the runs are not of the same steps, so that nothing can be compared.
    """
    assert found.answers == expected.answers
    assert found.rejected == expected.rejected
    assert len(found.digests) == len(expected.digests) >= len(found.rejected)
    steps = range(len(found.rejected))
    return [step for step in steps if found.digests[step][kind] != expected.digests[step][kind]]
