# SPDX-License-Identifier: Apache-2.0
"""Experts of a model on the simulated device: vLLM leaves their kernels to platforms outside its tree."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Have vLLM run unquantised experts in plain torch, each on all tokens, so that graphs can hold it."""
    from vllm.plugins import load_general_plugins

    # Before anything that they patch is imported.
    load_general_plugins()

    import torch
    from torch.nn.functional import linear, silu
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    @UnquantizedFusedMoEMethod.register_oot
    class Experts(UnquantizedFusedMoEMethod):
        is_monolithic = True

        def apply_monolithic(
            self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, *_: Any, **__: Any
        ) -> torch.Tensor:
            chosen, ids = torch.softmax(router_logits.float(), -1).topk(self.moe.experts_per_token, -1)
            chosen = (chosen / chosen.sum(-1, keepdim=True)).to(x.dtype)
            result = torch.zeros_like(x)
            for number, (gate_up, down) in enumerate(zip(layer.w13_weight, layer.w2_weight, strict=True)):
                gate, up = linear(x, gate_up).chunk(2, -1)
                share = (chosen * (ids == number)).sum(-1, keepdim=True)
                result = result + share * linear(silu(gate) * up, down)
            return result
