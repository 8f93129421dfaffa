# SPDX-License-Identifier: Apache-2.0
"""How long GPUs worked, as their driver says: NVML has a sample for every sixth of a second to every second."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit


def samples(gpu: Any, since: float, until: float) -> list[float]:
    """Shares of time in which a GPU ran a kernel, between two of ``time.time``.

    Args:
        gpu: a handle of NVML.
        since: seconds.
        until: seconds.

    Raises:
        pynvml.NVMLError: the driver does not say.
    """
    from vllm.third_party import pynvml

    _, found = pynvml.nvmlDeviceGetSamples(gpu, pynvml.NVML_GPU_UTILIZATION_SAMPLES, int(since * 1e6))
    return [one.sampleValue.uiVal / 100 for one in found if one.timeStamp <= until * 1e6]


def of_server(url: str, since: float, until: float) -> list[float]:
    """As :func:`samples`, of the GPUs of a server; empty where it runs elsewhere or the driver does not answer.

    They are the GPUs with a process of the server, or the only GPU: a container may hide the processes of a GPU.
    """
    from vllm.third_party import pynvml

    address = urlsplit(url)
    if not _is_here(address.hostname or ""):
        return []
    try:
        pynvml.nvmlInit()
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        server = _processes(address.port or 80)
        own = [gpu for gpu in gpus if server & {one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}]
        measured = own or (gpus if len(gpus) == 1 else [])
        return [share for gpu in measured for share in samples(gpu, since, until)]
    except pynvml.NVMLError:
        return []


def _is_here(host: str) -> bool:
    """Whether a name or an address is this host's loopback."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return False


def _processes(port: int) -> set[int]:
    """The processes that listen on a port, as far as this user may see them, and those below them."""
    import psutil

    listening: Iterable[int | None] = (
        one.pid for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    )
    found: set[int] = set()
    for pid in listening:
        if pid is not None:
            try:
                found |= {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
            except psutil.NoSuchProcess:
                continue
    return found
