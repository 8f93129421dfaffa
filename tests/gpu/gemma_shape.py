# SPDX-License-Identifier: Apache-2.0
"""A small model of gemma-4's shape with a DFlash draft: their config files, and weights made up by the name.

What attention sees is real: five sliding layers to one full layer, which is the last; head sizes 256 and 512; 16 query
heads on 8 KV heads, on 2 in the full layers, which also take their keys for values (gemma-4-26B-A4B's numbers). The
draft has head size 256, and no more layers than the target has full ones: vLLM's hybrid KV cache would deal more out to
two groups, which its V1 drafters refuse. Width, depth and vocabulary are small, and there are no experts. Only the text
model is there, but its config can say of images what the published ones do.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

HIDDEN = 1024
LAYERS = 12
HEADS, SLIDING_KV_HEADS, FULL_KV_HEADS = 16, 8, 2
SLIDING_HEAD_SIZE, FULL_HEAD_SIZE = 256, 512
WINDOW = 512
VOCABULARY = 4096
POSITIONS = 2048
DRAFT_LAYERS = 2
#: Tokens drafted a step.
K = 7
#: The name of :func:`register_weights` among vLLM's load formats.
LOAD_FORMAT = "gemma_shape"

LAYER_TYPES = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(LAYERS)]
#: After how many target layers the draft reads the hidden states.
_READ_AFTER = [2, 6, 9]
#: Spread of the attention scores: as made by random weights they would have one of head size ** 0.5, and a row of
#: attention would be a single key, which a rounding error exchanges for another.
_SCORES = 2.5


def write_configs(folder: Path, *, images: bool) -> tuple[Path, Path]:
    """Write the configs of the target and of its draft; returns their folders.

    Args:
        folder: they are made below it.
        images: the target says that the tokens of an image see each other in both directions. vLLM then asks every
            attention backend for a mask of that kind, for a text too.
    """
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": SLIDING_KV_HEADS,
        "head_dim": SLIDING_HEAD_SIZE,
        "intermediate_size": 2 * HIDDEN,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-06,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "bfloat16",
    }
    target = common | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "num_hidden_layers": LAYERS,
        "layer_types": LAYER_TYPES,
        "sliding_window": WINDOW,
        "global_head_dim": FULL_HEAD_SIZE,
        "num_global_key_value_heads": FULL_KV_HEADS,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": False,
        "use_bidirectional_attention": "vision" if images else None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
    }
    draft = common | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": DRAFT_LAYERS,
        "layer_types": ["full_attention"] * DRAFT_LAYERS,
        "hidden_act": "silu",
        "rope_theta": 1000000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "block_size": 1 + K,
        "num_target_layers": LAYERS,
        "eagle_aux_hidden_state_layer_ids": _READ_AFTER,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [i - 1 for i in _READ_AFTER]},
    }
    folders = folder / "target", folder / "dflash"
    for path, config in zip(folders, (target, draft), strict=True):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return folders


def model_options(folder: Path) -> dict[str, Any]:
    """The arguments of vLLM's ``LLM`` that make it this model; ``folder`` is the target's."""
    return {
        "model": str(folder),
        "load_format": LOAD_FORMAT,
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        **_overrides(),
    }


def speculation(folder: Path) -> dict[str, Any]:
    """The value of ``speculative_config``; ``folder`` is the draft's."""
    return {"method": "dflash", "model": str(folder), "num_speculative_tokens": K}


def _overrides() -> dict[str, Any]:
    """What vLLM has to be told where it and transformers disagree on how a config of this model is read.

    Newer transformers turn ``global_head_dim`` and its like into ``per_layer_config`` and let nobody read ``head_dim``
    of the whole; the vLLM of before reads just that.
    """
    from vllm.model_executor.models import gemma4

    if "global_head_dim" not in Path(gemma4.__file__).read_text(encoding="utf-8"):
        return {}
    return {
        "hf_overrides": {
            "per_layer_config": None,
            "global_head_dim": FULL_HEAD_SIZE,
            "num_global_key_value_heads": FULL_KV_HEADS,
        }
    }


def register_weights() -> None:
    """Make :data:`LOAD_FORMAT` known to this process's vLLM.

    vLLM's own dummy weights are all about 1e-3, the norms' too: hidden states fade from layer to layer until attention
    is the mean of its values, whatever the scores. These keep every layer's output at about one.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class Loader(DummyModelLoader):  # type: ignore[misc]  # vLLM is not there where types are checked
        def load_weights(self, model: Any, model_config: Any) -> None:
            fill(model)
            # What the draft's own load_weights does last. Without it vLLM makes these at first use, of weights that a
            # CPU has repacked by then.
            build = getattr(getattr(model, "model", None), "_build_fused_kv_buffers", None)
            if build is not None:
                build()

    register_model_loader(LOAD_FORMAT)(Loader)


def fill(model: Any) -> None:
    """Give the weights of a ``torch.nn.Module`` values that depend on their names and shapes alone."""
    import torch

    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if not torch.is_floating_point(weight):
                weight.zero_()
            elif name.endswith("layer_scalar"):
                # The residual stream would else be full of the last token itself, and the text of its repetition.
                weight.fill_(0.5)
            elif weight.dim() < 2:
                weight.fill_(1.0)
            else:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                values = torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5
                weight.copy_(values)
        for module in model.modules():
            if hasattr(module, "q_norm") and hasattr(module, "k_norm"):
                size = math.sqrt(_SCORES / (module.scaling * module.head_dim**0.5))
                module.q_norm.weight.fill_(size)
                module.k_norm.weight.fill_(size)
            if getattr(module, "use_k_eq_v", False):
                _, keys, values = module.qkv_proj.weight.split([module.q_size, module.kv_size, module.kv_size])
                values.copy_(keys)
