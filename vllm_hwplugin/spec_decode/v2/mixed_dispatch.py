# SPDX-License-Identifier: Apache-2.0
"""Decide which steps replay a graph of a mixed batch (Model Runner V2).

vLLM's `CudaGraphManager.dispatch` decides by counts. These rules are added:

- A step that computes a part of an image, a video or audio replays none: a replay runs no Python, and Qwen3-VL keeps
  features for later layers in a buffer, and clears it after the forward.
- A draft's first pass replays one only if the target does. It reads the target's attention metadata, and FlashAttention
  3's schedule is laid out for a mixed batch's graph only if the target replays it.
- With `delta_rule` a step with more prompts than its metadata holds replays none. Nor does a step of prompts only with
  a piece of one token, which vLLM computes by the kernel of decodes there.
- Graphs over MLA bound the longest request. vLLM does not tell the dispatch how long a request is if the step has a
  prompt, and never tells the draft's.
- With adaptive verification vLLM measures the time of its graphs' sizes, and of a few above them. It is not told of
  mixed batches' sizes, which would only make the start longer.

Over TRITON_FLASH_ATTN another kernel computes a step with a part of an image, so the first two rules are for every FULL
graph. Such a step runs in a PIECEWISE graph, or without one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_hwplugin.base import gates
from vllm_hwplugin.spec_decode.builders import computes_images_apart, is_flash_attn
from vllm_hwplugin.spec_decode.v2.methods import put_before
from vllm_hwplugin.spec_decode.v2.mixed_bounds import is_mixed_graph

#: Attribute of a runner: its `MixedDispatch`.
_ATTRIBUTE: Final = "_hwplugin_mixed_dispatch"


class MixedDispatch:
    """The rules for one `GPUModelRunner`."""

    def __init__(self, runner: Any):
        self._runner = runner
        self._apart = computes_images_apart(runner.attn_groups)
        self._most_prompts: int | None = None
        # Of the current step.
        self._has_media = self._other_kernels = False
        # Whether the target's FULL graph is a mixed batch's, or None without a FULL graph.
        self._replays: bool | None = None
        self._num_tokens = 0
        self._longest: int | None = None

    @classmethod
    def of(cls, runner: Any) -> MixedDispatch | None:
        """Return the runner's dispatch, if it has graphs of mixed batches."""
        dispatch: MixedDispatch | None = vars(runner).get(_ATTRIBUTE)
        return dispatch

    def attach(self, shares_first_pass: bool, most_prompts: int | None = None, bounded: bool = False) -> None:
        """Put the rules before vLLM's dispatch of target and draft.

        Args:
            bounded: whether the graphs bound the tokens of a request.
        """
        runner, self._most_prompts, self._bounded = self._runner, most_prompts, bounded
        vars(runner)[_ATTRIBUTE] = self
        if runner.supports_mm_inputs or most_prompts is not None or bounded:
            put_before(runner, "update_requests", self._see_requests)
        put_before(runner.cudagraph_manager, "dispatch", self._dispatch_target)
        if getattr(runner, "adaptive_verification", None) is not None:
            put_before(runner.cudagraph_manager, "captured_token_counts", self._decode_sizes)
        if shares_first_pass:
            put_before(runner.speculator.prefill_cudagraph_manager, "dispatch", self._dispatch_first_pass)

    def replays(self) -> bool:
        """Whether the target replays a mixed batch's graph in this step."""
        return self._replays is True

    def _decode_sizes(self, _: Callable[[], list[int]]) -> list[int]:
        graphs = self._runner.cudagraph_manager.graphs
        return sorted({desc.num_tokens for desc in graphs if not self.is_mixed(desc)})

    def _see_requests(self, vllms: Callable[..., None], scheduler_output: Any) -> None:
        vllms(scheduler_output)
        runner, tokens = self._runner, scheduler_output.num_scheduled_tokens
        self._longest = max(tokens.values(), default=None)
        if self._most_prompts is not None:
            prompts = prompts_of(runner, tokens)
            self._other_kernels = prompts > self._most_prompts or (prompts == len(tokens) and 1 in tokens.values())
        if runner.supports_mm_inputs:
            # A draft that takes images has them one token before the target.
            ahead = int(getattr(runner.speculator, "supports_mm_inputs", False))
            self._has_media = computes_media(runner, tokens, ahead)

    def _dispatch_target(
        self, vllms: Callable[..., Any], num_reqs: int, num_tokens: int, *more: Any, **named: Any
    ) -> Any:
        if self._bounded:
            self._longest = named["max_query_len"] = named.get("max_query_len") or self._longest
        desc = vllms(num_reqs, num_tokens, *more, **named)
        if (self._has_media and self._rules(desc)) or (self._other_kernels and self.is_mixed(desc)):
            desc = _other_than(desc, self._runner.cudagraph_manager, num_reqs, num_tokens)
        self._replays = self.is_mixed(desc) if desc.cg_mode == CUDAGraphMode.FULL else None
        self._num_tokens = num_tokens
        return desc

    def _dispatch_first_pass(
        self, vllms: Callable[..., Any], num_reqs: int, num_tokens: int, *more: Any, **named: Any
    ) -> Any:
        if self._bounded:
            named["max_query_len"] = self._longest
        desc, speculator = vllms(num_reqs, num_tokens, *more, **named), self._runner.speculator
        if not self._rules(desc):
            return desc
        if self._replays is not self.is_mixed(desc):
            return _other_than(desc, speculator.prefill_cudagraph_manager, num_reqs, num_tokens)
        if getattr(speculator, "supports_mm_inputs", False):
            # Its graph embeds all ids. After the batch there are ids of earlier batches, and an image's id may be
            # outside the vocabulary.
            speculator.input_buffers.input_ids[self._num_tokens : desc.num_tokens].zero_()
        return desc

    def is_mixed(self, desc: Any) -> bool:
        """Whether a `BatchExecutionDescriptor` is a mixed batch's FULL graph."""
        return is_mixed(self._runner.compilation_config, desc)

    def _rules(self, desc: Any) -> bool:
        """Whether the rules on images are for this graph."""
        return self.is_mixed(desc) or (self._apart and desc.cg_mode == CUDAGraphMode.FULL)


