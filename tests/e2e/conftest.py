"""Engines are slow to start, so a session runs each once and the tests look at what came of it."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from vllm_hwplugin_lab import bench
from vllm_hwplugin_lab.cli import demo as command


@pytest.fixture(scope="session")
def demo(cpu_host: bench.Host, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The demo as a user runs it, on 8 prompts and 48 tokens: its rows by name, and what doctor says after it."""
    file = tmp_path_factory.mktemp("demo") / "demo.json"
    command = [sys.executable, "-m", "vllm_hwplugin.cli", "demo", "-v", "--prompts", "8", "--tokens", "48"]
    environment = {**os.environ, "VLLM_HWPLUGIN_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "COLUMNS": "200"}
    done = subprocess.run([*command, "--json", str(file)], env=environment, capture_output=True, text=True)
    result = json.loads(file.read_text())
    # Its exit status is another matter: it also judges the host.
    doctor = subprocess.run(
        [sys.executable, "-m", "vllm_hwplugin.cli", "doctor", "--json"], env=environment, capture_output=True, text=True
    )
    return {
        "code": done.returncode,
        "screen": done.stdout,
        "doctor": json.loads(doctor.stdout),
        "rows": {row["name"]: row for row in result["configurations"]},
    }


@pytest.fixture(scope="session")
def engine(cpu_host: bench.Host, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bench.Outcome]:
    """Run one of the demo's configurations with other counts, each once a session."""
    cache = str(tmp_path_factory.mktemp("cache"))

    @functools.cache
    def run(name: str, prompts: int, tokens: int, settings: tuple[tuple[str, str], ...] = ()) -> bench.Outcome:
        (configuration,) = (c for c in command.CONFIGURATIONS if c.name == name)
        job = command.job_for(configuration, cpu_host, bench.find_checkpoints(None), prompts, tokens)
        # One round: its figures are compared, not its speed.
        job = dataclasses.replace(job, workloads=tuple(dataclasses.replace(w, rounds=1) for w in job.workloads))
        job.environment.update({"VLLM_HWPLUGIN_CACHE_DIR": cache, **dict(settings)})
        with pytest.MonkeyPatch.context() as patch:
            # The records are read in this process.
            patch.setenv("VLLM_HWPLUGIN_CACHE_DIR", cache)
            outcome = bench.launch(job, timeout=800)
        assert outcome.error is None, outcome.log_tail
        return outcome

    return run
