# SPDX-License-Identifier: Apache-2.0
"""The process that measures: ``python -m vllm_hwplugin_lab.bench.micro._child JOB ANSWER``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ...probe import one_line
from .._child import Answer
from ._supervise import FAILED, MEASURED, MISSING, REFUSED, Cell, Missing, Refused, outcome
from ._timer import Copies, Timer

_PACKAGES = ("torch", "triton", "vllm", "nvidia-cutlass-dsl", "quack-kernels")


def main(arguments: Sequence[str]) -> None:
    job = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    answer = Answer(Path(arguments[1]))
    todo = [(kernel, case) for kernel, case in job["todo"]]
    end = time.monotonic() + job["seconds"]
    devices = torch.get_device_module(job["device"])
    timer = Timer(torch.device(job["device"], devices.current_device()))
    copies = Copies(timer)
    answer.say(
        "ready",
        packages={name: _version(name) for name in _PACKAGES},
        device=devices.get_device_name(timer.device),
        l2_bytes=timer.l2_bytes,
        copy_bandwidth=copies.bandwidth(),
    )
    if job["kind"] == "ops":
        from ._ops_bench import OpsBench

        measure = OpsBench(timer, copies, job["seed"]).measure
    else:
        from ._attention_bench import AttentionBench, pool_elements
        from ._attention_kernels import KERNELS

        elements = pool_elements(timer, [case for _, case in todo])
        measure = AttentionBench(timer, copies, job["seed"], elements, KERNELS).measure
    run_cells(todo, measure, answer.say, end=end, check_device=devices.synchronize)
    answer.say("done")


def run_cells(
    todo: Sequence[Cell],
    measure: Callable[[str, str], dict[str, Any]],
    say: Callable[..., None],
    *,
    end: float,
    check_device: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run ``todo`` in order; report each cell's begin and outcome.

    Args:
        measure: Measures a kernel on a case; returns its fields of the results file.
        end: Time after which no cell begins; later cells are not reported.
        check_device: Raises if the device is unusable.

    Raises:
        SystemExit: The device is unusable after a cell, whose begin was reported and no outcome.
    """
    # Reasons by kernel and kind of attention or operation: finding one may take a compilation.
    absent: dict[tuple[str, str], str] = {}
    for cell in todo:
        if clock() > end:
            break
        kernel, case = cell
        of = kernel, case.split()[0]
        say("begin", kernel=kernel, case=case)
        try:
            if of in absent:
                raise Missing(absent[of])
            result = outcome(cell, MEASURED, None, **measure(kernel, case))
        except Missing as error:
            absent[of] = str(error)
            result = outcome(cell, MISSING, str(error))
        except Refused as error:
            result = outcome(cell, REFUSED, str(error))
        except Exception as error:  # any error of a rival or of the plugin's kernel
            result = outcome(cell, FAILED, one_line(error))
            try:
                check_device()
            except Exception:  # its message only tells that an earlier launch failed
                raise SystemExit(f"the device was not usable after it: {result['reason']}") from None
        say("cell", outcome=result)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(sys.argv[1:])
