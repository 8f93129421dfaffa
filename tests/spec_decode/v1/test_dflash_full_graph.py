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

from vllm_hwplugin import patching  # noqa: E402
from vllm_hwplugin.base import run_records  # noqa: E402
from vllm_hwplugin.spec_decode import dflash_config  # noqa: E402
from vllm_hwplugin.spec_decode.v1.dflash_full_graph import ContextGraphs  # noqa: E402
from vllm_hwplugin.spec_decode.v1.draft_decision import FirstPass, first_pass_of  # noqa: E402
from vllm_hwplugin.spec_decode.v1.draft_full_graph import DraftGraphs  # noqa: E402

from ...conftest import versions  # noqa: E402
from ...released import take, text_of  # noqa: E402
from ..drafters import MAX_REQS, Runner, boot, compare, compare_over_many  # noqa: E402
from ..host_runner import FLASHINFER, Pool, builder  # noqa: E402
from ..recorded_graph import RecordedGraphs  # noqa: E402

FULL, NONE, DECODE_ONLY = CUDAGraphMode.FULL, CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY


def graphs_of(proposer):
    return proposer.draft_graphs.captured._graphs, proposer.draft_context.captured


@pytest.mark.parametrize(("k", "mode"), [(1, FULL), (7, DECODE_ONLY)])
def test_drafts_are_those_of_stock(make_dflash, k, mode):
    stock, graphed, runner = make_dflash("stock", k), make_dflash("graphs", k), Runner(1)
    boot(stock, NONE, runner)
    boot(graphed, mode, runner)
    RecordedGraphs.sealed = True
    queries, context = graphs_of(graphed)
    compare_over_many(runner, k, functools.partial(compare, stock, graphed))
    assert {key.num_tokens // key.num_reqs for key in queries.replayed} == {1 + k}
    assert len(queries.replayed) > 25
    assert len(context.replayed) > 25


def test_drafts_are_stocks_after_sleep(make_dflash):
    stock, graphed, runner, pool = make_dflash("stock", 3), make_dflash("graphs", 3), Runner(1), Pool()
    boot(stock, NONE, runner)
    boot(graphed, FULL, runner, profile=True, kv_pool=pool)
    RecordedGraphs.sealed = True
    for index in range(6):
        if index % 2:
            pool.sleep()
        compare(stock, graphed, runner.batch(3, size=3))
    assert all(len(graphs.replayed) == 6 for graphs in graphs_of(graphed))


def test_a_builder_that_plans_on_the_host_is_left_alone_for_blocks(make_dflash, notes):
    proposer = make_dflash("graphs", 3)
    proposer.host.use(builder(FLASHINFER))
    boot(proposer, DECODE_ONLY, Runner(0))
    assert not proposer.draft_graphs.ready
    assert "non-causal attention (FlashInferMetadataBuilder" in notes["dflash-full-graph"]


# -- the shape of the pass, and the buffers ---------------------------------------------------------------------------


def test_the_first_pass_of_a_dflash_drafter(make_dflash):
    proposer = make_dflash("graphs", 3)
    assert first_pass_of(proposer) == FirstPass(query_len=4, max_tokens=4 * MAX_REQS, masks=True, causal=False)
    proposer.dflash_causal = True
    assert first_pass_of(proposer).causal
    # 0.20.0 to 0.22.1 have no such attribute.
    del proposer.dflash_causal
    assert not first_pass_of(proposer).causal


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
