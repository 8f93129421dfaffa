# SPDX-License-Identifier: Apache-2.0
"""Which builders make the attention metadata of a decode batch on the device alone.

Of such a batch, all requests of which have the same number of tokens, only lengths, slots and block tables change from
step to step. A builder that is listed names the batch's tensors, and puts what a kernel schedules into a tensor of its
own; so a graph that holds one build makes the metadata of each later step.
"""

from __future__ import annotations

from typing import Any, Final

from vllm_hwplugin.spec_decode.v2.draft_metadata import decides

#: Those of `draft_metadata.BUILDERS` that make metadata on the device alone for several tokens a request, too.
_BUILDERS: Final = (
    "vllm.v1.attention.backends.flash_attn.FlashAttentionMetadataBuilder",
    "vllm.v1.attention.backends.triton_attn.TritonAttentionMetadataBuilder",
    "vllm_hwplugin.attention.cuda.CudaFlashAttentionMetadataBuilder",
    "vllm_hwplugin.musa.attention.MusaFlashAttentionMetadataBuilder",
)


def host_work(builder: Any) -> str | None:
    """Why a graph cannot make the metadata of a decode batch in place of this builder; None where it can."""
    if decides(type(builder)) not in _BUILDERS or getattr(builder, "makes_schedules", False):
        return f"{type(builder).__name__} may make metadata on the host"
    return None
