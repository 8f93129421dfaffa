"""vLLM's `DFlashProposer` with the hunks, under graphs that replay as CUDA graphs do, against the stock one."""

from __future__ import annotations

import ast
import functools
import importlib
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.forward_context import BatchDescriptor  # noqa: E402

from vllm_hwplugin import patching  # noqa: E402
from vllm_hwplugin.base import run_records  # noqa: E402
from vllm_hwplugin.spec_decode import dflash_config  # noqa: E402
from vllm_hwplugin.spec_decode.v1.dflash_full_graph import ContextGraphs, lengthen_query_buffers  # noqa: E402
from vllm_hwplugin.spec_decode.v1.draft_decision import FirstPass, first_pass_of  # noqa: E402
from vllm_hwplugin.spec_decode.v1.draft_full_graph import DraftGraphs, capture_draft_graphs  # noqa: E402

from ...conftest import versions  # noqa: E402
from ...released import take, text_of  # noqa: E402
from ..dflash_drafter import DFlashModel, let_models_fuse  # noqa: E402
from ..drafters import MAX_REQS, MAX_TOKENS, Runner, boot, compare, compare_over_many  # noqa: E402
from ..host_runner import FLASHINFER, Pool, builder  # noqa: E402
from ..recorded_graph import RecordedGraphs  # noqa: E402

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE
BOTH, DECODE_ONLY = CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY
MODES = pytest.mark.parametrize("mode", [FULL, BOTH, DECODE_ONLY], ids=lambda mode: mode.name)


@pytest.fixture
def pair(make_dflash):
    """A stock proposer without graphs and one that booted with them."""

    def made(k, mode=FULL, **options):
        runner = Runner(1)
        stock, graphed = make_dflash("stock", k, **options), make_dflash("graphs", k, **options)
        boot(stock, NONE, runner)
        boot(graphed, mode, runner)
        RecordedGraphs.sealed = True
        return stock, graphed, runner

    return made


def compare_all(stock, graphed, batches):
    for batch in batches:
        compare(stock, graphed, batch)


def graphs_of(proposer):
    return proposer.draft_graphs.captured._graphs, proposer.draft_context.captured


