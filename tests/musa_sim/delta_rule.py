# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule of prompts on the simulated device: Triton's interpreter cannot run vLLM's kernels for it."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Have vLLM go through prompts token by token, in plain torch. No graph holds a prompt of such a layer."""
    from vllm.plugins import load_general_plugins

    # Before anything that they patch is imported.
    load_general_plugins()

    import torch
    from torch.nn.functional import normalize
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn

    def by_token(
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        scale: float | None = None,
        initial_state: Any = None,
        output_final_state: bool = False,
        cu_seqlens: Any = None,
        use_qk_l2norm_in_kernel: bool = False,
        core_attn_out: Any = None,
        **_: Any,
    ) -> tuple[Any, Any]:
        """See arXiv 2412.06464; shapes are those of vLLM's `chunk_gated_delta_rule`."""
        queries, keys, values, gates, betas = (one.float().cpu()[0] for one in (q, k, v, g, beta))
        if use_qk_l2norm_in_kernel:
            queries, keys = normalize(queries, dim=-1), normalize(keys, dim=-1)
        groups = values.shape[1] // keys.shape[1]
        queries = queries.repeat_interleave(groups, 1) * (scale or keys.shape[-1] ** -0.5)
        keys = keys.repeat_interleave(groups, 1)
        states, out = initial_state.float().cpu().clone(), torch.empty_like(values)
        for number, (start, end) in enumerate(torch.stack([cu_seqlens.cpu()[:-1], cu_seqlens.cpu()[1:]], 1).tolist()):
            for token in range(start, end):
                state = states[number] * gates[token].exp()[:, None, None]
                error = values[token] - (state @ keys[token][..., None])[..., 0]
                state = state + (betas[token][:, None] * error)[..., None] * keys[token][:, None]
                out[token] = (state @ queries[token][..., None])[..., 0]
                states[number] = state
        made = out[None].to(v)
        if core_attn_out is not None:
            core_attn_out.view(made.shape).copy_(made)
        return made, states.to(initial_state) if output_final_state else None

    qwen_gdn_linear_attn.fla_chunk_gated_delta_rule = by_token