def text_support(causal_builder: type, vllm_config: Any, support: AttentionCGSupport) -> AttentionCGSupport:
    """Return which batches without images FULL graphs may hold.

    vLLM's patched TRITON_FLASH_ATTN calls this. vLLM declares graphs with one token per request, because a longer query
    may have a part of an image. `MixedDispatch` keeps such steps out of graphs.

    Args:
        causal_builder: the builder of steps without a part of an image.
        support: what vLLM declares.
    """
    single = support == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    # Another rank, or a later stage of a pipeline, does not know of an image.
    parallel = vllm_config.parallel_config
    knows = parallel.data_parallel_size == parallel.pipeline_parallel_size == 1
    serves = single and knows and is_flash_attn(causal_builder) and vllm_config.use_v2_model_runner
    return AttentionCGSupport.UNIFORM_BATCH if serves and gates.asks_for("image-spans") else support


def is_mixed(compilation_config: Any, desc: Any) -> bool:
    """Whether a `BatchExecutionDescriptor` is a mixed batch's FULL graph."""
    # vLLM's graphs of decode batches have a uniform count; with adaptive verification they bound the longest request.
    longest = getattr(desc, "max_query_len", None) or desc.num_tokens
    return (
        desc.cg_mode == CUDAGraphMode.FULL
        and desc.uniform_token_count is None
        and is_mixed_graph(compilation_config, desc.num_reqs, desc.num_tokens, longest)
    )


def computes_media(runner: Any, num_scheduled_tokens: Mapping[str, int], ahead: int = 0) -> bool:
    """Whether a step computes tokens of an image, a video or audio.

    Args:
        runner: a `GPUModelRunner` whose model takes them, with the requests of the step.
        num_scheduled_tokens: tokens of the step by request.
        ahead: how many tokens after the step's count also.
    """
    states, media = runner.req_states, runner.encoder_cache.mm_features
    for name, count in num_scheduled_tokens.items():
        features = media.get(name)
        if not features:
            continue
        row = states.req_id_to_index[name]
        start = int(states.num_computed_prefill_tokens[row])
        if start >= states.prefill_len.np[row]:
            continue
        places = (feature.mm_position for feature in features)
        if any(place.offset < start + count + ahead and start < place.offset + place.length for place in places):
            return True
    return False


def prompts_of(runner: Any, requests: Iterable[str]) -> int:
    """Return how many requests of a step compute prompt tokens."""
    states = runner.req_states
    rows = [states.req_id_to_index[name] for name in requests]
    return int((states.num_computed_prefill_tokens[rows] < states.prefill_len.np[rows]).sum())


def _other_than(mixed: Any, manager: Any, num_reqs: int, num_tokens: int) -> Any:
    """Return a PIECEWISE graph in place of `mixed`, or none."""
    candidates = manager._candidates.get((num_tokens, mixed.num_active_loras), ())
    pieces = (desc for desc in candidates if desc.cg_mode == CUDAGraphMode.PIECEWISE)
    eager = dataclasses.replace(mixed, cg_mode=CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs)
    return next(pieces, eager)
