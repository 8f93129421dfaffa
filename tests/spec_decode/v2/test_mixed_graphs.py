# SPDX-License-Identifier: Apache-2.0
"""How long a request attention is told of while a FULL graph is captured, and may get when it is replayed."""

from __future__ import annotations

import contextlib
import types
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin.patching import SUPPORTED
from vllm_hwplugin.spec_decode.graph_recording import known_arguments
from vllm_hwplugin.spec_decode.v2 import capture_metadata

from ...conftest import versions
from .speculators import DEVICE, HIDDEN, MAX_LEN, MAX_REQS, RUNGS, Runner, Views

K = 3
FAULTY = SUPPORTED[: SUPPORTED.index("0.31.0")]
OFF = {"VLLM_HWPLUGIN_BACKPORT_MIXED_GRAPHS": "off"}
#: The first pass is captured with what was made for the target, or what `v2-capture-metadata` makes in its place.
BORROWED = SUPPORTED[: SUPPORTED.index("0.26.0")]
#: Graphs of these many tokens: with a token for each request, and with two for some.
SIZES = (*RUNGS, 12)


class Longest(Views):
    """Takes down requests, tokens and the longest query of each build."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common = common_attn_metadata
        self.asked = getattr(self, "asked", [])
        self.asked.append((common.num_reqs, common.num_actual_tokens, common.max_query_len))
        return super().build(common_prefix_len, common)


def longest_of(modules: Any, version: str, mode: CUDAGraphMode, **choices: str) -> dict[str, set[tuple[int, ...]]]:
    """Of the target's graphs, of those of the draft's first pass and of its steps: requests, tokens, longest query."""
    loaded, builder = modules(version, **choices), Longest()
    made = Runner(loaded, version, builder, K)
    made.config.compilation_config.cudagraph_mode = mode
    vars(made.config.compilation_config).update(cudagraph_capture_sizes=[*SIZES], max_cudagraph_capture_size=max(SIZES))
    made.config.lora_config = None
    state = types.SimpleNamespace(
        max_model_len=MAX_LEN,
        supports_mm_inputs=False,
        vllm_config=made.config,
        model_config=types.SimpleNamespace(is_mm_prefix_lm=False, rswa_window=None),
        prepare_dummy_inputs=lambda *args: {},
    )
    state.prepare_attn = types.MethodType(loaded("model_states.default").DefaultModelState.prepare_attn, state)
    shapes, speculator = loaded("cudagraph_utils"), made.speculator
    shapes.set_forward_context = lambda *args, **kwargs: contextlib.nullcontext()
    speculator.init_cudagraph_manager(mode)
    target = shapes.ModelCudaGraphManager(made.config, DEVICE, mode, K + 1)
    shared = {
        "model": lambda input_ids, **_: torch.zeros(len(input_ids), HIDDEN),
        "forward_fn": lambda *args, **kwargs: None,
        "model_state": state,
        "input_buffers": speculator.input_buffers,
        "intermediate_tensors": None,
        "block_tables": made.block_tables,
        "attn_groups": speculator.attn_groups,
        "kv_cache_config": speculator.kv_cache_config,
    }
    managers = {"target": target, "steps": speculator.decode_cudagraph_manager}
    if version not in BORROWED:
        managers["first pass"] = speculator.prefill_cudagraph_manager
    found, states = {}, {}
    for name, manager in managers.items():
        builder.asked = []
        states[name] = manager.capture(**known_arguments(manager.capture, **shared))
        found[name] = set(builder.asked)
    if version in BORROWED and states["target"] is not None:
        runner = types.SimpleNamespace(**shared, max_num_reqs=MAX_REQS)
        prepare = mock.patch.object(capture_metadata, "prepare_inputs_to_capture", shapes.prepare_inputs_to_capture)
        with prepare:
            made_anew = capture_metadata.made_anew(runner, states["target"])
            builder.asked = []
            assert [made_anew[shape] for shape in made_anew]
        found["first pass"] = set(builder.asked)
    return found


@pytest.mark.parametrize("version", versions("vllm/v1/worker/", "vllm/v1/attention/", among=FAULTY))
def test_graphs_of_any_batch_are_captured_for_one_request_with_all_tokens(modules, version: str) -> None:
    any_batch = {(min(tokens, MAX_REQS), tokens) for tokens in SIZES}
    stock, patched = (longest_of(modules, version, CUDAGraphMode.FULL, **choices) for choices in (OFF, {}))
    for name in stock.keys() - {"steps"}:
        assert {one[:2] for one in stock[name]} == {one[:2] for one in patched[name]} == any_batch
        # FlashAttention 3 needs no causal mask for such.
        assert {longest for requests, tokens, longest in stock[name] if requests == tokens} == {1}
        assert all(longest == tokens for _, tokens, longest in patched[name])
    assert patched["steps"] == stock["steps"]


@pytest.mark.parametrize("version", versions("vllm/v1/worker/", "vllm/v1/attention/", among=FAULTY))
def test_graphs_of_decode_batches_are_captured_as_before(modules, version: str) -> None:
    stock, patched = (longest_of(modules, version, CUDAGraphMode.FULL_DECODE_ONLY, **choices) for choices in (OFF, {}))
    assert patched == stock
    assert {longest for *_, longest in patched["target"]} == {K + 1}
    assert {longest for *_, longest in patched["steps"]} == {1}
