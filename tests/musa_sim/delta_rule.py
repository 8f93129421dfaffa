# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of prompts on the simulated device: Triton's interpreter cannot run vLLM's kernels for it.

One operation stands for all of them, so that a graph records one call. It reads what they read of a batch, and computes
a token only where they would: where its chunk is listed, at the place where its sequence's chunks begin.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import normalize

#: Tokens of a chunk.
CHUNK = 64
_SCHEMA = (
    "(Tensor(a!) out, Tensor(b!) final, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor initial, "
    "Tensor starts, Tensor? chunks, Tensor? offsets, float scale) -> ()"
)


def next_state(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the state after one token, and the token's output; shapes begin with the heads of values."""
    state = state * g.exp()[:, None, None]
    error = v - (state @ k[..., None])[..., 0]
    state = state + (beta[:, None] * error)[..., None] * k[:, None]
    return state, (state @ q[..., None])[..., 0]


def by_token(
    out: torch.Tensor,
    final: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial: torch.Tensor,
    starts: torch.Tensor,
    chunks: torch.Tensor | None,
    offsets: torch.Tensor | None,
    scale: float,
) -> None:
    """See arXiv 2412.06464; shapes are those of vLLM's `chunk_gated_delta_rule`, for one batch."""
    queries, keys, values, gates, betas = (one.float() for one in (q, k, v, g, beta))
    groups = values.shape[1] // keys.shape[1]
    queries, keys = queries.repeat_interleave(groups, 1) * scale, keys.repeat_interleave(groups, 1)
    # What no kernel writes.
    out.fill_(float("nan"))
    bounds = starts.tolist()
    if bounds[0] or sorted(bounds) != bounds or bounds[-1] > len(values) or len(bounds) != len(initial) + 1:
        raise RuntimeError(f"prompts begin at {bounds}, of {len(values)} tokens and {len(initial)} states")
    if chunks is not None and offsets is not None:
        check_chunks(bounds, chunks.tolist(), offsets.tolist())
    for number, (start, end) in enumerate(pairwise(bounds)):
        state = initial[number].float()
        for token in range(start, end):
            state, out[token] = next_state(state, *(one[token] for one in (queries, keys, values, gates, betas)))
        final[number] = state


def check_chunks(bounds: list[int], chunks: list[list[int]], offsets: list[int]) -> None:
    """See that each chunk is listed, at the place where one kernel leaves its state for another.

    Raises:
        RuntimeError: a chunk is not there, or is of no prompt.
    """
    lengths = [end - start for start, end in pairwise(bounds)]
    listed = {}
    for place, (number, chunk) in enumerate(chunks):
        if not (0 <= number < len(lengths) and chunk >= 0):
            raise RuntimeError(f"chunk {chunk} of prompt {number}, of {len(lengths)}")
        if chunk * CHUNK < lengths[number]:
            listed[number, chunk] = place
    for number, length in enumerate(lengths):
        for chunk in range(-(-length // CHUNK)):
            if listed.get((number, chunk)) != offsets[number] + chunk:
                raise RuntimeError(f"chunk {chunk} of prompt {number} at {listed.get((number, chunk))}: {offsets}")


def register() -> None:
    """Have vLLM go through prompts token by token, in plain torch."""
    from vllm.plugins import load_general_plugins

    # Before anything that they patch is imported.
    load_general_plugins()

    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn

    if not hasattr(torch.ops.delta_rule_standin, "by_token"):
        library = torch.library.Library("delta_rule_standin", "DEF")
        library.define(f"by_token{_SCHEMA}")
        library.impl("by_token", by_token, "CPU")
        torch.ops.delta_rule_standin.library = library

    def chunked(
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        scale: float | None = None,
        initial_state: Any = None,
        output_final_state: bool = False,
        cu_seqlens: Any = None,
        chunk_indices: Any = None,
        chunk_offsets: Any = None,
        use_qk_l2norm_in_kernel: bool = False,
        core_attn_out: Any = None,
        **_: Any,
    ) -> tuple[Any, Any]:
        if use_qk_l2norm_in_kernel:
            q, k = normalize(q.float(), dim=-1), normalize(k.float(), dim=-1)
        made, final = torch.empty_like(v), torch.empty_like(initial_state, dtype=torch.float32)
        given = (one[0] for one in (made, q, k, v, g, beta))
        torch.ops.delta_rule_standin.by_token(
            next(given), final, *given, initial_state, cu_seqlens, chunk_indices, chunk_offsets,
            scale or k.shape[-1] ** -0.5,
        )  # fmt: skip
        if core_attn_out is not None:
            core_attn_out.view(made.shape).copy_(made)
        return made, final if output_final_state else None

    qwen_gdn_linear_attn.fla_chunk_gated_delta_rule = chunked
