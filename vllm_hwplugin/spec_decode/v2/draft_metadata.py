# SPDX-License-Identifier: Apache-2.0
"""Attention metadata of the one-token draft steps, made again inside a CUDA graph.

A graph of several draft steps has to make each step's metadata itself. vLLM's own `build` is called between the steps
while the graph is captured, so the graph holds what vLLM does on the device, and repeats it at each replay. What a
build does on the host is done once, at capture. So a builder's metadata can be made in a graph where, for a batch of
one token a request,

- all that it takes from the host is the graph's shape, or the model's longest sequence in place of the batch's;
- it copies nothing from the host to the device: a replay would read memory that was freed long ago;
- it never waits for the device.

Each class below was read for that in the last release of each minor version from 0.20 to 0.33. Context
parallelism is left out: lengths that it splits over ranks are not advanced between draft steps. One that is not
listed, or that overrides what was read, is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from vllm_hwplugin import journal
from vllm_hwplugin.features import V2_DRAFT_METADATA
from vllm_hwplugin.spec_decode.builders import makes_metadata

_BACKENDS: Final = "vllm.v1.attention.backends"
_IN_GRAPH: Final = ""
_HOST_PLAN: Final = "each build plans on the host"
_UNKNOWN: Final = "it is not among the builders whose work for a draft step is known to be the device's alone"

#: Class -> why its metadata cannot be made in a graph; empty where it can.
BUILDERS: Final = {
    # FlashAttention 2 and 4: the batch's tensors. FlashAttention 3: a kernel's schedule, put into one tensor of the
    # builder's, which is long enough for every graph.
    f"{_BACKENDS}.flash_attn.FlashAttentionMetadataBuilder": _IN_GRAPH,
    # Only refuses what it has no kernel for.
    "vllm_hwplugin.attention.cuda.CudaFlashAttentionMetadataBuilder": _IN_GRAPH,
    # As FLASH_ATTN, where it has no schedules of its own.
    "vllm_hwplugin.musa.attention.MusaFlashAttentionMetadataBuilder": _IN_GRAPH,
    f"{_BACKENDS}.triton_attn.TritonAttentionMetadataBuilder": _IN_GRAPH,
    # All requests are decodes, of which it names the batch's tensors. TRITON_MLA, CUTLASS_MLA and TOKENSPEED_MLA make
    # nothing beside it; FLASHINFER_MLA names them itself from 0.31 on.
    "vllm.model_executor.layers.attention.mla_attention.MLACommonMetadataBuilder": _IN_GRAPH,
    f"{_BACKENDS}.mla.flashinfer_mla.FlashInferMLAMetadataBuilder": _IN_GRAPH,
    # As FLASH_ATTN.
    f"{_BACKENDS}.mla.flashattn_mla.FlashAttnMLAMetadataBuilder": _IN_GRAPH,
    # An empty plan, which the step's first kernel makes; for fp8 a kernel's, put into two tensors of the builder's.
    f"{_BACKENDS}.mla.flashmla.FlashMLAMetadataBuilder": _IN_GRAPH,
    f"{_BACKENDS}.flashinfer.FlashInferMetadataBuilder": _HOST_PLAN,
    f"{_BACKENDS}.flex_attention.FlexAttentionMetadataBuilder": (
        "each build makes its block mask anew, in part from host values and temporary tensors"
    ),
}


def why_not_in_graph(attn_groups: Sequence[Sequence[Any]]) -> str | None:
    """Why the metadata of a draft's one-token steps cannot be made inside a CUDA graph, or None where it can.

    Args:
        attn_groups: a speculator's, for each KV cache group its `AttentionGroup`s, whose builders exist.
    """
    return refusing(group.get_metadata_builder(0) for groups in attn_groups for group in groups)


def refusing(builders: Iterable[Any]) -> str | None:
    """The builders whose metadata cannot be made in a graph, each with its reason, or None."""
    refused: dict[str, str] = {}
    for builder in builders:
        reason = _obstacle(type(builder))
        if not reason and getattr(builder, "dcp_world_size", 1) > 1:
            reason = "decode context parallelism"
        if not reason and getattr(builder, "makes_schedules", False):
            reason = "its schedules are made for the batches that Model Runner V1 shows it"
        if reason:
            refused[type(builder).__name__] = reason
    return "; ".join(f"{name}: {refused[name]}" for name in sorted(refused)) or None


def _obstacle(builder_class: type) -> str:
    return BUILDERS.get(decides(builder_class), _UNKNOWN)


def decides(builder_class: type) -> str:
    """The name in `BUILDERS` of the class that makes this builder's metadata, or no name: then it is not known how."""
    for cls in builder_class.__mro__:
        name = f"{cls.__module__}.{cls.__qualname__}"
        if name in BUILDERS:
            return name
        if makes_metadata(cls):
            break
    return ""


def steps_are_captured(speculator: Any) -> bool:
    """Whether vLLM 0.20's graph of all draft steps may be captured. Without it they run one by one on the host.

    Args:
        speculator: vLLM's `EagleSpeculator`, which has its attention groups.
    """
    # The one step after the first has the metadata that was made for it.
    reason = None if speculator.num_speculative_steps < 3 else why_not_in_graph(speculator.attn_groups)
    if reason is not None:
        journal.note(V2_DRAFT_METADATA, f"draft steps run without a graph: {reason}")
    else:
        journal.note(V2_DRAFT_METADATA, "the graph of all draft steps, where there is one, makes each step's metadata")
    return reason is None


def metadata_of_step(
    speculator: Any, attn_metadata: dict[str, Any] | None, *, step: int, num_reqs: int, num_tokens_padded: int
) -> dict[str, Any] | None:
    """The attention metadata of a draft step; vLLM 0.20 makes that of the first one and leaves it at that.

    Args:
        speculator: vLLM's `EagleSpeculator`, whose buffers hold the step's lengths and slots.
        attn_metadata: the step before's; None in a run without attention.
        step: from 1 on.
        num_reqs: rows of the batch, or of the graph that is being captured.
        num_tokens_padded: tokens of the same.
    """
    if attn_metadata is None:
        return None
    if step == 1:
        # It is new; but vLLM warms up with the metadata that it captures with, and FLASHMLA's first call makes a plan
        # that stays in it.
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing or why_not_in_graph(speculator.attn_groups) is not None:
            return attn_metadata
    made: dict[str, Any] | None = speculator._build_draft_attn_metadata(
        num_reqs=num_reqs, num_reqs_padded=num_reqs, num_tokens_padded=num_tokens_padded, max_query_len=1
    )
    return made
