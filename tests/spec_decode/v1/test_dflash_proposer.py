# SPDX-License-Identifier: Apache-2.0
"""The hunks in the constructor of vLLM's `DFlashProposer`, in every version, and the shape of its first pass."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from vllm_hwplugin import patching
from vllm_hwplugin.base import run_records
from vllm_hwplugin.spec_decode import dflash_config
from vllm_hwplugin.spec_decode.v1.dflash_full_graph import ContextGraphs
from vllm_hwplugin.spec_decode.v1.draft_decision import FirstPass, first_pass_of
from vllm_hwplugin.spec_decode.v1.draft_full_graph import DraftGraphs

from ...conftest import versions
from ...released import take, text_of

PATH = "vllm/v1/spec_decode/dflash.py"


def test_the_first_pass_has_a_block_for_each_request() -> None:
    spec = SimpleNamespace(method="dflash", num_speculative_tokens=3)
    # 0.20.0 to 0.22.1 have no `dflash_causal`.
    for more, causal in (({}, False), ({"dflash_causal": False}, False), ({"dflash_causal": True}, True)):
        proposer = SimpleNamespace(speculative_config=spec, max_query_tokens=36, **more)
        assert first_pass_of(proposer) == FirstPass(query_len=4, max_tokens=36, masks=True, causal=causal)


@pytest.mark.parametrize("version", versions(PATH))
def test_the_constructor_checks_first_and_then_makes_room(
    vllm_tree: Callable[[str], Any], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on another platform, where nothing else checks whether DFlash's modules run patched."""
    calls: list[str] = []
    entry = run_records.new("0")
    entry.features = {"dflash-full-graph": {"state": "live", "reason": ""}}
    monkeypatch.setattr(patching, "install", lambda: entry)
    monkeypatch.setattr(patching, "force", lambda: calls.append("forced"))
    monkeypatch.setattr(dflash_config, "check", lambda config: calls.append("checked"))

    class Base:
        def __init__(self, vllm_config: Any, **_: Any) -> None:
            calls.append("weights may be loaded from here on")
            self.method, self.compilation_config = "dflash", vllm_config.compilation_config
            self.draft_graphs = DraftGraphs(self)
            self.num_speculative_tokens, self.max_batch_size, self.max_num_tokens = 3, 4, 8
            self.max_model_len, self.block_size, self.parallel_drafting_token_id = 64, 4, 0
            self.input_ids = torch.zeros(self.max_num_tokens, dtype=torch.int32)
            hf_config = SimpleNamespace(dflash_config={}, num_hidden_layers=0)
            self.draft_model_config = SimpleNamespace(hf_config=hf_config)

    warmup = SimpleNamespace(register_warmup=lambda **_: None)
    given = {"SpecDecodeBaseProposer": Base, "torch": torch, "_copy_and_expand_dflash_inputs": warmup}
    text = text_of(vllm_tree(version), PATH)
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm_hwplugin"):
            module = importlib.import_module(str(node.module))
            given |= {name.asname or name.name: getattr(module, name.name) for name in node.names}
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(method="dflash", use_dflash=lambda: True),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=24),
    )
    patched = take(text, "DFlashProposer", {"__init__", "dflash_config"}, given=given)
    proposer = patched(config, torch.device("cpu"))
    assert calls == ["checked", "forced", "weights may be loaded from here on"]
    assert isinstance(proposer.draft_context, ContextGraphs)
    # 4 requests of 1 + 3 queries, padded to the largest captured size.
    assert [len(proposer.input_ids), len(proposer.positions), len(proposer._slot_mapping_buffer)] == [24, 24, 24]
