# SPDX-License-Identifier: Apache-2.0
"""All features as they are by default on a CPU, with rejected drafts taken out of the KV cache: no text changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_hwplugin_lab import bench

from ..musa_sim import loads
from ..musa_sim.loads import Engine, Load, Process

pytestmark = [pytest.mark.engine, pytest.mark.smoke]

MORE = {"dtype": "float32", "max_num_batched_tokens": 192}
ENGINES = {
    "none": Engine(None, more=MORE),
    "eagle3": Engine("eagle3", more=MORE),
    "dflash": Engine("dflash", drafts=7, more=MORE),
}
#: vLLM's top-k takes no batch of random and greedy requests with drafts on a CPU.
REQUESTS = [request for request in loads.mixed() if request.greedy and request.abort_at is None]


def test_greedy_texts_are_those_without_speculation(cpu_host: bench.Host, tmp_path: Path) -> None:
    environment = loads.cpu(VLLM_HWPLUGIN="1", VLLM_HWPLUGIN_NWOR_MODE="restore", VLLM_HWPLUGIN_NWOR_DEBUG_SYNC="1")
    asked = {name: Load(engine.on_cpu(), REQUESTS) for name, engine in ENGINES.items()}
    runs = Process(asked, environment).run(tmp_path / "engines")
    texts = runs["none"].texts(runs["none"].answers)
    for name, used in {"eagle3": {"nwor"}, "dflash": {"nwor", "dflash-context-norm"}}.items():
        run = runs[name]
        assert run.texts(run.answers) == texts
        assert run.accepted()[1] > 0
        assert used <= set(run.used)
        assert len(run.steps) < len(runs["none"].steps)
