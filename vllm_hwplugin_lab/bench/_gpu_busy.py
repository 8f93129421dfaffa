# SPDX-License-Identifier: Apache-2.0
"""GPU utilization from the driver: NVML has a sample every sixth of a second to every second."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit


def samples(gpu: Any, since: float, until: float) -> list[float]:
    """Return shares of time in which a GPU ran a kernel.

    The samples are between two of ``time.time``.

    Args:
        gpu: A handle of NVML.

    Raises:
        pynvml.NVMLError: The driver does not answer.
    """
    from vllm.third_party import pynvml

    _, values = pynvml.nvmlDeviceGetSamples(gpu, pynvml.NVML_GPU_UTILIZATION_SAMPLES, int(since * 1e6))
    return [sample.sampleValue.uiVal / 100 for sample in values if sample.timeStamp <= until * 1e6]


def of_server(url: str, since: float, until: float) -> list[float]:
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
        return [share for gpu in measured for share in samples(gpu, since, until)]
    except pynvml.NVMLError:
        return []


def _is_here(host: str) -> bool:
    """Whether a name or an address is the loopback."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
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
