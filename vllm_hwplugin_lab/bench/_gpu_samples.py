# SPDX-License-Identifier: Apache-2.0
"""What the driver sampled of a GPU: NVML has a sample every sixth of a second to every second."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Any, Final
from urllib.parse import urlsplit

#: What is sampled -> NVML's kind of samples, and its unit. The share of time in which a GPU ran a kernel; and its
#: power, whose limit lowers the clock. An H200 has no samples of the clock.
SAMPLED: Final = {
    "gpu_busy": ("NVML_GPU_UTILIZATION_SAMPLES", 1e-2),
    "gpu_power_w": ("NVML_TOTAL_POWER_SAMPLES", 1e-3),
}


def samples(gpu: Any, name: str, since: float, until: float) -> list[float]:
    """Return samples between two of ``time.time``.

    Args:
        gpu: A handle of NVML.
        name: One of ``SAMPLED``.

    Raises:
        pynvml.NVMLError: The driver does not answer, or has no such samples of this GPU.
    """
    from vllm.third_party import pynvml

    kind, unit = SAMPLED[name]
    _, values = pynvml.nvmlDeviceGetSamples(gpu, getattr(pynvml, kind), int(since * 1e6))
    return [sample.sampleValue.uiVal * unit for sample in values if sample.timeStamp <= until * 1e6]


def of_server(url: str, name: str, since: float, until: float) -> list[float]:
    """Return the :func:`samples` of a server's GPUs.

    Empty if the server runs elsewhere, or the driver does not answer. The server's GPUs are those with a process of the
    server, or the only GPU, because a container may hide processes.
    """
    from vllm.third_party import pynvml

    address = urlsplit(url)
    if not _is_here(address.hostname or ""):
        return []
    try:
        pynvml.nvmlInit()
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        server = _processes(address.port or 80)
        own = [
            gpu
            for gpu in gpus
            if server & {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
        ]
        measured = own or (gpus if len(gpus) == 1 else [])
        return [sample for gpu in measured for sample in samples(gpu, name, since, until)]
    except pynvml.NVMLError:
        return []


def _is_here(host: str) -> bool:
    """Whether a name or an address is the loopback."""
    try:
        addresses = [address[0] for *_, address in socket.getaddrinfo(host, None)]
        return all(ipaddress.ip_address(address).is_loopback for address in addresses)
    except OSError:
        return False


def _processes(port: int) -> set[int]:
    """Return the processes that listen on a port, with their children."""
    # Only processes that this user may see.
    import psutil

    listening: Iterable[int | None] = (
        socket_.pid
        for socket_ in psutil.net_connections("tcp")
        if socket_.status == psutil.CONN_LISTEN and socket_.laddr.port == port
    )
    pids: set[int] = set()
    for pid in listening:
        if pid is not None:
            try:
                pids |= {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
            except psutil.NoSuchProcess:
                continue
    return pids
