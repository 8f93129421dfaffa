"""The process that measures, for real."""

from __future__ import annotations

import pytest
import torch

from vllm_hwplugin_lab.bench.micro import _attention_cases as attention
from vllm_hwplugin_lab.bench.micro import _op_cases as ops
from vllm_hwplugin_lab.bench.micro import _supervise as cells
from vllm_hwplugin_lab.bench.micro import supervise
from vllm_hwplugin_lab.bench.micro._timer import Timer


def run(kind, todo, seconds=60):
    return supervise({"kind": kind, "device": "cuda", "seed": 0}, todo, seconds=seconds, limit=120.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_without_a_gpu_no_cell_has_a_figure_and_the_log_says_why():
    todo = [cell for cell in ops.plan() if cell[1] == "topk_softmax 6 of 64 t8"]
    outcomes, (process,) = run("ops", todo)
    assert [o["status"] for o in outcomes] == [cells.NOT_RUN] * 2
    assert process["error"] == "exit code 1"
    assert "CUDA" in process["log_tail"] or "NVIDIA" in process["log_tail"]


@pytest.mark.gpu
def test_attention_is_timed_and_right_on_the_gpu():
    keys = ["decode b8 c1024 q4 h8/4 d512", "prefill b4 c2048 q2048 h8/4 d512", "decode b24 c1024 q8 h8/4 d512 s1"]
    todo = [(kernel, key) for key in keys for kernel in (attention.OURS, attention.SDPA)]
    outcomes, (process,) = run("attention", todo, 120)
    found = {(o["kernel"], o["case"]): o for o in outcomes}
    assert process["error"] is None, process["log_tail"]
    assert process["copy_bandwidth"] > 1e11
    assert found[attention.SDPA, keys[0]]["status"] == cells.REFUSED
    for cell in (*((attention.OURS, key) for key in keys), (attention.SDPA, keys[1])):
        assert found[cell]["status"] == cells.MEASURED, found[cell]
        assert found[cell]["error_ratio"] < 2
        assert 0 < found[cell]["fastest"] <= found[cell]["seconds"] < 1
    assert attention.CASES[keys[0]].kv_bytes / found[attention.OURS, keys[0]]["seconds"] < process["copy_bandwidth"]


@pytest.mark.gpu
def test_operations_are_timed_and_right_on_the_gpu():
    todo = [(ops.OURS, key) for key in ops.CASES if key.endswith(" t8192")]
    outcomes, (process,) = run("ops", todo, 400)
    assert process["error"] is None, process["log_tail"]
    assert {o["case"]: (o["status"], o["reason"], o.get("mismatch")) for o in outcomes} == {
        key: (cells.MEASURED, None, None) for _, key in todo
    }


@pytest.mark.gpu
def test_the_time_is_the_devices_also_after_a_call_that_asks_the_host_and_fails():
    timer = Timer(torch.device("cuda", 0))
    sources = [torch.randn(1 << 26, device="cuda") for _ in range(2)]
    target = torch.empty_like(sources[0])
    with pytest.raises(RuntimeError):
        timer.measure([lambda: sources[0].sum().item()])
    facts, _ = timer.measure([lambda one=one: torch.neg(one, out=target) for one in sources])
    assert torch.equal(target, -sources[1])
    # 512 MiB read and written: no device does that in 20 us, none takes 20 ms.
    assert 2e-5 < facts["seconds"] < 2e-2
