# SPDX-License-Identifier: Apache-2.0
"""MLA prefill on Moore Threads GPUs, over ``mate.flash_attn_varlen_func``. Not run on MUSA hardware."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from ._mate import checked

_attend = checked(
    "MLA",
    "flash_attn_varlen_func",
    (
        "q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal",
        "return_softmax_lse", "backend",
    ),
)  # fmt: skip

# Head sizes of mate (0.2.2): queries, keys and values of one size, or this pair (keys, values).
_LARGEST_HEAD, _UNEQUAL = 512, (192, 128)
# A log-sum-exp with no weight next to any other.
_NO_KEYS = -1e30

# mate's kernels for a context. Before vLLM 0.28 each context chunk holds all requests, some without keys. The kernels
# built from source write 0 and -inf for these; what mate's other kernels write is not known.
_OF_CONTEXTS = (
    "mutlass" if "chunk_idx" in inspect.signature(MLAPrefillBackend.run_prefill_context_chunk).parameters else "auto"
)


class MusaMLAPrefillBackend(MLAPrefillBackend):  # type: ignore[misc]  # vLLM is not there where types are checked
    """MLA prefill over mate, which replaces vLLM's FLASH_ATTN; raises ValueError for head sizes without kernels."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM does not ask before 0.32; later only if the user names a backend.
        if not self.supports_mla_dimensions(self):
            sizes = (self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim)
            raise ValueError(
                f"MLA on MUSA: head sizes of queries and values are {sizes}, expected {_UNEQUAL} or equal sizes up to "
                f"{_LARGEST_HEAD}: mate has no other kernels, so this model cannot be served"
            )

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: Any) -> bool:
        keys, values = mla_dimensions.qk_nope_head_dim + mla_dimensions.qk_rope_head_dim, mla_dimensions.v_head_dim
        return (keys == values and keys <= _LARGEST_HEAD) or (keys, values) == _UNEQUAL

    def supports_out(self) -> bool:
        return True

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute causal attention of new tokens over themselves.

        `q` and `k` are (tokens, heads, key size), `v` and the result (tokens, heads, value size), the log-sum-exp
        (heads, tokens) in float32. The output is not quantized.
        """
        metadata = self._prefill_metadata
        starts, longest = metadata.query_start_loc, metadata.max_query_len
        result = self._run((q, k, v), (starts, starts), (longest, longest), True, "auto", out)
        return result if return_softmax_lse else result[0]

    def run_prefill_context_chunk(
        self,
        chunk: Any = None,
        *,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
        chunk_idx: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention over a chunk of the context; shapes as above.

        vLLM gives `chunk_idx` before 0.28, and later the `chunk` and its requests.
        """
        if chunk_idx is None:
            starts, longest = (chunk.query_start_loc, chunk.cu_seq_lens), (chunk.max_query_len, chunk.max_seq_len)
            return self._run((q, k, v), starts, longest, False, _OF_CONTEXTS, out)
        now, context = self._prefill_metadata, self._prefill_metadata.chunked_context
        starts = (now.query_start_loc, context.cu_seq_lens[chunk_idx])
        result, lse = self._run(
            (q, k, v), starts, (now.max_query_len, context.max_seq_lens[chunk_idx]), False, _OF_CONTEXTS, out
        )
        # Up to 0.25 vLLM's merge kernel returns NaN if both parts have no keys.
        return result, lse.clamp_(min=_NO_KEYS)

    def _run(
        self, qkv: Any, starts: Any, longest: Any, causal: bool, backend: str, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result: tuple[torch.Tensor, torch.Tensor] = _attend(
            q=qkv[0], k=qkv[1], v=qkv[2], out=out, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1],
            max_seqlen_q=longest[0], max_seqlen_k=longest[1], softmax_scale=self.scale, causal=causal,
            return_softmax_lse=True, backend=backend,
        )  # fmt: skip
        return result
