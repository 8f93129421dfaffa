"""The chain of one-token steps as one graph: when it is replayed, and that it drafts what unpatched vLLM drafts."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode  # noqa: E402

from vllm_hwplugin.spec_decode.decode_batch import uniform_shape  # noqa: E402
from vllm_hwplugin.spec_decode.v1.pass_graphs import descriptor_of  # noqa: E402

from ..drafters import MAX_REQS, Runner, boot, propose  # noqa: E402
from ..recorded_graph import RecordedGraphs  # noqa: E402

DECODE_ONLY = CUDAGraphMode.FULL_DECODE_ONLY


@pytest.fixture
def pair(make):
    def made(k):
        runner = Runner(1)
        stock, graphed = make("stock", k), make("loop", k)
        boot(stock, CUDAGraphMode.NONE, runner)
        boot(graphed, DECODE_ONLY, runner)
        RecordedGraphs.sealed = True
        return stock, graphed, runner

    return made


@pytest.mark.parametrize(("k", "size", "rung"), [(2, 1, 1), (3, 3, 4), (5, 8, 8)])
def test_a_decode_batch_is_two_launches(pair, k, size, rung):
    stock, graphed, runner = pair(k)
    passes, loop = RecordedGraphs.instances
    batch = runner.batch(k, size=size)
    assert propose(graphed, batch).tolist() == propose(stock, batch).tolist()
    assert passes.replayed == [descriptor_of(uniform_shape(1 + k, rung))]
    assert loop.replayed == [descriptor_of(uniform_shape(1, rung))]


def test_rows_come_and_go(pair):
    """Rows are inert or real as the batch says, whatever the batch before was."""
    stock, graphed, runner = pair(3)
    for size in (8, 1, 2, 1, 8, 3, 4, 3, 7, 1):
        batch = runner.batch(3, size=size)
        assert propose(graphed, batch).tolist() == propose(stock, batch).tolist()
        inert = graphed.draft_loop.captured._inert
        rung = RecordedGraphs.instances[1].replayed[-1].num_reqs
        assert inert[:rung].tolist() == [False] * size + [True] * (rung - size)
        # No inert row has gained a sequence, nor a slot to write to.
        assert graphed.draft_loop.captured.buffers.seq_lens[size:rung].tolist() == [0] * (rung - size)
        assert graphed._slot_mapping_buffer[size:rung].tolist() == [-1] * (rung - size)


def test_each_draft_phase_is_counted_and_what_was_in_its_way(pair, make):
    _, graphed, runner = pair(3)
    moved = runner.batch(3, size=2)
    moved["common_attn_metadata"].encoder_seq_lens = torch.ones(1)
    batches = [runner.batch(3, size=2), runner.batch(3, size=5), runner.batch(3, size=MAX_REQS), moved]
    batches += [runner.batch(3, lengths=[1, 4, 3]), runner.batch(3, "prefill", size=2)]
    for batch in batches:
        propose(graphed, batch)
    counts = graphed.draft_graphs._step_counts
    assert counts.outcomes() == {"served": 2, "larger_batch": 1, "moved": 1, "fewer_drafts": 1, "prompt": 1}
    # Its steps are of one token a request, whatever the first pass was.
    assert graphed.draft_loop._step_counts.outcomes() == {"served": 4, "larger_batch": 1, "moved": 1}
    without = make("loop", 3)
    boot(without, CUDAGraphMode.NONE, runner)
    propose(without, runner.batch(3, size=2))
    for part in (without.draft_graphs, without.draft_loop):
        assert part._step_counts.outcomes() == {"not_captured": 1}
