# SPDX-License-Identifier: Apache-2.0
"""Which steps replay a graph of a mixed batch: asked of vLLM's dispatch itself."""

from __future__ import annotations

import itertools
import types
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_hwplugin.base import gates
from vllm_hwplugin.spec_decode.v2 import mixed_dispatch, mixed_graphs
from vllm_hwplugin.spec_decode.v2.mixed_dispatch import MixedDispatch, computes_media, prompts_of

from ...conftest import versions
from ...released import text_of
from ..walks import live_load
from .test_mixed_graphs import SIZES_HERE, with_them

COMPOSITE = "vllm/v1/attention/backends/composite.py"
#: An image of four tokens from the sixth on, and one of two.
FEATURES = [SimpleNamespace(mm_position=SimpleNamespace(offset=at, length=n)) for at, n in ((5, 4), (20, 2))]


@pytest.mark.parametrize(
    ("computed", "count", "ahead", "media"),
    [
        (0, 5, 0, False),
        # A draft has the next token's embedding.
        (0, 5, 1, True),
        (0, 6, 0, True),
        (8, 2, 0, True),
        (9, 11, 0, False),
        (9, 11, 1, True),
        (21, 9, 0, True),
        (22, 8, 0, False),
        # A decode step: its token is in no image, whatever the prompt had.
        (30, 3, 1, False),
    ],
)
def test_a_step_has_media_if_it_computes_their_tokens(computed: int, count: int, ahead: int, media: bool) -> None:
    states = SimpleNamespace(
        req_id_to_index={"text": 0, "image": 1},
        num_computed_prefill_tokens=np.array([0, computed]),
        prefill_len=SimpleNamespace(np=np.array([30, 30])),
    )
    runner = SimpleNamespace(req_states=states, encoder_cache=SimpleNamespace(mm_features={"image": FEATURES}))
    assert computes_media(runner, {"text": 7, "image": count}, ahead) is media
    assert not computes_media(runner, {"text": 7}, ahead)


def test_requests_in_their_prompt_are_counted() -> None:
    states = SimpleNamespace(
        req_id_to_index={"begins": 3, "decodes": 1, "goes_on": 2, "third": 0},
        num_computed_prefill_tokens=np.array([0, 30, 20, 0]),
        prefill_len=SimpleNamespace(np=np.array([30, 30, 30, 30])),
    )
    runner = SimpleNamespace(req_states=states, supports_mm_inputs=False, attn_groups=[])
    dispatch = MixedDispatch(runner)
    dispatch._most_prompts = 2

    def other_kernels(**tokens: int) -> bool:
        dispatch._see_requests(lambda _: None, SimpleNamespace(num_scheduled_tokens=tokens))
        return dispatch._other_kernels

    assert prompts_of(runner, {"begins": 4, "decodes": 4, "goes_on": 4}) == 2
    assert prompts_of(runner, {"decodes": 4}) == 0
    assert not other_kernels(begins=4, goes_on=4)
    assert other_kernels(begins=4, goes_on=4, decodes=1, third=4)
    # vLLM computes a piece of one token by the kernel of decodes, if no request decodes.
    assert other_kernels(begins=4, goes_on=1)
    assert not other_kernels(decodes=4, goes_on=1)
    assert not other_kernels(decodes=1)


class Dispatched:
    """Takes down what vLLM dispatches to in each step, target and first pass, and whether the step has an image."""

    def __init__(self, runner: Any) -> None:
        self.is_mixed = partial(mixed_dispatch.is_mixed, runner.compilation_config)
        self.steps: list[list[Any]] = []
        self.media: list[bool] = []
        managers = (runner.cudagraph_manager, runner.speculator.prefill_cudagraph_manager)
        for place, manager in enumerate(managers):
            dispatch = manager.dispatch

            def noted(*args: Any, dispatch: Any = dispatch, place: int = place, **named: Any) -> Any:
                desc = dispatch(*args, **named)
                if place == 0:
                    self.steps.append([desc])
                    self.media.append(MixedDispatch.of(runner)._has_media)
                else:
                    self.steps[-1].append(desc)
                return desc

            manager.dispatch = noted

    def mixed(self) -> set[tuple[bool, ...]]:
        return {tuple(map(self.is_mixed, step)) for step in self.steps}


