# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other kinds, made of the small trained target, so that a wrong weight is seen in the texts.

Each has a twin that a CPU serves without any kernel for its kind: the same numbers, in bfloat16. Those of `by_chance`
have what transformers computes in float32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from . import simulated
from .loads import Request

TARGET = simulated.HERE.parent / "assets" / "small" / "target"
EXPERTS, CHOSEN, BLOCK, GROUP = 8, 2, 128, 128

Weights = dict[str, torch.Tensor]


def write(folder: Path, weights: Weights, **config: Any) -> Path:
    folder.mkdir(parents=True)
    save_file({name: one.contiguous() for name, one in weights.items()}, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text((TARGET / name).read_text())
    (folder / "config.json").write_text(json.dumps({**json.loads((TARGET / "config.json").read_text()), **config}))
    return folder


def dense() -> Weights:
    return load_file(TARGET / "model.safetensors")


#: Of a model with the weights of `mixture`.
MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def mixture() -> Weights:
    """Each expert is the dense layer without a quarter of its units, not the same for all; its router is chance."""
    generator = torch.Generator().manual_seed(0)
    made: Weights = {}
    for name, weight in dense().items():
        layer, is_mlp, kind = name.partition(".mlp.")
        if not is_mlp:
            made[name] = weight
            continue
        made[f"{layer}.mlp.gate.weight"] = torch.randn(EXPERTS, 256, generator=generator).bfloat16()
        for expert in range(EXPERTS):
            units = torch.rand(512, generator=torch.Generator().manual_seed(expert)) > 0.25
            kept = units.bfloat16() * (4 / 3 if kind.startswith("down") else 1)
            made[f"{layer}.mlp.experts.{expert}.{kind}"] = weight * (kept if kind.startswith("down") else kept[:, None])
    return made


FP8_BLOCKS: dict[str, Any] = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [f"model.layers.{layer}.mlp.gate" for layer in range(4)],
    }
}


def fp8_blocks(weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
    """A linear layer's parameters in float8_e4m3fn, with a scale for each block; and what they stand for, in float32.

    Args:
        weight: (outputs, inputs), as below.
    """
    (outputs, inputs), (rows, columns) = weight.shape, (-(-size // BLOCK) for size in weight.shape)
    whole = torch.nn.functional.pad(weight.float(), (0, columns * BLOCK - inputs, 0, rows * BLOCK - outputs))
    blocks = whole.view(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    small = (blocks / scale).to(torch.float8_e4m3fn)
    made = {"weight": small.view(whole.shape)[:outputs, :inputs], "weight_scale_inv": scale.view(rows, columns)}
    return made, (small.float() * scale).view(whole.shape)[:outputs, :inputs]


def four_bits(weight: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Weights, torch.Tensor]:
    """The same in integers of -8 to 7, eight of a row in an int32, with a scale of ``dtype`` for each group."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // GROUP, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).to(dtype).float()
    numbers = (groups / scale).round().clamp(-8, 7)
    made = {
        "weight_packed": _packed(numbers.view(rows, columns) + 8),
        "weight_scale": scale.view(rows, -1).to(dtype),
        "weight_shape": torch.tensor([rows, columns]),
    }
    return made, (numbers * scale).view(rows, columns)


def quantized(weights: Weights, by: Callable[[torch.Tensor], tuple[Weights, torch.Tensor]]) -> tuple[Weights, Weights]:
    """A checkpoint whose linear layers are quantized by one of the two above, and its twin."""
    made, twin = dict(weights), dict(weights)
    for name in weights:
        # The layer that joins states and embeddings of an MTP drafter is never quantized.
        if re.search(r"(?<!eh)_proj(_with_mqa)?\.weight$", name):
            parameters, stands_for = by(made.pop(name))
            made |= {name.removesuffix("weight") + one: tensor for one, tensor in parameters.items()}
            twin[name] = stands_for.to(weights[name].dtype)
    return made, twin


W4A16: dict[str, Any] = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
            }
        },
    }
}

GPTQ: dict[str, Any] = {
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
}


def _packed(numbers: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Eight integers of 4 bits in an int32, along the last dimension."""
    rows = numbers.view(*numbers.shape[:-1], -1, 8)[..., list(order)].long()
    packed = (rows << (torch.arange(8) * 4)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def gptq(weight: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Weights, torch.Tensor]:
    """As `four_bits` in GPTQ's layout: eight inputs in an int32, and zero points that say one less."""
    made, stands_for = four_bits(weight, dtype)
    groups, outputs = weight.shape[1] // GROUP, weight.shape[0]
    return {
        "qweight": made["weight_packed"].t(),
        "scales": made["weight_scale"].t(),
        "qzeros": _packed(torch.full((groups, outputs), 7)),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }, stands_for


AWQ: dict[str, Any] = {
    "quantization_config": {"quant_method": "awq", "w_bit": 4, "q_group_size": GROUP, "zero_point": True}
}


def awq(weight: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Weights, torch.Tensor]:
    """The same in integers of 0 to 15 with a zero point for each group; eight outputs in an int32, in AWQ's order."""
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, inputs // GROUP, GROUP)
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((most - least) / 15).to(dtype).float()
    zeros = (-least / scale).round().clamp(0, 15)
    numbers = ((groups / scale).round() + zeros).clamp(0, 15)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": _packed(numbers.view(outputs, inputs).t().contiguous(), order),
        "scales": scale.view(outputs, -1).t().to(dtype),
        "qzeros": _packed(zeros.view(outputs, -1).t().contiguous(), order),
    }, ((numbers - zeros) * scale).view(outputs, inputs)


#: A small DeepSeek V3, whose second layer has experts.
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float16",
}


def by_chance(folder: Path, config: Mapping[str, Any], layer: int, drafter: str, drafts: Weights) -> Path:
    """A model of a class of transformers', with weights so large that what a token attends to counts.

    Args:
        folder: is made, or has the model's ``config.json``.
        config: what is written there.
        layer: of the model; the one that drafts has its weights.
        drafter: how the names of the layer that drafts begin.
        drafts: weights that only a drafter has.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(
                weight, std=1 if "embed" in name else 0.5 if "conv" in name else weight.shape[-1] ** -0.5
            )
    dtype = getattr(torch, config.get("torch_dtype", "float16"))
    model.to(dtype).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    head = f"model.layers.{layer}."
    weights |= {name.replace(head, drafter): one.clone() for name, one in weights.items() if name.startswith(head)}
    weights |= {name: one.to(dtype) for name, one in drafts.items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def in_float32(model: Path, asked: Sequence[Request]) -> list[list[int]]:
    """The texts that transformers computes, with the most probable tokens."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    texts = []
    for request in asked:
        tokens = list(request.prompt)
        for _ in range(request.params["max_tokens"]):
            with torch.no_grad():
                tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        texts.append(tokens[len(request.prompt) :])
    return texts


def ranks_in_float32(model: Path, asked: Sequence[Request], texts: Sequence[Sequence[int]]) -> list[int]:
    """How many tokens transformers finds more probable than each token of the texts, after those before it."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ranks: list[int] = []
    for request, text in zip(asked, texts, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([[*request.prompt, *text]])).logits[0, len(request.prompt) - 1 : -1]
        ranks += [int((row > row[token]).sum()) for row, token in zip(logits, text, strict=True)]
    return ranks
