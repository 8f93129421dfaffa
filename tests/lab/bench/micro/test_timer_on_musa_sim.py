# SPDX-License-Identifier: Apache-2.0
"""Graphs and events of ``torch.musa`` under the benchmark's timer, on a simulated Moore Threads GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.musa_sim import simulated

PROGRAM = """
import torch
from vllm_hwplugin_lab.bench.micro._timer import Timer

sources = [torch.full((64,), float(value), device="musa") for value in (1, 2)]
target = torch.empty_like(sources[0])
timer = Timer(torch.device("musa", 0))
facts, output = timer.measure([lambda one=one: torch.neg(one, out=target) for one in sources])
assert torch.equal(output.cpu(), torch.full((64,), -2.0)) and facts["seconds"] >= 0

def fails():
    if torch.musa.is_current_stream_capturing():
        raise RuntimeError("it asks the host")

try:
    timer.measure([fails])
except RuntimeError as error:
    assert "it asks the host" in str(error)
else:
    raise AssertionError
assert timer.measure([lambda: torch.neg(sources[0], out=target)])[0]["seconds"] >= 0
"""


@pytest.mark.musa_sim
def test_it_times_by_torch_musas_own_graphs_and_events(tmp_path: Path) -> None:
    if reason := simulated.obstacle():
        pytest.skip(reason)
    environ = simulated.environment(tmp_path)
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
