"""vLLM's `propose` with the hunks, under graphs that replay as CUDA graphs do, against stock `propose`."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode  # noqa: E402

from vllm_hwplugin.spec_decode import capture_sizes  # noqa: E402
from vllm_hwplugin.spec_decode.decode_batch import uniform_shape  # noqa: E402
from vllm_hwplugin.spec_decode.v1.draft_decision import plan_before_capture  # noqa: E402
from vllm_hwplugin.spec_decode.v1.pass_graphs import PassGraphs, descriptor_of  # noqa: E402

from .. import drafters  # noqa: E402
from ..drafters import MAX_REQS, Runner, boot, compare, propose  # noqa: E402
from ..recorded_graph import RecordedGraphs  # noqa: E402

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
BOTH, DECODE_ONLY = CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY


# -- decisions --------------------------------------------------------------------------------------------------------


def test_larger_decode_batches_of_the_target_bring_no_passes(make):
    """Each shape of them would have memory of its own, for batches whose GPU has work enough."""
    proposer = make("passes", 2)
    compilation = proposer.vllm_config.compilation_config
    own = sorted(compilation.cudagraph_capture_sizes)
    compilation.cudagraph_capture_sizes = [*own, 2 * own[-1]]
    vars(compilation)[capture_sizes._OWN] = own[-1]
    proposer.vllm_config.scheduler_config.max_num_seqs *= 2
    keys = plan_before_capture(proposer, DECODE_ONLY)
    assert not isinstance(keys, str)
    assert max(shape.num_tokens for shape in keys.all()) <= own[-1]


def test_the_memory_profile_captures_the_largest_passes_alone(make, monkeypatch):
    capture, shapes = PassGraphs.capture, []

    def watched(self, shape, template):
        shapes.append(shape)
        capture(self, shape, template)

    monkeypatch.setattr(PassGraphs, "capture", watched)
    proposer = make("loop", 3)
    boot(proposer, FULL, Runner(1), profile=True)
    profiled, started = shapes[: (again := shapes.index(shapes[0], 1))], shapes[again:]
    assert started == list(proposer.draft_graphs._keys.all())
    assert len(profiled) < len(started)
    assert {shape.query_len for shape in profiled} == {shape.query_len for shape in started}


# -- the draft phase --------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(make):
    """A stock proposer without graphs and one that booted with them."""

    def made(which, k, mode):
        runner = Runner(1)
        stock, graphed = make("stock", k), make(which, k)
        boot(stock, NONE, runner)
        boot(graphed, mode, runner)
        RecordedGraphs.sealed = True
        return stock, graphed, runner

    return made


@pytest.mark.parametrize(
    ("which", "k", "mode"),
    [
        ("passes", 1, FULL),
        ("passes", 5, DECODE_ONLY),
        ("loop", 3, BOTH),
    ],
)
def test_drafts_are_those_of_stock(pair, which, k, mode):
    stock, graphed, runner = pair(which, k, mode)
    drafters.compare_over_many(runner, k, functools.partial(compare, stock, graphed))
    replayed = {
        (key.num_tokens // key.num_reqs if key.uniform else None) for key in RecordedGraphs.instances[0].replayed
    }
    assert 1 + k in replayed
    assert (None in replayed) == (mode == FULL)
    if which == "passes" and k > 1:
        assert 1 in replayed


def test_requests_with_fewer_drafts_are_no_smaller_batch_of_whole_ones(pair):
    """As many tokens as two requests with all their drafts."""
    stock, graphed, runner = pair("passes", 3, DECODE_ONLY)
    compare(stock, graphed, runner.batch(3, lengths=[4, 2, 2]))


def test_a_moved_block_table_turns_the_graphs_off(pair, notes):
    stock, graphed, runner = pair("loop", 2, DECODE_ONLY)
    compare(stock, graphed, runner.batch(2))
    graphs, loop = RecordedGraphs.instances
    assert loop.replayed
    for one in (graphs, loop):
        one.replayed.clear()
    runner.table = runner.table.clone()
    for _ in range(6):
        compare(stock, graphed, runner.batch(2))
    assert "block table moved" in notes["draft-full-graph"]
    assert not graphed.draft_graphs.ready
    assert not graphs.replayed
    assert not loop.replayed


def test_a_batch_with_a_field_without_a_fixed_address_is_left_alone(pair, notes):
    stock, graphed, runner = pair("loop", 2, DECODE_ONLY)
    compare(stock, graphed, runner.batch(2))
    graphs, loop = RecordedGraphs.instances
    before = list(graphs.replayed), list(loop.replayed)
    for _ in range(6):
        batch = runner.batch(2)
        batch["common_attn_metadata"].encoder_seq_lens = torch.ones(1)
        compare(stock, graphed, batch)
    assert (graphs.replayed, loop.replayed) == before
    said = notes["draft-full-graph"]
    assert said.startswith("FULL drafter graphs for EagleProposer")
    assert said.count("'encoder_seq_lens'") == 1
    compare(stock, graphed, runner.batch(2))
    assert (len(graphs.replayed), len(loop.replayed)) == (len(before[0]) + 1, len(before[1]) + 1)


def test_the_drafters_own_dummy_run_never_gets_a_full_graph(pair):
    stock, graphed, runner = pair("passes", 2, FULL)
    compare(stock, graphed, runner.batch(2))
    for count in range(1, 40):
        for use_cudagraphs in (True, False):
            mode, *_ = graphed._determine_batch_execution_and_padding(count, use_cudagraphs=use_cudagraphs)
            assert mode in ({NONE, PIECEWISE} if use_cudagraphs else {NONE})


# -- the chain of one-token steps as one graph ------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "size", "rung"), [(2, 1, 1), (3, 3, 4), (5, 8, 8)])
def test_a_decode_batch_is_two_launches(pair, k, size, rung):
    stock, graphed, runner = pair("loop", k, DECODE_ONLY)
    passes, loop = RecordedGraphs.instances
    batch = runner.batch(k, size=size)
    assert propose(graphed, batch).tolist() == propose(stock, batch).tolist()
    assert passes.replayed == [descriptor_of(uniform_shape(1 + k, rung))]
    assert loop.replayed == [descriptor_of(uniform_shape(1, rung))]


def test_rows_come_and_go(pair):
    """Rows are inert or real as the batch says, whatever the batch before was."""
    stock, graphed, runner = pair("loop", 3, DECODE_ONLY)
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
    _, graphed, runner = pair("loop", 3, DECODE_ONLY)
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
    boot(without, NONE, runner)
    propose(without, runner.batch(3, size=2))
    for part in (without.draft_graphs, without.draft_loop):
        assert part._step_counts.outcomes() == {"not_captured": 1}
