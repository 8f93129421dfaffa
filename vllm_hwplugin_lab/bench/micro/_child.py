# SPDX-License-Identifier: Apache-2.0
"""The process that measures: ``python -m vllm_hwplugin_lab.bench.micro._child JOB ANSWER``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .._child import Answer
from . import _attention_cases
from ._cells import Cell
from ._run_cells import Bench, run_cells
from ._timer import Effort

ATTENTION = "attention"
OPS = "ops"

_PACKAGES = ("torch", "triton", "vllm", "flashinfer-python", "nvidia-cutlass-dsl")


def main(arguments: Sequence[str]) -> int:
    job = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    answer = Answer(Path(arguments[1]))
    todo = [(kernel, case) for kernel, case in job["todo"]]

    import torch

    from ._copies import Copies
    from ._timer import GraphTimer

    devices = torch.get_device_module(job["device"])
    device = torch.device(job["device"], devices.current_device())
    facts = devices.get_device_properties(device)
    # torch_musa does not say it.
    l2_bytes: int | None = getattr(facts, "L2_cache_size", None)
    copies = Copies(GraphTimer(job["device"]), device, l2_bytes, Effort(**job["effort"]))
    answer.say(
        "ready",
        pid=os.getpid(),
        packages=_versions(),
        cuda=torch.version.cuda,
        musa=getattr(torch.version, "musa", None),
        device=facts.name,
        multiprocessors=facts.multi_processor_count,
        l2_bytes=l2_bytes,
        copy_bandwidth=copies.bandwidth(),
    )
    limits = {"seconds": job["seconds"], "limit": job["limit"]}
    usable = run_cells(todo, _bench(job, todo, copies), answer.say, check_device=devices.synchronize, **limits)
    if not usable:
        return 1
    answer.say("copies", copies=copies.known())
    answer.say("done")
    return 0


def _bench(job: dict[str, Any], todo: list[Cell], copies: Any) -> Bench:
    if job["kind"] == OPS:
        from ._ops_bench import OpsBench

        return OpsBench(copies, job["seed"])
    import torch

    from ._attention_bench import AttentionBench

    assert copies.l2_bytes is not None  # the attention kernels are for CUDA alone
    wanted = max(_attention_cases.CASES[case].cache_elements for _, case in todo)
    # Two sets at least of the smaller cases, and room for what the kernels and the right answer need.
    small = 4 * copies.l2_bytes
    free, _ = torch.cuda.mem_get_info(copies.device)
    elements = min(max(wanted, small), int(free * 0.6) // 4)
    return AttentionBench(copies, job["seed"], elements)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
