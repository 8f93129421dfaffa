# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_hwplugin_lab.probe._child JOB ANSWER``: run a job's trials, and write a JSON line per event.

The trials run on the backend classes that this host's vLLM can use, or on the named classes.
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

# A platform may use another class for some head sizes, as this plugin's does for large heads.
_HEAD_SIZES = (128, 320, 512)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def main(job: Job, answer: TextIO) -> None:
    """Run a job.

    Raises:
        Exception: A named backend does not exist, or the device is unusable after a case.
    """

    def say(event: str, **body: Any) -> None:
        print(json.dumps({"event": event, **body}), file=answer, flush=True)

    # Linux kills a process at its first AMX instruction unless it has requested AMX. In vLLM's workers oneDNN requests
    # it in the first matrix product, before attention runs; here attention may run first.
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        print("Linux denies this process AMX: backends that use AMX will die of SIGILL", file=sys.stderr)
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
                result = try_out(
                    host,
                    trial,
                    seed=job.seed,
                    count=job.cases,
                    factor=job.factor,
                    on_case=lambda case, declared: say("case", shape=str(case), declared=declared),
                )
            say("result", **labels, **result)
    say("done")


def chosen(names: Sequence[str]) -> tuple[dict[str, type[Any]], dict[str, str]]:
    """Return backend classes by name, and why others cannot be asked.

    Args:
        names: vLLM's backend names, which may have several classes, or ``module.Class``. Empty: all classes that the
            platform would choose for a decoder's attention.

    Raises:
        SystemExit: A name has no backend on this host.
    """
    here, broken = ({}, {}) if names and all("." in name for name in names) else _usable()
    if not names:
        return here, broken
    classes: dict[str, type[Any]] = {}
    for name in names:
        if "." in name:
            classes[name] = resolve_name(name)
        elif named := {key: backend for key, backend in here.items() if name in (key, backend.get_name())}:
            classes.update(named)
        else:
            why = broken.get(name, f"expected {', '.join(here) or 'none'}, or module.Class")
            raise SystemExit(f"no backend {name!r} on this host: {why}")
    return classes, {}


def _usable() -> tuple[dict[str, type[Any]], dict[str, str]]:
    """Return `chosen` for all backends of this host."""
    # The key of a class that replaces vLLM's is `module.Class`.
    classes: dict[str, type[Any]] = {}
    broken: dict[str, str] = {}
    for member, head_size, dtype in product(AttentionBackendEnum, _HEAD_SIZES, _DTYPES):
        asked = AttentionSelectorConfig(head_size=head_size, dtype=dtype, kv_cache_dtype="auto", block_size=None)
        try:
            path = current_platform.get_attn_backend_cls(member, asked)
            backend = resolve_name(path)
            # A platform with one backend may return it for every name.
            if backend.get_name() == member.name:
                classes.setdefault(member.name if path == member.get_path() else path, backend)
        except (ImportError, ValueError, NotImplementedError):
            continue  # not registered, a missing package, or refused by the platform: not a backend of this host
        except Exception as error:
            # Some classes for one vendor's devices fail with any error on another vendor's.
            broken[member.name] = f"{member.name} cannot be asked on this host: {one_line(error)}"
    return classes, broken


if __name__ == "__main__":
    with Path(sys.argv[2]).open("a", encoding="utf-8") as stream:
        main(Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), stream)