@MODES
@pytest.mark.parametrize("k", [1, 3, 7])
def test_drafts_are_those_of_stock(pair, k, mode):
    stock, graphed, runner = pair(k, mode)
    queries, context = graphs_of(graphed)
    compare_over_many(runner, k, functools.partial(compare, stock, graphed))
    assert {key.num_tokens // key.num_reqs for key in queries.replayed} == {1 + k}
    assert len(queries.replayed) > 25
    assert len(context.replayed) > 25


def test_no_mixed_graphs_and_no_steps(make_dflash, notes):
    proposer = make_dflash("graphs", 3)
    boot(proposer, FULL, Runner(0))
    queries, _ = graphs_of(proposer)
    assert [(key.num_tokens, key.num_reqs, key.uniform) for key in queries.captured] == [
        (4 * rung, rung, True) for rung in (8, 4, 2, 1)
    ]
    assert "4 tokens x [1, 2, 4, 8] requests" in notes["draft-full-graph"]
    assert "[4, 8, 16, 32] tokens" in notes["dflash-full-graph"]
    assert "there is no chain" in notes["draft-loop-graph"]


def test_the_context_shares_the_drafters_pool_and_is_captured_once(make_dflash):
    proposer = make_dflash("graphs", 2)
    boot(proposer, FULL, Runner(0))
    queries, context = graphs_of(proposer)
    assert context.graph_pool is queries.graph_pool
    assert context.captured == [BatchDescriptor(num_tokens=size) for size in (24, 12, 6, 3)]
    assert context.without_graph == 4
    RecordedGraphs.sealed = True
    capture_draft_graphs(proposer, Runner(0).template())
    assert len(context.captured) == 4


@pytest.mark.parametrize("profile", [False, True], ids=["one start", "profiled"])
def test_drafts_are_stocks_after_sleep(make_dflash, profile):
    stock, graphed, runner, pool = make_dflash("stock", 3), make_dflash("graphs", 3), Runner(1), Pool()
    boot(stock, NONE, runner)
    boot(graphed, FULL, runner, profile=profile, kv_pool=pool)
    RecordedGraphs.sealed = True
    for index in range(6):
        if index % 2:
            pool.sleep()
        compare(stock, graphed, runner.batch(3, size=3))
    assert all(len(graphs.replayed) == 6 for graphs in graphs_of(graphed))


@pytest.fixture
def fused(pair, monkeypatch):
    let_models_fuse(monkeypatch)
    return pair(3)


def fuse(pair, *weights):
    for proposer in pair[:2]:
        proposer.model.model.fuse(*weights)


def test_weights_that_were_fused_anew_are_what_the_context_graphs_read(fused):
    """vLLM fuses anew when weights are loaded again, or after a wake-up, into tensors at other addresses."""
    stock, graphed, runner = fused
    _, context = graphs_of(graphed)
    for weight in (23, 41, 57):
        fuse(fused, weight)
        compare_all(stock, graphed, [runner.batch(3, size=2) for _ in range(2)])
    assert len(context.replayed) == 6


def test_fused_weights_of_another_shape_leave_the_context_stock(fused, notes):
    stock, graphed, runner = fused
    queries, context = graphs_of(graphed)
    fuse(fused, 3, 5, 7, 11)
    compare_all(stock, graphed, [runner.batch(3, size=2) for _ in range(2)])
    assert context.replayed == []
    assert len(queries.replayed) == 2
    assert "_fused_kv_weight has another shape" in notes["dflash-full-graph"]


@pytest.mark.parametrize(("causal", "left"), [(False, True), (True, False)])
def test_a_builder_that_plans_on_the_host_is_left_alone_for_blocks(make_dflash, notes, monkeypatch, causal, left):
    proposer = make_dflash("graphs", 3)
    proposer.dflash_causal = causal
    # The stand-in's own call is for non-causal blocks.
    monkeypatch.setattr(DFlashModel, "__call__", lambda _, **inputs: inputs["positions"] + 1)
    proposer.host.use(builder(FLASHINFER))
    boot(proposer, DECODE_ONLY, Runner(0))
    assert proposer.draft_graphs.ready != left
    assert ("non-causal attention (FlashInferMetadataBuilder" in notes["dflash-full-graph"]) == left


@pytest.mark.parametrize("profile", [False, True], ids=["one start", "profiled"])
def test_a_context_that_cannot_be_recorded_is_stored_as_in_stock(make_dflash, fail, uses, profile):
    runner = Runner(1)
    stock, graphed = make_dflash("stock", 3), make_dflash("graphs", 3)
    boot(stock, NONE, runner)
    tried = fail(DFlashModel, "precompute_and_store_context_kv")
    boot(graphed, FULL, runner, profile=profile)
    RecordedGraphs.sealed = True
    assert len(tried) in (3, 4)
    used, reason = uses["dflash-full-graph"]
    assert (used, "OutOfMemoryError" in reason) == (False, True)
    compare_over_many(runner, 3, functools.partial(compare, stock, graphed))
    # The passes alone.
    assert sum(bool(graphs.replayed) for graphs in RecordedGraphs.instances) == 1


# -- the shape of the pass, and the buffers ---------------------------------------------------------------------------


def test_the_first_pass_of_a_dflash_drafter(make_dflash):
    proposer = make_dflash("graphs", 3)
    assert first_pass_of(proposer) == FirstPass(query_len=4, max_tokens=4 * MAX_REQS, masks=True, causal=False)
    proposer.dflash_causal = True
    assert first_pass_of(proposer).causal
    # 0.20.0 to 0.22.1 have no such attribute.
    del proposer.dflash_causal
    assert not first_pass_of(proposer).causal


@pytest.mark.parametrize(("largest_capture", "held"), [(0, 30), (24, 30), (31, 31)])
def test_query_buffers_hold_the_longest_padded_batch(largest_capture, held):
    proposer = types.SimpleNamespace(
        max_query_tokens=30,
        compilation_config=types.SimpleNamespace(max_cudagraph_capture_size=largest_capture),
        input_ids=torch.ones(8, dtype=torch.int32),
        positions=torch.ones(30, dtype=torch.int64),
        _slot_mapping_buffer=torch.ones(30, dtype=torch.int64),
    )
    lengthen_query_buffers(proposer)
    assert proposer.input_ids.dtype == torch.int32
    assert [len(proposer.input_ids), len(proposer.positions), len(proposer._slot_mapping_buffer)] == [held] * 3


def test_many_short_requests_fit_the_query_buffers(make_dflash):
    """More queries than the scheduler's token budget: stock's `input_ids` ends before the last of them."""
    assert (1 + 15) * MAX_REQS > MAX_TOKENS
    proposer = make_dflash("graphs", 15)
    assert proposer.input_ids.shape[0] == 16 * MAX_REQS


# -- the hunks in the constructor, in every version --------------------------------------------------------------------


@pytest.mark.parametrize("version", versions("vllm/v1/spec_decode/dflash.py"))
def test_the_constructor_checks_first_and_then_makes_room(vllm_tree, version, monkeypatch):
    """On a platform of another's, too, where nothing else looks whether DFlash's modules run patched."""
    calls = []
    entry = run_records.new("0")
    entry.features = {"dflash-full-graph": {"state": "live", "reason": ""}}
    monkeypatch.setattr(patching, "install", lambda: entry)
    monkeypatch.setattr(patching, "force", lambda: calls.append("forced"))
    monkeypatch.setattr(dflash_config, "check", lambda config: calls.append("checked"))

    class Base:
        def __init__(self, vllm_config, device, pass_hidden_states_to_model, runner):
            calls.append("weights may be loaded from here on")
            self.method = vllm_config.speculative_config.method
            self.draft_graphs = DraftGraphs(self)
            self.num_speculative_tokens, self.max_batch_size, self.max_num_tokens = 3, 4, 8
            self.max_model_len, self.block_size, self.parallel_drafting_token_id = 64, 4, 0
            self.input_ids = torch.zeros(self.max_num_tokens, dtype=torch.int32)
            self.compilation_config = vllm_config.compilation_config
            self.draft_model_config = types.SimpleNamespace(
                hf_config=types.SimpleNamespace(dflash_config={}, num_hidden_layers=0)
            )

    given = {
        "SpecDecodeBaseProposer": Base,
        "torch": torch,
        "_copy_and_expand_dflash_inputs": types.SimpleNamespace(register_warmup=lambda **_: None),
    }
    text = text_of(vllm_tree(version), "vllm/v1/spec_decode/dflash.py")
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm_hwplugin"):
            module = importlib.import_module(node.module)
            given |= {name.asname or name.name: getattr(module, name.name) for name in node.names}
    kept = {"__init__", "dflash_config"}
    patched = take(text, "DFlashProposer", kept, given=given)
    config = types.SimpleNamespace(
        speculative_config=types.SimpleNamespace(method="dflash", use_dflash=lambda: True),
        compilation_config=types.SimpleNamespace(max_cudagraph_capture_size=24),
    )
    proposer = patched(config, torch.device("cpu"))
    assert calls == ["checked", "forced", "weights may be loaded from here on"]
    assert isinstance(proposer.draft_context, ContextGraphs)
    # 4 requests of 1 + 3 queries, padded to the largest captured size.
    assert [len(proposer.input_ids), len(proposer.positions), len(proposer._slot_mapping_buffer)] == [24, 24, 24]
