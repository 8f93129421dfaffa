# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_hwplugin_lab.probe._child JOB ANSWER``: the trials of a job, one JSON line an event."""

from __future__ import annotations

import faulthandler
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any, TextIO

from ._cases import Trial, select
from ._session import Job
from ._trial import try_out


def main(job: Job, answer: TextIO) -> None:
    """Do a job.

    Raises:
        Exception: a backend was named that is none, or a case left the device unusable.
    """
    import torch

    from . import _backends, _host, _vllm

    def say(event: str, **body: Any) -> None:
        # Infinity has no JSON.
        body = {key: None if value in (float("inf"), float("-inf")) else value for key, value in body.items()}
        answer.write(json.dumps({"event": event, **body}) + "\n")
        answer.flush()
        # Its own thread does not need Python's lock, which a process that waits for a device may hold.
        faulthandler.dump_traceback_later(job.patience, exit=True)

    # Linux kills a process at its first AMX instruction unless it has asked for AMX. In a worker of vLLM oneDNN has
    # done that, in its first matrix product, before attention runs; here attention may be the first to use it.
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        print("Linux does not let this process use AMX: backends that use it will die of SIGILL", file=sys.stderr)
    device = _vllm.device()
    name = platform.processor() or platform.machine() if device.type == "cpu" else torch.cuda.get_device_name(device)
    say(
        "host", device=device.type, name=name, torch=torch.__version__, vllm=importlib.metadata.version(_distribution())
    )
    chosen = _backends.chosen(job.backends)
    for name, reason in chosen.broken.items():
        say("backend", name=name, path="", own=False, left_out=reason)
    for name, backend in chosen.classes.items():
        own = any(base.__module__.split(".")[0] == "vllm_hwplugin" for base in backend.__mro__)
        path = f"{backend.__module__}.{backend.__qualname__}"
        try:
            host = _host.LayerHost(backend)
        except _host.NoPlainBatch as error:
            say("backend", name=name, path=path, own=own, left_out=str(error))
            continue
        say("backend", name=name, path=path, own=own, left_out=None)
        for trial in select(job.capabilities):
            if (name, *trial.key) not in job.done and host.can_try(trial):
                with torch.inference_mode():
                    _one(say, name, host, trial, job)
    say("done")
    faulthandler.cancel_dump_traceback_later()


def _one(say: Any, name: str, host: Any, trial: Trial, job: Job) -> None:
    labels = {"backend": name, "capability": trial.capability, "value": trial.value}
    say("trial", **labels)
    found = try_out(
        host,
        trial,
        seed=job.seed,
        count=job.cases,
        factor=job.factor,
        on_case=lambda case, declared: say("case", shape=str(case), declared=declared.value),
    )
    say("result", **labels, **found)


def _distribution() -> str:
    return next(iter(importlib.metadata.packages_distributions()["vllm"]))


if __name__ == "__main__":
    with Path(sys.argv[2]).open("a", encoding="utf-8") as stream:
        main(Job.from_json(Path(sys.argv[1]).read_text(encoding="utf-8")), stream)
