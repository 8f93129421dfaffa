"""vLLM's `propose` with the hunks, under graphs that replay as CUDA graphs do, against stock `propose`."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.forward_context import BatchDescriptor  # noqa: E402

from vllm_hwplugin.spec_decode import capture_sizes  # noqa: E402
from vllm_hwplugin.spec_decode.decode_batch import uniform_shape  # noqa: E402
from vllm_hwplugin.spec_decode.v1.draft_decision import plan_before_capture  # noqa: E402
from vllm_hwplugin.spec_decode.v1.draft_full_graph import capture_draft_graphs  # noqa: E402
from vllm_hwplugin.spec_decode.v1.pass_graphs import PassGraphs, descriptor_of  # noqa: E402

from .. import drafters  # noqa: E402
from ..drafters import (  # noqa: E402
    MAX_REQS,
    Runner,
    boot,
    compare,
    propose,
)
from ..recorded_graph import RecordedGraphs  # noqa: E402

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
BOTH, DECODE_ONLY = CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY


# -- decisions --------------------------------------------------------------------------------------------------------


def test_a_drafter_with_an_obstacle_is_left_as_in_stock_vllm(make, notes):
    for change in (
        lambda p: setattr(p.speculative_config, "enforce_eager", True),
        lambda p: setattr(p.vllm_config.compilation_config, "cudagraph_capture_sizes", []),
    ):
        proposer = make("passes", 2)
        change(proposer)
        proposer.draft_graphs.initialize_keys(BOTH)
        assert notes["draft-full-graph"].startswith("the drafter runs as in unpatched vLLM: ")
        capture_draft_graphs(proposer, Runner(0).template())
        assert not proposer.draft_graphs.ready
        assert RecordedGraphs.instances == []


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


# -- capture ----------------------------------------------------------------------------------------------------------


def test_every_shape_is_captured_once_after_a_run_without_a_graph(make):
    proposer = make("passes", 2)
    runner = Runner(0)
    boot(proposer, FULL, runner)
    (graphs,) = RecordedGraphs.instances
    rungs = [uniform_shape(length, rung) for rung in (8, 4, 2, 1) for length in (3, 1)]
    mixed = [BatchDescriptor(size, min(size, MAX_REQS)) for size in (24, 12, 6, 3)]
    assert set(graphs.captured) == {descriptor_of(shape) for shape in rungs} | set(mixed)
    tokens = [key.num_tokens for key in graphs.captured]
    assert tokens == sorted(tokens, reverse=True)
    assert graphs.without_graph == len(graphs.captured) == proposer.draft_graphs.num_captured == 12
    before = list(graphs.captured)
    RecordedGraphs.sealed = True
    capture_draft_graphs(proposer, runner.template())
    assert graphs.captured == before


def test_multimodal_inputs_are_captured_as_embeddings(make):
    proposer = make("passes", 1)
    proposer.supports_mm_inputs = True
    proposer.inputs_embeds = torch.zeros(64, 4)
    calls = []
    proposer.model = lambda **inputs: calls.append(inputs) or inputs["positions"] + 1
    boot(proposer, DECODE_ONLY, Runner(0))
    assert calls
    assert all(call["input_ids"] is None for call in calls)
    assert {call["inputs_embeds"].data_ptr() for call in calls} == {proposer.inputs_embeds.data_ptr()}


# -- the draft phase --------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(make):
    """A stock proposer without graphs and one that booted with them."""

    def made(which, k, mode, seed=1, **options):
        runner = Runner(seed)
        stock, graphed = make("stock", k, **options), make(which, k, **options)
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


@pytest.mark.parametrize(
    ("kind", "size", "first", "step"),
    [("decode", 3, (4, 12), (4, 4)), ("mixed", 3, None, (4, 4)), ("decode", MAX_REQS, None, None)],
)
def test_builders_are_given_the_batch_that_the_graph_runs(pair, kind, size, first, step):
    """A builder that plans into buffers of its own plans for what is launched: the padded batch, or the real one."""
    _, graphed, runner = pair("passes", 2, BOTH)
    given = []
    (group,) = graphed.draft_attn_groups
    builder = group.get_metadata_builder()
    build = builder.build_for_drafting

    def listening(common_attn_metadata, draft_index):
        given.append((common_attn_metadata.num_reqs, common_attn_metadata.num_actual_tokens))
        return build(common_attn_metadata, draft_index)

    builder.build_for_drafting = listening
    batch = runner.batch(2, kind, size=size)
    propose(graphed, batch)
    tokens = batch["common_attn_metadata"].num_actual_tokens
    assert given == [first or (size, tokens), step or (size, size)]


def test_the_drafters_own_dummy_run_never_gets_a_full_graph(pair):
    stock, graphed, runner = pair("passes", 2, FULL)
    compare(stock, graphed, runner.batch(2))
    for count in range(1, 40):
        for use_cudagraphs in (True, False):
            mode, *_ = graphed._determine_batch_execution_and_padding(count, use_cudagraphs=use_cudagraphs)
            assert mode in ({NONE, PIECEWISE} if use_cudagraphs else {NONE})
