# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_hwplugin_lab.probe._child JOB ANSWER``: the trials of a job, one JSON line an event.

They run on the backend classes that this host's vLLM would use, or on those that are named.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TextIO

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from . import _host, _vllm
from ._cases import trials
from ._session import Job, one_line
from ._trial import try_out

# A platform may answer with a class of its own for some of them, as this plugin's does for large heads.
_HEAD_SIZES = (128, 320, 512)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def main(job: Job, answer: TextIO) -> None:
    """Do a job.

    Raises:
        Exception: a backend was named that is none, or a case left the device unusable.
    """

    def say(event: str, **body: Any) -> None:
        print(json.dumps({"event": event, **body}), file=answer, flush=True)

    # Linux kills a process at its first AMX instruction unless it has asked for AMX. In a worker of vLLM oneDNN has
    # done that, in its first matrix product, before attention runs; here attention may be the first to use it.
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        print("Linux does not let this process use AMX: backends that use it will die of SIGILL", file=sys.stderr)
    device = _vllm.device()
    name = platform.processor() or platform.machine() if device.type == "cpu" else torch.cuda.get_device_name(device)
    version = importlib.metadata.version(importlib.metadata.packages_distributions()["vllm"][0])
    say("host", device=device.type, name=name, torch=torch.__version__, vllm=version)
    classes, broken = chosen(job.backends)
    for name, reason in broken.items():
        say("backend", name=name, path="", own=False, left_out=reason)
    for name, backend in classes.items():
        facts = {
            "name": name,
            "path": f"{backend.__module__}.{backend.__qualname__}",
            "own": any(base.__module__.split(".")[0] == "vllm_hwplugin" for base in backend.__mro__),
        }
        try:
            host = _host.LayerHost(backend)
        except _host.NoPlainBatch as error:
            say("backend", **facts, left_out=str(error))
            continue
        say("backend", **facts, left_out=None)
        for trial in trials(job.capabilities):
            if [name, *trial.key] in job.done or not host.can_try(trial):
                continue
            labels = {"backend": name, "capability": trial.capability, "value": trial.value}
            say("trial", **labels)
            with torch.inference_mode():
                found = try_out(
                    host,
                    trial,
                    seed=job.seed,
                    count=job.cases,
                    factor=job.factor,
                    on_case=lambda case, declared: say("case", shape=str(case), declared=declared),
                )
            say("result", **labels, **found)
    say("done")


def chosen(names: Sequence[str]) -> tuple[dict[str, type[Any]], dict[str, str]]:
    """The classes that names stand for, and why others cannot be asked; both by name.

    Args:
        names: vLLM's name of a backend, which may be several classes, or ``module.Class``; none for all that the
            platform would choose for a decoder's attention.

    Raises:
        SystemExit: a name is of no backend of this host.
    """
    here, broken = ({}, {}) if names and all("." in name for name in names) else _usable()
    if not names:
        return here, broken
    found: dict[str, type[Any]] = {}
    for name in names:
        if "." in name:
            found[name] = resolve_name(name)
        elif meant := {key: one for key, one in here.items() if name in (key, one.get_name())}:
            found.update(meant)
        else:
            why = broken.get(name, f"expected {', '.join(here) or 'none'}, or module.Class")
            raise SystemExit(f"no backend {name!r} on this host: {why}")
    return found, {}


def _usable() -> tuple[dict[str, type[Any]], dict[str, str]]:
    """By vLLM's name of a backend; a class that the platform puts in a registered one's place, by ``module.Class``."""
    found: dict[str, type[Any]] = {}
    broken: dict[str, str] = {}
    for member, head_size, dtype in product(AttentionBackendEnum, _HEAD_SIZES, _DTYPES):
        asked = AttentionSelectorConfig(head_size=head_size, dtype=dtype, kv_cache_dtype="auto", block_size=None)
        try:
            path = current_platform.get_attn_backend_cls(member, asked)
            backend = resolve_name(path)
            # A platform may also answer with its only backend, whatever was named.
            if backend.get_name() == member.name:
                found.setdefault(member.name if path == member.get_path() else path, backend)
        except (ImportError, ValueError, NotImplementedError):
            continue  # not registered, a package is missing, or the platform says no: not a backend of this host
        except Exception as error:
            # Some of vLLM's classes for one maker's devices look for that device when they are asked on another.
            broken[member.name] = f"{member.name} cannot be asked on this host: {one_line(error)}"
    return found, broken


if __name__ == "__main__":
    with Path(sys.argv[2]).open("a", encoding="utf-8") as stream:
        main(Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), stream)
