# SPDX-License-Identifier: Apache-2.0
"""More than 64 concurrent requests on the simulated device."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import loads
from .loads import Engine, Load, Process, Request

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

REQUESTS = 65
MANY = Engine("eagle3", graphs_of=(1, REQUESTS), more={"max_num_seqs": REQUESTS, "max_num_batched_tokens": 320})


def test_decode_batches_of_65_requests_run_in_graphs(musa_host: None, newest: tuple[str, Path], tmp_path: Path) -> None:
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    requests = [Request(f"r{index}", [3 + index, 5 + index, 7], 0, params) for index in range(REQUESTS)]
    load = Load({**MANY.on_musa(), "num_gpu_blocks_override": 96}, requests)
    served = Process({"many": load}, loads.musa(tmp_path / "host", newest)).run(tmp_path / "run")["many"]
    full = [
        step for step in served.steps if len(step["verified"]) == REQUESTS and set(step["verified"].values()) == {3}
    ]
    assert len(full) > 2
    for path in ("v2-step-inputs inputs", "v2-tail-graph sampling", "v2-tail-graph drafting"):
        assert served.counted[path]["served"] >= len(full), served.counted
