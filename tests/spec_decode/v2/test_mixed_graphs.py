# SPDX-License-Identifier: Apache-2.0
"""How long a request attention is told of, while a FULL graph is captured and before it is replayed."""

from __future__ import annotations

import contextlib
import types
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder

from vllm_hwplugin.patching import SUPPORTED
from vllm_hwplugin.spec_decode.graph_recording import known_arguments
from vllm_hwplugin.spec_decode.v2 import capture_metadata

from ...conftest import versions
from ..engines import DRAFTS
from ..walks import UNPATCHED, host_of_graphs
from . import plain_triton
from .released_modules import ReleasedModules, jit
from .scheduled_runner import STAND_INS, Side
from .speculators import DEVICE, HIDDEN, MAX_LEN, MAX_REQS, RUNGS, Runner, Views

K = 3
FAULTY = SUPPORTED[: SUPPORTED.index("0.31.0")]
OFF = {"VLLM_HWPLUGIN_BACKPORT_MIXED_GRAPHS": "off"}
ALONE = UNPATCHED | dict.fromkeys(OFF, "on")
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


def longest_in_steps(tree: Any, mode: CUDAGraphMode, **choices: str) -> tuple[set[Any], set[Any]]:
    """Of the target's graphs, and of the steps that are replays of them: tokens and the longest query."""
    found: list[tuple[int, int]] = []
    build = TritonAttentionMetadataBuilder.build

    def asked(builder: Any, prefix: int, common: Any, *args: Any, **kwargs: Any) -> Any:
        found.append((common.num_actual_tokens, common.max_query_len))
        return build(builder, prefix, common, *args, **kwargs)

    with host_of_graphs() as monkeypatch:
        monkeypatch.setattr(TritonAttentionMetadataBuilder, "build", asked)
        kernels = {"language": plain_triton.LANGUAGE, "jit": partial(jit, make=plain_triton.Kernel)}
        side = Side(ReleasedModules(tree, STAND_INS, **kernels, **choices), mode=mode)
        graphs, steps = set(found), set()
        prepare = side.runner.model_state.prepare_attn

        def prepared(batch: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
            found.clear()
            metadata = prepare(batch, graph, *args, **kwargs)
            if graph == CUDAGraphMode.FULL:
                steps.update(found)
            return metadata

        side.runner.model_state.prepare_attn = prepared
        # Prompts of one token and of several, alone and beside requests that decode.
        for name, prompt in enumerate(([6], [1, 2, 3, 4, 5], [7])):
            side.add(str(name), prompt, max_tokens=9)
            side.step()
        side.abort("0")
        side.add("3", [8], max_tokens=1)
        for _ in range(9):
            side.step()
    return graphs, steps


def test_a_schedule_is_laid_out_for_the_request_that_its_graph_was_captured_for(vllm_tree) -> None:
    tree = vllm_tree("0.32.0")
    graphs, steps = longest_in_steps(tree, CUDAGraphMode.FULL, **ALONE)
    assert len(steps) > 1
    assert steps <= graphs
    # FlashAttention 3 lays a schedule of single tokens out in another way.
    _, stock = longest_in_steps(tree, CUDAGraphMode.FULL, **UNPATCHED)
    assert any(longest == 1 < tokens for tokens, longest in stock)


def test_that_of_a_decode_batch_is_left_to_vllm(vllm_tree) -> None:
    tree, mode = vllm_tree("0.32.0"), CUDAGraphMode.FULL_DECODE_ONLY
    patched, stock = (longest_in_steps(tree, mode, **one) for one in (ALONE, UNPATCHED))
    assert patched == stock
    assert {longest for _, longest in stock[1]} == {1 + DRAFTS}
