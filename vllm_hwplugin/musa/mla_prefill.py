# SPDX-License-Identifier: Apache-2.0
"""Prompts of models with MLA on Moore Threads GPUs, over ``mate.flash_attn_varlen_func``. Not run on MUSA hardware.

vLLM computes them with the heads that the latents stand for, whichever backend decodes.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend

from ._mate import checked
from ._mate_warmup import query_lengths

_attend = checked(
    "MLA",
    "flash_attn_varlen_func",
    (
        "q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal",
        "return_softmax_lse", "backend",
    ),
)  # fmt: skip

# Of queries and keys, mate (0.2.2); those of values are as large, or these two.
_LARGEST_HEAD, _UNEQUAL = 512, (192, 128)
# A log-sum-exp next to which any other counts alone.
_NO_KEYS = -1e30

# Which of mate's kernels attend to a context. Before 0.28 all requests are in each part of it, some without a key. The
# kernels that are built from source write 0 and -inf there; what the others do is not known.
_OF_CONTEXTS = (
    "mutlass" if "chunk_idx" in inspect.signature(MLAPrefillBackend.run_prefill_context_chunk).parameters else "auto"
)


class MusaMLAPrefillBackend(MLAPrefillBackend):  # type: ignore[misc]  # vLLM is not there where types are checked
    """In place of vLLM's FLASH_ATTN among these backends.

    Raises:
        ValueError: the heads are of sizes that mate has no kernels for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Nothing else asks before 0.32, and from there on only where the user names a backend.
        if not self.supports_mla_dimensions(self):
            sizes = (self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim)
            raise ValueError(
                f"MLA on MUSA: heads of queries and values have {sizes} elements, expected {_UNEQUAL} or equal ones of "
                f"up to {_LARGEST_HEAD}, as mate has kernels for; this model cannot be served"
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
        """Attention of new tokens over themselves.

        Args:
            q: (tokens, heads, size of a key), of all requests of the prepared metadata.
            k: q's shape.
            v: (tokens, heads, size of a value).
            return_softmax_lse: whether the log-sum-exp is wanted as well: (heads, tokens), float32.
            out: v's shape, contiguous, for the result; None for a new tensor.
            output_scale: None: no output is quantized.
        """
        now = self._prefill_metadata
        starts, longest = now.query_start_loc, now.max_query_len
        found = self._run((q, k, v), (starts, starts), (longest, longest), True, "auto", out)
        return found if return_softmax_lse else found[0]

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
        """Attention of new tokens over a part of what came before them.

        Args:
            chunk: which part, and whose tokens; vLLM has such chunks from 0.28 on.
            q: (tokens, heads, size of a key).
            k: (keys of the part, heads, size of a key).
            v: (keys of the part, heads, size of a value).
            out: (tokens, heads, size of a value), contiguous, for the result; None for a new tensor.
            chunk_idx: which part, before 0.28.

        Returns:
            What ``out`` is, and the log-sum-exp: (heads, tokens), float32.
        """
        if chunk_idx is None:
            starts, longest = (chunk.query_start_loc, chunk.cu_seq_lens), (chunk.max_query_len, chunk.max_seq_len)
            return self._run((q, k, v), starts, longest, False, _OF_CONTEXTS, out)
        now, context = self._prefill_metadata, self._prefill_metadata.chunked_context
        starts = (now.query_start_loc, context.cu_seq_lens[chunk_idx])
        found, lse = self._run(
            (q, k, v), starts, (now.max_query_len, context.max_seq_lens[chunk_idx]), False, _OF_CONTEXTS, out
        )
        # Up to 0.25 vLLM's kernel makes NaN of two parts that have no keys.
        return found, lse.clamp_(min=_NO_KEYS)

    def warm_up(self, longest: int, dtype: torch.dtype, device: torch.device) -> int:
        """Call mate once for each kernel that prompts need, so that all are compiled, and return how many calls it was.

        Args:
            longest: prompt that comes in one step.
            dtype: of queries, keys and values.
            device: where.
        """
        # All longer ones have the same kernel.
        lengths = query_lengths(min(longest, 288))
        for length in lengths:
            keys = torch.zeros(
                length, self.num_heads, self.qk_nope_head_dim + self.qk_rope_head_dim, dtype=dtype, device=device
            )
            values, starts = keys.new_zeros(length, self.num_heads, self.v_head_dim), torch.tensor([0, length])
            where = starts.int().to(device)
            for causal, backend in ((True, "auto"), (False, _OF_CONTEXTS)):
                self._run((keys, keys, values), (where, where), (length, length), causal, backend)
        return 2 * len(lengths)

    def _run(
        self, qkv: Any, starts: Any, longest: Any, causal: bool, backend: str, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = _attend(
            q=qkv[0], k=qkv[1], v=qkv[2], out=out, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1],
            max_seqlen_q=longest[0], max_seqlen_k=longest[1], softmax_scale=self.scale, causal=causal,
            return_softmax_lse=True, backend=backend,
        )  # fmt: skip
        return found