def images_in_every_other_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each second step computed a part of an image."""
    answers = itertools.cycle((True, False))
    monkeypatch.setattr(mixed_dispatch, "computes_media", lambda *_: next(answers))
    attach, see = MixedDispatch.attach, MixedDispatch._see_requests

    def seen(self: MixedDispatch, *arguments: Any) -> None:
        self._runner.supports_mm_inputs = True
        see(self, *arguments)
        self._runner.supports_mm_inputs = False

    def attached(self: MixedDispatch, *arguments: Any) -> None:
        attach(self, *arguments)
        mixed_dispatch.put_before(self._runner, "update_requests", self._see_requests)

    monkeypatch.setattr(MixedDispatch, "_see_requests", seen)
    monkeypatch.setattr(MixedDispatch, "attach", attached)


@pytest.mark.each_vllm("v2-mixed-graphs")
@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE])
@pytest.mark.parametrize("apart", [False, True])
def test_a_step_with_an_image_replays_no_mixed_graph_and_its_draft_follows(
    vllm_here: Any, mode: CUDAGraphMode, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    images_in_every_other_step(monkeypatch)
    for module in (mixed_dispatch, mixed_graphs):
        monkeypatch.setattr(module, "computes_images_apart", lambda groups: apart)
    with with_them(vllm_here, mode) as sides:
        dispatched = Dispatched(sides.both[1].runner)
        live_load(sides)
    shown = [step for step, media in zip(dispatched.steps, dispatched.media, strict=True) if media]
    assert not any(dispatched.is_mixed(step[0]) for step in shown)
    # Another kernel computes images: then graphs of decode batches hold none either.
    decode = set() if apart else {CUDAGraphMode.FULL}
    assert {step[0].cg_mode for step in shown} - decode <= {CUDAGraphMode.NONE, mode.mixed_mode()}
    assert not (apart and any(one.cg_mode == CUDAGraphMode.FULL for step in shown for one in step))
    # A draft with its own graph would read a schedule that is laid out for the batch as it is.
    assert (False, True) not in dispatched.mixed()
    # A graph may draft for such a batch, without vLLM's dispatch.
    assert dispatched.mixed() & {(True, True), (True,)}


@pytest.mark.each_vllm("v2-mixed-graphs")
def test_a_draft_follows_a_target_that_has_lost_its_graphs(vllm_here: Any) -> None:
    with with_them(vllm_here, CUDAGraphMode.FULL_DECODE_ONLY) as sides:
        dispatched = Dispatched(sides.both[1].runner)
        sides.add(prompt=[1, 2, 3, 4, 5], max_tokens=4, temperature=0.0)
        sides.step_without_graphs(0)
        assert [one.cg_mode for one in dispatched.steps[-1]] == [CUDAGraphMode.NONE] * 2
        sides.add(prompt=[6, 7, 8, 9, 10], max_tokens=4, temperature=0.0)
        sides.step()
        # A graph drafts for the second, without vLLM's dispatch.
        assert dispatched.mixed() == {(False, False), (True,)}
        sides.finish()


@pytest.mark.each_vllm("v2-mixed-graphs")
def test_ids_after_a_batch_are_no_ids_of_images(vllm_here: Any) -> None:
    """A draft that takes images embeds all ids of its graph."""
    with with_them(vllm_here, CUDAGraphMode.FULL_DECODE_ONLY) as sides:
        runner = sides.both[1].runner
        runner.speculator.supports_mm_inputs = True
        ids, dispatch = runner.speculator.input_buffers.input_ids, MixedDispatch.of(runner)
        ids.fill_(99)
        runner.cudagraph_manager.dispatch(2, 7, None, num_active_loras=0)
        desc = runner.speculator.prefill_cudagraph_manager.dispatch(2, 9, None, num_active_loras=0)
        assert (desc.num_tokens, dispatch._num_tokens) == (9, 7)
        assert torch.equal(ids[:10], torch.tensor([99] * 7 + [0, 0, 99], dtype=ids.dtype))


@pytest.mark.each_vllm("v2-mixed-graphs")
def test_a_model_that_takes_images_keeps_its_piecewise_graphs(vllm_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = []
    for keeps in (False, True):
        with monkeypatch.context() as patch:
            if keeps:
                patch.setattr(mixed_graphs, "KEEPS_PIECES", "unused")
                settle = mixed_dispatch.MixedDispatch.attach

                def attach(self: MixedDispatch, *arguments: Any, settle: Any = settle) -> None:
                    settle(self, *arguments)
                    vars(self._runner.compilation_config)["_hwplugin_keeps_pieces"] = True

                patch.setattr(MixedDispatch, "attach", attach)
            with with_them(vllm_here, CUDAGraphMode.FULL_AND_PIECEWISE) as sides:
                manager = sides.both[1].runner.cudagraph_manager
                pieces.append(len(manager._capture_descs[CUDAGraphMode.PIECEWISE]))
    assert pieces[0] < pieces[1]


@pytest.mark.each_vllm("v2-mixed-graphs")
def test_graphs_with_a_longest_request_serve_steps_of_shorter_requests(
    vllm_here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over MLA, whose decode way takes requests of up to 512 new tokens."""
    if not hasattr(BatchExecutionDescriptor, "max_query_len"):
        pytest.skip("no graph bounds the tokens of a request before 0.28")
    monkeypatch.setattr(mixed_graphs, "longest_as_decode", lambda builder: 5)
    longest: list[int] = []
    # Four requests have no more tokens.
    held = {size: min(size, 5) for size in SIZES_HERE if size <= 20}
    with with_them(vllm_here, CUDAGraphMode.FULL_AND_PIECEWISE) as sides:
        runner = sides.both[1].runner
        for manager in (runner.cudagraph_manager, runner.speculator.prefill_cudagraph_manager):
            mixed = [desc for desc in manager.graphs if MixedDispatch.of(runner).is_mixed(desc)]
            assert {desc.num_tokens: desc.max_query_len for desc in mixed} == held
        dispatched, update = Dispatched(runner), runner.update_requests

        def seen(output: Any) -> None:
            longest.extend([max(output.num_scheduled_tokens.values())] if output.num_scheduled_tokens else [])
            update(output)

        monkeypatch.setattr(runner, "update_requests", seen)
        live_load(sides)
    steps = [(tokens, *step) for tokens, step in zip(longest, dispatched.steps, strict=True)]
    assert {tokens > 5 for tokens in longest} == {False, True}
    # vLLM does not tell the target's dispatch of a step with a prompt how long a request is, and the draft's never.
    replayed = [all(map(dispatched.is_mixed, step)) for _, *step in steps if not step[0].uniform_token_count]
    assert replayed == [tokens <= 5 for tokens, target, *_ in steps if not target.uniform_token_count]


