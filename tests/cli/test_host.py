# SPDX-License-Identifier: Apache-2.0
"""What the program finds out about its host: accelerators and compilers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from vllm_hwplugin.cli import _host


def _answering(**answers: str) -> _host.Run:
    def ask(argv: Sequence[str]) -> str | None:
        return answers.get(Path(argv[0]).name.replace("-", "_"))

    return ask


def test_nvidia_devices_are_listed(tmp_path: Path) -> None:
    answer = "NVIDIA H200, 143771 MiB, 570.86.15, 9.0\nNVIDIA H200, 143771 MiB, 570.86.15, 9.0\n"
    found = _host.find_platform(_answering(nvidia_smi=answer), tmp_path)
    assert (found.kind, found.evidence) == ("cuda", "nvidia-smi")
    assert found.devices == (_host.Device("NVIDIA H200", "143771 MiB", "570.86.15", "9.0"),) * 2


def test_a_container_without_the_tool_is_known_by_the_drivers_files(tmp_path: Path) -> None:
    card = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t\t NVIDIA L4\nIRQ: 16\n")
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX Kernel Module  570.86.15  Thu\n")
    found = _host.find_platform(_answering(nvidia_smi="No devices were found\n"), tmp_path)
    assert (found.kind, found.devices) == ("cuda", (_host.Device("NVIDIA L4", driver="570.86.15"),))


def test_a_moore_threads_host_is_known_by_its_device_files(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("mtgpu.0", "mtgpu.1"):
        (tmp_path / "dev" / name).touch()
    found = _host.find_platform(_answering(), tmp_path)
    assert found.kind == "musa"
    assert [device.name for device in found.devices] == ["Moore Threads GPU 0", "Moore Threads GPU 1"]


def _refusing() -> NoReturn:
    raise OSError("libmtml.so: cannot open shared object file")


def test_a_host_without_an_accelerator_is_a_cpu_host(tmp_path: Path) -> None:
    assert _host.find_platform(_answering(), tmp_path).kind == "cpu"
    found = _host.find_platform(_answering(), tmp_path, _refusing)
    # Who has the package has perhaps a GPU, too.
    assert found.kind == "cpu"
    assert "libmtml.so" in found.evidence
