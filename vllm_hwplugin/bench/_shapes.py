# SPDX-License-Identifier: Apache-2.0
"""Model shapes for dummy weights: only config files are written, vLLM fills the weights itself (load_format=dummy)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Vocabulary of the Eagle3 drafter, as published drafters for Qwen3 have it.
DRAFT_VOCABULARY = 32000
_POSITIONS = 4096
_DFLASH_LAYERS = 5


@dataclass(frozen=True)
class Shape:
    """The sizes of one of Qwen3's dense models, from its published config.json."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    tied: bool
    head_dim: int = 128
    vocabulary: int = 151936


SHAPES = {
    "0.6b": Shape(layers=28, hidden=1024, heads=16, kv_heads=8, intermediate=3072, tied=True),
    "8b": Shape(layers=36, hidden=4096, heads=32, kv_heads=8, intermediate=12288, tied=False),
}


def write_configs(shape: Shape, folder: Path, method: str, block: int) -> tuple[Path, Path]:
    """Write the config of a target and of its drafter; returns their folders.

    Args:
        shape: the target; the drafter has its layer sizes.
        folder: where to write.
        method: ``eagle3`` (one layer) or ``dflash`` (five layers).
        block: the number of positions DFlash was trained on, 1 + the drafted tokens.
    """
    target, drafter = folder / "target", folder / method
    _write(target, _common(shape, shape.layers) | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})
    after = [2, shape.layers // 2, shape.layers - 3]
    if method == "eagle3":
        config = _common(shape, 1) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "draft_vocab_size": DRAFT_VOCABULARY,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "eagle_aux_hidden_state_layer_ids": after,
        }
    else:
        config = _common(shape, _DFLASH_LAYERS) | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": block,
            "num_target_layers": shape.layers,
            "layer_types": ["full_attention"] * _DFLASH_LAYERS,
            "eagle_aux_hidden_state_layer_ids": after,
            "dflash_config": {"mask_token_id": 0, "target_layer_ids": [i - 1 for i in after]},
        }
    _write(drafter, config | {"tie_word_embeddings": False})
    return target, drafter


def bytes_per_token(shape: Shape, method: str) -> int:
    """Of keys and values in bfloat16, the drafter's layers included."""
    layers = shape.layers + (1 if method == "eagle3" else _DFLASH_LAYERS)
    return layers * 2 * shape.kv_heads * shape.head_dim * 2


def _common(shape: Shape, layers: int) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "hidden_act": "silu",
        "max_position_embeddings": _POSITIONS,
        "rms_norm_eps": 1e-06,
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_theta": 1000000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": shape.tied,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": layers,
        "bos_token_id": None,
        "eos_token_id": 0,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def _write(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