@pytest.mark.parametrize("version", versions(COMPOSITE, among=["0.30.0", "0.32.0", "0.33.0"]))
def test_graphs_of_text_take_more_than_one_token_per_request_over_kernels_for_images(
    version: str, vllm_tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("composite")
    exec(compile(text_of(vllm_tree(version), COMPOSITE), COMPOSITE, "exec"), vars(module))
    parallel = SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1)
    compilation = SimpleNamespace(static_forward_context={})
    config = SimpleNamespace(compilation_config=compilation, parallel_config=parallel, use_v2_model_runner=True)

    def support(causal: Any) -> str:
        backend = module.create_composite_attention_backend(
            *(TritonAttentionBackend, causal),
            name="both",
            backend_name="BOTH",
            module="composite",
            routing_policy=module.MMPrefixAttentionRouting,
        )
        found: str = backend.get_builder_cls().get_cudagraph_support(config, None).name
        return found

    assert support(FlashAttentionBackend) == "UNIFORM_SINGLE_TOKEN_DECODE"
    monkeypatch.setenv(gates.MORE_GRAPHS, "image-spans")
    assert support(FlashAttentionBackend) == "UNIFORM_BATCH"
    for size in ("data_parallel_size", "pipeline_parallel_size"):
        setattr(parallel, size, 2)
        assert support(FlashAttentionBackend) == "UNIFORM_SINGLE_TOKEN_DECODE"
        setattr(parallel, size, 1)
    config.use_v2_model_runner = False
    assert support(FlashAttentionBackend) == "UNIFORM_SINGLE_TOKEN_DECODE"
