from __future__ import annotations

import sys

import pytest

from vllm_hwplugin.base import run_records
from vllm_hwplugin_lab.bench import Host, _launch
from vllm_hwplugin_lab.bench.plan import Settings


@pytest.fixture
def gpu_host():
    return Host("cuda", "NVIDIA H200", "580.1", "0.26.0", "2.11.0", "3.12.3", 16)


@pytest.fixture
def cpu_host():
    return Host("cpu", "Some CPU", None, "0.32.0", "2.13.0", "3.11.7", 2)


@pytest.fixture
def instead_of_engines(monkeypatch, tmp_path):
    """`instead_of_engines(script)`: children run it whatever their module is, and have left no run records."""

    def use(script):
        path, wrapper = tmp_path / "child.py", tmp_path / "python"
        path.write_text(script)
        wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{path}" "$@"\n')
        wrapper.chmod(0o755)
        monkeypatch.setattr(_launch.sys, "executable", str(wrapper))

    monkeypatch.setattr(run_records, "read_all", list)
    return use


@pytest.fixture
def settings():
    return Settings(
        batches=(1, 8),
        rounds=2,
        cudagraph_mode="FULL",
        tokens=64,
        tiny_prompts=4,
        tiny_tokens=32,
        acceptance_length=None,
        profile_tokens=16,
        vllm_environment={"BOTH": "1"},
        patched_environment={"ONE": "2"},
    )
