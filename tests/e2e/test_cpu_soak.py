"""The load of ``bench soak`` on the real vLLM on a CPU: no graphs there, but the requests and the counts."""

from __future__ import annotations

import pytest

from tests.cpu_seconds import patience
from vllm_hwplugin_lab import bench
from vllm_hwplugin_lab.bench import soak
from vllm_hwplugin_lab.bench._launch import Session
from vllm_hwplugin_lab.bench._soak_engine import requests
from vllm_hwplugin_lab.bench.turns import ENGINE

pytestmark = pytest.mark.engine


def test_requests_come_and_go_and_all_of_them_end(cpu_host):
    checkpoints = bench.find_checkpoints(None)
    pool = bench.load_prompts(checkpoints, 96)
    settings = soak.SoakSettings(
        sides=("patched",),
        cudagraph_mode="FULL",
        vllm_environment={},
        patched_environment={},
        method="dflash",
        k=7,
        steps=60,
        max_num_seqs=4,
        seed=1,
    )
    job = soak.load_job("patched", settings, cpu_host, checkpoints, pool)
    with Session(ENGINE, job) as session:
        session.ask(settings.load(), "soaked", patience(800))
        session.tell({"do": "end"})
        session.wait_for_end()
        ended = session.ended()
    assert ended.error is None, ended.log_tail
    (soaked,) = [event for event in ended.events if event["event"] == "soaked"]
    assert soaked["steps"] >= 60
    assert {"1", "4"} <= set(soaked["batch_sizes"])
    assert sum(soaked["batch_sizes"].values()) == soaked["steps"]
    assert soaked["mixed_steps"] > 0
    # Fewer where a request came so near to the model's limit that vLLM drafts nothing.
    assert 60 <= soaked["draft_phases"] < soaked["steps"]
    assert sum(soaked["accepted_per_position"]) > soaked["drafts"] > 0
    # Every request ended, with as many tokens as it asked for.
    texts = [soak.Text(tuple(prompt), tuple(tokens)) for _, prompt, tokens in soaked["texts"]]
    asked = [request for request, _ in zip(requests(pool, 1, soak.MAX_MODEL_LEN), texts, strict=False)]
    assert len(texts) == soaked["requests"] > 4
    assert [(t.prompt, len(t.tokens)) for t in texts] == [(r.prompt, r.max_tokens) for r in asked]
