# SPDX-License-Identifier: Apache-2.0
"""The engine that the tests here start, and how several are started at the same time, each in a process of its own.

It is small enough that batches fill up, mix prefill and decode, and end unevenly.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from packaging.version import Version

from vllm_hwplugin_lab.bench import engine_environment
from vllm_hwplugin_lab.bench._entry_points import provide
from vllm_hwplugin_lab.bench._launch import child_environment

SMALL_ENGINE: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 13,
    "max_num_batched_tokens": 192,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    # A fixed amount: profiling the memory would be disturbed by another engine that runs at the same time.
    "kv_cache_memory_bytes": 1 << 30,
    # As little as holds the model, so that several engines find room beside each other.
    "gpu_memory_utilization": 0.1,
    "dtype": "bfloat16",
    "seed": 0,
}
#: The same with vLLM's default start: it measures memory, CUDA graphs included, and initialises its KV cache twice.
PROFILED_ENGINE = {name: value for name, value in SMALL_ENGINE.items() if name != "kv_cache_memory_bytes"}
# Room for what the others take meanwhile, which vLLM counts as its own.
PROFILED_ENGINE["gpu_memory_utilization"] = 0.2

# What vLLM says if another process gave memory back, or took some, while it measured.
DISTURBED = (
    "Error in memory profiling",
    "No available memory for the cache blocks",
    "Memory usage increased after sleeping",
)
ATTEMPTS = 3

T = TypeVar("T")


def vllm_version() -> Version:
    return Version(importlib.metadata.version("vllm"))


def needs(version: str) -> None:
    """Skip the test with an older vLLM than this."""
    if vllm_version() < Version(version):
        pytest.skip(f"the test is for vLLM {version} and newer, this is {vllm_version()}")


def undisturbed(run: Callable[[Path], T], folder: Path) -> T:
    """Return what `run` returns. Where another engine disturbs it, it runs again, in another folder.

    Args:
        run: starts an engine that writes into the folder given, and raises AssertionError with the end of its log.
        folder: the attempts have it with a number behind its name.
    """
    for attempt in range(ATTEMPTS):
        try:
            return run(folder.with_name(f"{folder.name} {attempt}"))
        except AssertionError as failure:
            if attempt == ATTEMPTS - 1 or not any(said in str(failure) for said in DISTURBED):
                raise
    raise AssertionError(folder.name)


@dataclass
class Child:
    """An engine to be started: `python SCRIPT JOB.json ANSWER.json`."""

    script: str
    job: Mapping[str, Any]
    patched: bool
    environment: Mapping[str, str] = field(default_factory=dict)

    def start(self, folder: Path, name: str, attempt: int) -> subprocess.Popen[bytes]:
        (folder / f"{name}.job.json").write_text(json.dumps(self.job))
        environment = child_environment(
            engine_environment("cuda", patched=self.patched, extra=self.environment),
            provide(folder / name / f"metadata-{attempt}"),
        )
        script = Path(__file__).with_name(self.script)
        command = [sys.executable, str(script), str(folder / f"{name}.job.json"), str(folder / f"{name}.json")]
        with (folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def run_all(folder: Path, children: Mapping[str, Child], *, timeout: float = 400) -> dict[str, dict[str, Any]]:
    """Run the engines at the same time; their answers by name. One that was disturbed by another starts again."""
    waiting = dict(children)
    for attempt in range(ATTEMPTS):
        running = {name: child.start(folder, name, attempt) for name, child in waiting.items()}
        codes = {name: process.wait(timeout=timeout) for name, process in running.items()}
        logs = {name: (folder / f"{name}.log").read_text(errors="replace") for name in running}
        waiting = {
            name: children[name]
            for name, code in codes.items()
            if code and any(said in logs[name] for said in DISTURBED)
        }
        last = attempt == ATTEMPTS - 1
        failed = {name: code for name, code in codes.items() if code and (last or name not in waiting)}
        assert not failed, "\n".join(
            f"{name} ended with {code}:\n{logs[name][-4000:]}" for name, code in failed.items()
        )
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in children}
