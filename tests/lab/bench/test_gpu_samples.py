"""Which GPUs are a server's, with the driver replaced: sockets and processes are this test's own."""

from __future__ import annotations

import os
import socket
import sys
from types import ModuleType, SimpleNamespace

import pytest

from vllm_hwplugin_lab.bench import _gpu_samples

pytest.importorskip("psutil")


class NVMLError(Exception):
    pass


@pytest.fixture
def driver(monkeypatch):
    """`driver(processes)`: a driver with a GPU for each entry, which are the processes that it names there."""

    def use(*processes):
        nvml = ModuleType("vllm.third_party.pynvml")
        nvml.NVMLError = NVMLError
        nvml.NVML_TOTAL_POWER_SAMPLES, nvml.NVML_GPU_UTILIZATION_SAMPLES = 0, 1
        nvml.nvmlInit = lambda: None
        nvml.nvmlDeviceGetCount = lambda: len(processes)
        nvml.nvmlDeviceGetHandleByIndex = lambda index: index
        nvml.nvmlDeviceGetComputeRunningProcesses = lambda gpu: [SimpleNamespace(pid=pid) for pid in processes[gpu]]

        def samples(gpu, kind, since):
            if kind == nvml.NVML_TOTAL_POWER_SAMPLES:
                raise NVMLError
            # One sample, tens by the GPU's number, and one after what is asked for.
            times = (since + 1, since + 2_000_000)
            return 0, [
                SimpleNamespace(timeStamp=time, sampleValue=SimpleNamespace(uiVal=10 * gpu + n))
                for n, time in enumerate(times)
            ]

        nvml.nvmlDeviceGetSamples = samples
        third_party = ModuleType("vllm.third_party")
        third_party.pynvml = nvml
        for module in (ModuleType("vllm"), third_party, nvml):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return nvml

    return use


@pytest.fixture
def url():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"http://localhost:{listening.getsockname()[1]}"


def test_the_gpus_of_a_server_are_those_with_its_processes(driver, url):
    driver([1], [os.getpid()], [1, os.getpid()], [])
    assert _gpu_samples.of_server(url, "gpu_busy", 100.0, 101.0) == [0.1, 0.2]


def test_a_gpu_is_busy_where_its_power_is_not_sampled(driver, url):
    driver([1], [os.getpid()])
    found = {name: _gpu_samples.of_server(url, name, 100.0, 101.0) for name in _gpu_samples.SAMPLED}
    assert found == {"gpu_busy": [0.1], "gpu_power_w": []}


def test_a_container_hides_processes_and_then_the_only_gpu_is_the_servers(driver, url):
    driver([])
    for server in (url, "http://[::1]:9"):
        assert _gpu_samples.of_server(server, "gpu_busy", 100.0, 101.0) == [0.0]
    # Of two, nobody knows which.
    driver([], [])
    assert _gpu_samples.of_server(url, "gpu_busy", 100.0, 101.0) == []


def test_a_server_elsewhere_or_a_driver_that_does_not_answer_has_none(driver, url):
    nvml = driver([os.getpid()])
    assert _gpu_samples.of_server("http://192.0.2.1:8000", "gpu_busy", 100.0, 101.0) == []

    def refuse():
        raise NVMLError

    nvml.nvmlInit = refuse
    assert _gpu_samples.of_server(url, "gpu_busy", 100.0, 101.0) == []
