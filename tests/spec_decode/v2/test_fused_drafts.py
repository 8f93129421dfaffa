"""All draft steps in one graph: the released speculators, patched and stock, on the same batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_hwplugin.base import run_records
from vllm_hwplugin.frozen import fused_drafts
from vllm_hwplugin.spec_decode import graph_recording

from .released_modules import Graph
from .speculators import BLOCK, MAX_LEN, DevicePlan, HostPlan, Runner, Views

pytestmark = pytest.mark.usefixtures("known_plans")

GATE = "VLLM_HWPLUGIN_V2_FUSED_DRAFTS"
STOCK = {GATE: "off"}
# Rows of the runner's state, lengths, rejected: batches that fill a graph's shape and that do not, rows that end and
# come back, one at the longest sequence and one whose drafts begin a new block.
BATCHES = [
    ([2], [20], [0]),
    ([2, 0, 5], [21, 30, 41], [0, 1, 3]),
    ([7, 6, 5, 4, 3, 2, 1, 0], [19, 40, 44, MAX_LEN - 2, 12, 25, 33, 33], [0, 1, 2, 3, 0, 1, 2, 3]),
    ([5, 3, 1], [47, MAX_LEN, 36], [1, 0, 0]),
    ([3], [15], [0]),
]


@pytest.fixture
def boot(modules, monkeypatch: pytest.MonkeyPatch):
    """`boot(version, builder, k, GATE="off")`: a speculator whose graphs are captured."""

    def booted(version: str, builder: Any, k: int, **choices: str) -> Runner:
        released = modules(version, **choices)
        monkeypatch.setattr(
            fused_drafts, "build_slot_mappings_by_layer", released("attn_utils").build_slot_mappings_by_layer
        )
        runner = Runner(released, version, builder, k)
        runner.capture()
        runner.admit()
        Graph.replayed.clear()
        return runner

    return booted


def compare(stock: Runner, fused: Runner, batch: Any, launches: tuple[int, int]) -> None:
    Graph.replayed.clear()
    expected = stock.propose(*batch)
    assert len(Graph.replayed) == launches[0]
    Graph.replayed.clear()
    assert torch.equal(fused.propose(*batch), expected)
    assert len(Graph.replayed) == launches[1]
    reqs = len(batch[0])
    one, other = stock.state(), fused.state()
    assert one.keys() == other.keys()
    for name, value in one.items():
        # What rows without a request hold, and block 0, which is no request's, is left over from the captures.
        rows = slice(reqs) if name in ("input_ids", "positions") else slice(BLOCK if name == "kv" else 0, None)
        assert torch.equal(value[rows] if value.dim() else value, other[name][rows] if value.dim() else other[name])


@pytest.mark.parametrize("version", ["0.21.0", "0.24.0", "0.27.1"])
def test_drafts_and_all_else_are_stocks(boot, notes, version: str) -> None:
    k = 4
    stock, fused = boot(version, Views(), k, **STOCK), boot(version, DevicePlan(), k)
    for batch in BATCHES:
        compare(stock, fused, batch, (k - 1, 1))
    assert notes["v2-fused-drafts"] == "3 steps in one graph"


@pytest.mark.parametrize("stale", [-1, 4])
def test_padded_rows_write_nothing(boot, notes, stale: int) -> None:
    """Whatever request an earlier batch, or vLLM, has left in the rows that fill up the shape."""
    runner = boot("0.27.1", DevicePlan(), 4)
    states, lengths, rejected = BATCHES[1]
    runner.propose(*BATCHES[2])
    runner.speculator.idx_mapping[len(states) :] = stale
    before = runner.model.kv.clone()
    runner.propose(states, lengths, rejected)
    tables = runner.block_tables.block_tables[0].gpu
    theirs = {slot for state in states for block in tables[state].tolist() for slot in range(block * 4, block * 4 + 4)}
    changed = (runner.model.kv[:-1] != before[:-1]).any(1).nonzero().flatten().tolist()
    assert changed
    assert set(changed) <= theirs
    assert (runner.block_tables.slot_mappings[0, len(states) :] == -1).all()
    assert (runner.speculator.input_buffers.seq_lens >= 0).all()


def test_what_the_host_plans_keeps_its_graph_for_each_step(boot, notes) -> None:
    stock, patched = boot("0.26.0", Views(), 4, **STOCK), boot("0.26.0", HostPlan(), 4)
    for batch in BATCHES[:2]:
        compare(stock, patched, batch, (3, 3))
    assert "HostPlan: each build plans on the host" in notes["v2-fused-drafts"]


def test_steps_that_cannot_be_captured_are_launched_one_by_one(boot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        if Graph.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    used: list[bool] = []
    monkeypatch.setattr(run_records, "use", lambda feature, serves, reason="": used.append(serves))
    monkeypatch.setattr(graph_recording, "leave_capture", lambda pool, *, broken: None)
    monkeypatch.setattr(graph_recording, "reserved_memory", lambda: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    stock = boot("0.27.1", DevicePlan(), 3, **STOCK)
    with monkeypatch.context() as patch:
        patch.setattr(fused_drafts.FusedDrafts, "_build_metadata", fails)
        runner = boot("0.27.1", DevicePlan(), 3)
    assert used == [True, False]
    for batch in BATCHES:
        compare(stock, runner, batch, (2, 2))
