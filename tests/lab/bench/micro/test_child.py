"""The process that measures, for real."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from vllm_hwplugin_lab.bench.micro import _attention_cases as attention
from vllm_hwplugin_lab.bench.micro import _cells, _child
from vllm_hwplugin_lab.bench.micro import _op_cases as ops
from vllm_hwplugin_lab.bench.micro._copies import Copies
from vllm_hwplugin_lab.bench.micro._supervise import supervise
from vllm_hwplugin_lab.bench.micro._timer import Effort, GraphTimer, NotCapturable, measure

EFFORT = Effort(cell=5e-3, most_sets=8)


def job(kind):
    return {"kind": kind, "device": "cuda", "seed": 0, "limit": 120.0, "effort": dataclasses.asdict(EFFORT)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_without_a_gpu_no_cell_has_a_figure_and_the_log_says_why():
    todo = [cell for cell in ops.plan() if cell[1] == "topk_softmax 6 of 64 t8"]
    outcomes, (process,) = supervise(job("ops"), todo, seconds=60)
    assert [o["status"] for o in outcomes] == [_cells.NOT_RUN] * 2
    assert process["error"] == "exit code 1"
    assert "CUDA" in process["log_tail"] or "NVIDIA" in process["log_tail"]


def test_the_cache_has_room_for_a_batch_whose_last_pages_are_not_full(monkeypatch):
    case = attention.AttentionCase("decode", 4, 95, 4, 2, head_size=32, spread=1.0)
    monkeypatch.setattr(attention, "CASES", {case.key: case})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    cell = (attention.TRITON, case.key)
    copies = Copies(None, torch.device("cpu"), 1, EFFORT, large=8)
    bench = _child._bench(job("attention"), [cell], copies)
    assert bench.refuses(cell) is None


@pytest.mark.gpu
def test_attention_is_timed_and_right_on_the_gpu():
    keys = ["decode b8 c1024 q4 h8/4 d512", "prefill b4 c2048 q2048 h8/4 d512", "decode b24 c1024 q8 h8/4 d512 s1"]
    todo = [(kernel, key) for key in keys for kernel in (attention.OURS, attention.SDPA)]
    outcomes, (process,) = supervise(job("attention"), todo, seconds=120)
    found = {(o["kernel"], o["case"]): o for o in outcomes}
    assert process["error"] is None, process["log_tail"]
    assert process["copy_bandwidth"] > 1e11
    assert found[attention.SDPA, keys[0]]["status"] == _cells.REFUSED
    for cell in (*((attention.OURS, key) for key in keys), (attention.SDPA, keys[1])):
        assert found[cell]["status"] == _cells.MEASURED, found[cell]
        assert found[cell]["error_ratio"] < 2
        assert found[cell]["eager"] is None
        assert 0 < found[cell]["fastest"] <= found[cell]["seconds"] < 1
    assert attention.CASES[keys[0]].kv_bytes / found[attention.OURS, keys[0]]["seconds"] < process["copy_bandwidth"]


@pytest.mark.gpu
def test_operations_are_timed_and_right_on_the_gpu():
    todo = [(ops.OURS, key) for key in ops.CASES if key.endswith(" t8192")]
    outcomes, (process,) = supervise(job("ops"), todo, seconds=400)
    assert process["error"] is None, process["log_tail"]
    assert {o["case"]: (o["status"], o["reason"], o.get("mismatch")) for o in outcomes} == {
        key: (_cells.MEASURED, None, None) for _, key in todo
    }


@pytest.mark.gpu
def test_the_time_is_the_devices():
    sources = [torch.randn(1 << 26, device="cuda") for _ in range(2)]
    target = torch.empty_like(sources[0])
    done = measure(GraphTimer("cuda"), [lambda one=one: torch.neg(one, out=target) for one in sources], Effort())
    assert done.eager is None
    assert torch.equal(target, -sources[1])
    # 512 MiB read and written: no device does that in 20 us, none takes 20 ms.
    assert 2e-5 < done.timing.seconds < 2e-2


@pytest.mark.gpu
def test_what_asks_the_host_cannot_be_captured_and_the_device_goes_on():
    one = torch.ones(4, device="cuda")
    with pytest.raises(NotCapturable):
        GraphTimer("cuda").capture([lambda: one.sum().item()])
    done = measure(GraphTimer("cuda"), [lambda: one.sum().item()], Effort(cell=1e-3))
    assert done.eager is not None
    assert done.output == 4.0
