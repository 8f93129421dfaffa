# SPDX-License-Identifier: Apache-2.0
"""Add FULL CUDA graphs for batches of any shape to vLLM's graphs for decode batches (Model Runner V1).

With `cudagraph_mode` FULL vLLM captures a batch with a prompt, or with unequal draft counts, whole, but then it has no
graphs for decode batches, and the plugin's sampling and drafting need them. Here vLLM's dispatcher has both kinds. It
prefers FULL graphs. Capture, padding and replay are vLLM's; `mixed_sizes` has the order of captures and what a failure
costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.fallback import report_unused
from vllm_hwplugin.base.features import V1_MIXED_GRAPHS
from vllm_hwplugin.spec_decode.capture_sizes import full_mixed_sizes, piecewise_sizes, set_full_mixed_sizes
from vllm_hwplugin.spec_decode.decode_batch import MAX_NUM_REQS
from vllm_hwplugin.spec_decode.obstacles import Part, why_not
from vllm_hwplugin.spec_decode.v1.mixed_sizes import ONLY_DECODES, sized_for_few

#: Tokens of the smallest graph. A smaller batch has hardly a prompt.
_SMALLEST: Final = 32
_BUILD: Final = "_build_attention_metadata"
_DETERMINE: Final = "_determine_batch_execution_and_padding"


def plan_mixed_graphs(runner: Any) -> None:
    """Choose the sizes of mixed batches' graphs, or report why none.

    The patched `initialize_metadata_builders` calls this when the target's attention groups have builders: before vLLM
    measures the memory of graphs, and again before it captures them. PIECEWISE graphs have the same sizes.

    Raises:
        FeatureRequired: the engine cannot have these graphs, and the feature's switch is `on`.
    """
    compilation = runner.compilation_config
    if getattr(runner, "drafter", None) is None or full_mixed_sizes(compilation) == ():
        # Another stage drafts or none does; or the capture for vLLM's memory estimate failed and gave the reason.
        return
    reason = why_not(runner, Part.V1_MIXED)
    least = max(_SMALLEST, 1 + runner.uniform_decode_query_len)
    sizes = [size for size in piecewise_sizes(compilation) or () if size >= least]
    if reason is not None or not sizes:
        report_unused(V1_MIXED_GRAPHS, ONLY_DECODES, reason or f"no capture size has {least} tokens")
        if full_mixed_sizes(compilation):
            # vLLM has estimated their memory, and it does not suffice.
            set_full_mixed_sizes(compilation, ())
        return
    set_full_mixed_sizes(compilation, sizes)
    if _BUILD not in vars(runner):
        setattr(runner, _BUILD, partial(_build_for_graph, runner, getattr(runner, _BUILD)))
        if runner.max_num_reqs > MAX_NUM_REQS:
            setattr(runner, _DETERMINE, partial(_determine, runner, getattr(runner, _DETERMINE)))
    rows = min(sizes[-1], runner.max_num_reqs, MAX_NUM_REQS)
    run_records.note(V1_MIXED_GRAPHS, f"{len(sizes)} shapes of at most {sizes[-1]} tokens and {rows} requests")
    run_records.use(V1_MIXED_GRAPHS, True)


def _determine(runner: Any, determine: Callable[..., Any], **asked: Any) -> Any:
    """Do `_determine_batch_execution_and_padding`; a mixed batch finds its graph."""
    if _is_uniform(runner, asked["max_num_scheduled_tokens"], asked) or asked["num_reqs"] > MAX_NUM_REQS:
        return determine(**asked)
    with sized_for_few(runner):
        return determine(**asked)


def _is_uniform(runner: Any, longest: int, asked: Mapping[str, Any]) -> bool:
    """Whether vLLM takes the batch for a decode batch."""
    counts, forced = (asked["num_tokens"], asked["num_reqs"]), asked.get("force_uniform_decode")
    return bool(runner._is_uniform_decode(longest, runner.uniform_decode_query_len, *counts, forced))


def _build_for_graph(runner: Any, build: Callable[..., tuple[Any, Any]], **asked: Any) -> tuple[Any, Any]:
    """Do `_build_attention_metadata`, for a mixed batch's graph as its capture did.

    A captured kernel is launched for the longest request that the graph may get. FlashAttention 3 lays out the
    schedule that vLLM makes in each step by the longest request of the step: with heads of 64 or 256, one token per
    request gives another layout. So the builders get the graph's tokens, in its capture and in each replay. The
    drafter reads the step's own longest request.
    """
    longest, num_tokens_padded = asked["max_query_len"], asked.get("num_tokens_padded")
    if longest > runner.max_model_len:
        # Only requests of a capture are longer. Attention would read past the last row of the block table.
        runner.seq_lens.clamp_(max=runner.max_model_len)
    # Batches with a FULL graph are padded.
    if num_tokens_padded is not None and not _is_uniform(runner, longest, asked):
        asked["max_query_len"] = num_tokens_padded
    layers, common = build(**asked)
    if common is not None:
        common.max_query_len = longest
    return layers, common
