# SPDX-License-Identifier: Apache-2.0
"""Model shapes for dummy weights: config files for vLLM's load_format=dummy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from packaging.version import Version

#: Instead of a method: no speculation.
NO_DRAFTS: Final = "none"
#: The methods that some shape has a drafter for, and `NO_DRAFTS`.
METHODS: Final = ("eagle", "eagle3", "dflash", "dspark", "mtp", "draft_model", NO_DRAFTS)
#: Vocabulary of the Eagle3 drafter, as in published drafters for Qwen3.
DRAFT_VOCABULARY = 32000
_POSITIONS = 4096
_DFLASH_LAYERS = 5
#: The shape of the method `draft_model`; it has the vocabulary of every Qwen3.
DRAFT_MODEL: Final = "0.6b"
#: Bytes of a bfloat16.
_ELEMENT = 2
#: The first supported vLLM.
_ALWAYS: Final = Version("0.20.0")
#: The drafters of a Qwen3 without images, and the first vLLM that has each.
_QWEN3_DRAFTERS: Final = {**dict.fromkeys(("eagle", "eagle3", "dflash"), _ALWAYS), "dspark": Version("0.25.0")}
#: The first vLLM whose Model Runner V2 runs hybrids (`_get_v2_model_runner_unsupported_features` of its config).
_HYBRIDS_ON_V2: Final = Version("0.23.0")


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    """Return the configuration for both generations of Transformers."""
    return {**more, "rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


@dataclass(frozen=True)
class Recurrent:
    """The layers of a hybrid with a state instead of keys and values (gated delta net): three of four.

    Attributes:
        state_element: Bytes of an element of the recurrent state.
    """

    key_heads: int = 16
    value_heads: int = 32
    head_dim: int = 128
    kernel: int = 4
    state_element: int = _ELEMENT

    def state_bytes(self, k: int) -> int:
        """Return a layer's bytes for a token, with `k` drafts."""
        channels = (2 * self.key_heads + self.value_heads) * self.head_dim
        carried = self.value_heads * self.head_dim * self.head_dim * self.state_element
        return carried + channels * (self.kernel - 1 + k) * _ELEMENT

    def config(self) -> dict[str, Any]:
        return {
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": self.kernel,
            "linear_num_key_heads": self.key_heads,
            "linear_key_head_dim": self.head_dim,
            "linear_num_value_heads": self.value_heads,
            "linear_value_head_dim": self.head_dim,
        }


@dataclass(frozen=True)
class Images:
    """The image encoder of a model, and the processors of its images.

    Attributes:
        config: The config's keys next to `text_config`.
        processors: Name of a file -> its keys.
        tokens: The tokenizer's tokens that stand for images -> their numbers.
    """

    config: Mapping[str, Any]
    processors: Mapping[str, Mapping[str, Any]]
    tokens: Mapping[str, int]


@dataclass(frozen=True)
class Shape:
    """The sizes of a model from its published config.json; a name with `-4l` means only 4 of its layers.

    Attributes:
        title: Name for readers.
        intermediate: Size of dense layers, in the drafter too.
        model: `model_type` and `architectures`.
        rope: The config's keys for rotary embeddings.
        more: The config's other keys.
        methods: Methods with a drafter -> the first vLLM that runs the model and the method. With `mtp` the drafter is
            one more layer of the model, unless it has an assistant.
        assistant: The config of a drafter that reads the target's keys and values.
        draft_heads: The drafter's heads, KV heads and head size; None: as the model's.
        kv_bytes: Bytes of a token in a layer with attention; None: keys and values of all KV heads.
        recurrent: The other layers of a hybrid.
        images: None: the model only takes text.
        tensor_parallel_size: GPUs of an engine.
    """

    title: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    tied: bool = False
    head_dim: int = 128
    vocabulary: int = 151936
    model: tuple[str, str] = ("qwen3", "Qwen3ForCausalLM")
    rope: Mapping[str, Any] = field(default_factory=lambda: _rope(1000000.0))
    more: Mapping[str, Any] = field(default_factory=dict)
    methods: Mapping[str, Version] = field(default_factory=lambda: _QWEN3_DRAFTERS)
    assistant: Mapping[str, Any] | None = None
    draft_heads: tuple[int, int, int] | None = None
    kv_bytes: int | None = None
    recurrent: Recurrent | None = None
    images: Images | None = None
    tensor_parallel_size: int = 1


#: As in Qwen3's and DeepSeek's FP8 checkpoints.
_FP8: Final = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
}

#: Shared by Gemma 4 and its assistant.
_GEMMA4_TEXT: Final = {
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": None,
    "use_double_wide_mlp": False,
}

#: Shared by the processors of Qwen3-VL's images and videos.
_QWEN3_VL_PATCHES: Final = {
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}

SHAPES: Final[Mapping[str, Shape]] = {
    "0.6b": Shape("Qwen3-0.6B", layers=28, hidden=1024, heads=16, kv_heads=8, intermediate=3072, tied=True),
    "1.7b": Shape("Qwen3-1.7B", layers=28, hidden=2048, heads=16, kv_heads=8, intermediate=6144, tied=True),
    "4b": Shape("Qwen3-4B", layers=36, hidden=2560, heads=32, kv_heads=8, intermediate=9728, tied=True),
    "8b": Shape(
        "Qwen3-8B",
        layers=36,
        hidden=4096,
        heads=32,
        kv_heads=8,
        intermediate=12288,
        methods={**_QWEN3_DRAFTERS, "draft_model": _ALWAYS},
    ),
    "8b-fp8-tp2": Shape(
        "Qwen3-8B-FP8 on two GPUs",
        layers=36,
        hidden=4096,
        heads=32,
        kv_heads=8,
        intermediate=12288,
        more=_FP8,
        tensor_parallel_size=2,
    ),
    "30b-a3b": Shape(
        "Qwen3-30B-A3B",
        layers=48,
        hidden=2048,
        heads=32,
        kv_heads=4,
        intermediate=6144,
        model=("qwen3_moe", "Qwen3MoeForCausalLM"),
        more={
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        },
    ),
    "qwen3-next-4l": Shape(
        "4 layers of Qwen3-Next-80B-A3B",
        layers=4,
        hidden=2048,
        heads=16,
        kv_heads=2,
        head_dim=256,
        intermediate=5120,
        model=("qwen3_next", "Qwen3NextForCausalLM"),
        rope=_rope(10000000.0, partial_rotary_factor=0.25),
        more={
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 512,
        },
        methods={"mtp": _ALWAYS},
        recurrent=Recurrent(),
    ),
    # Only for text: without its image encoder, and with one-dimensional positions. vLLM has such a model from 0.27 on.
    "qwen3.5-4b": Shape(
        "Qwen3.5-4B",
        layers=32,
        hidden=2560,
        heads=16,
        kv_heads=4,
        head_dim=256,
        intermediate=9216,
        tied=True,
        vocabulary=248320,
        model=("qwen3_5_text", "Qwen3_5ForCausalLM"),
        rope=_rope(10000000.0, partial_rotary_factor=0.25),
        more={"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1},
        methods={"dflash": Version("0.27.0"), "mtp": Version("0.28.0")},
        draft_heads=(32, 8, 128),
        recurrent=Recurrent(state_element=4),
    ),
    # As above. Two of its vLLM servers fit a GPU of 141 GB.
    "qwen3.6-27b-fp8": Shape(
        "Qwen3.6-27B-FP8",
        layers=64,
        hidden=5120,
        heads=24,
        kv_heads=4,
        head_dim=256,
        intermediate=17408,
        vocabulary=248320,
        model=("qwen3_5_text", "Qwen3_5ForCausalLM"),
        rope=_rope(10000000.0, partial_rotary_factor=0.25),
        more={**_FP8, "attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1},
        methods={"mtp": Version("0.28.0")},
        recurrent=Recurrent(value_heads=48, state_element=4),
    ),
    "qwen3-vl-4b": Shape(
        "Qwen3-VL-4B",
        layers=36,
        hidden=2560,
        heads=32,
        kv_heads=8,
        intermediate=9728,
        tied=True,
        model=("qwen3_vl", "Qwen3VLForConditionalGeneration"),
        rope=_rope(5000000.0, mrope_interleaved=True, mrope_section=[24, 20, 20]),
        more={"max_position_embeddings": 262144},
        # Older ones were not tried.
        methods={"eagle3": Version("0.26.0")},
        images=Images(
            config={
                "image_token_id": 151655,
                "video_token_id": 151656,
                "vision_start_token_id": 151652,
                "vision_end_token_id": 151653,
                "vision_config": {
                    "model_type": "qwen3_vl",
                    "deepstack_visual_indexes": [5, 11, 17],
                    "depth": 24,
                    "hidden_act": "gelu_pytorch_tanh",
                    "hidden_size": 1024,
                    "in_channels": 3,
                    "initializer_range": 0.02,
                    "intermediate_size": 4096,
                    "num_heads": 16,
                    "num_position_embeddings": 2304,
                    "out_hidden_size": 2560,
                    "patch_size": 16,
                    "spatial_merge_size": 2,
                    "temporal_patch_size": 2,
                },
            },
            processors={
                "preprocessor_config.json": {
                    **_QWEN3_VL_PATCHES,
                    "image_processor_type": "Qwen2VLImageProcessorFast",
                    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
                },
                "video_preprocessor_config.json": {
                    **_QWEN3_VL_PATCHES,
                    "video_processor_type": "Qwen3VLVideoProcessor",
                    "size": {"longest_edge": 25165824, "shortest_edge": 4096},
                },
            },
            tokens={
                "<|vision_start|>": 151652,
                "<|vision_end|>": 151653,
                "<|vision_pad|>": 151654,
                "<|image_pad|>": 151655,
                "<|video_pad|>": 151656,
            },
        ),
    ),
    # DeepSeek-V3: three dense layers, and one with experts.
    "deepseek-v3-4l": Shape(
        "4 layers of DeepSeek-V3",
        layers=4,
        hidden=7168,
        heads=128,
        kv_heads=128,
        intermediate=18432,
        vocabulary=129280,
        model=("deepseek_v3", "DeepseekV3ForCausalLM"),
        rope={
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
        more={
            **_FP8,
            "ep_size": 1,
            "first_k_dense_replace": 3,
            "kv_lora_rank": 512,
            "moe_intermediate_size": 2048,
            "moe_layer_freq": 1,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_group": 4,
            "topk_method": "noaux_tc",
            "v_head_dim": 128,
            "max_position_embeddings": 163840,
        },
        methods={"mtp": _ALWAYS},
        kv_bytes=(512 + 64) * _ELEMENT,
    ),
    "gpt-oss-20b": Shape(
        "gpt-oss-20b",
        layers=24,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        intermediate=2880,
        vocabulary=201088,
        model=("gpt_oss", "GptOssForCausalLM"),
        rope={
            "rope_theta": 150000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
        },
        more={
            "quantization_config": {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
            },
            "attention_bias": True,
            "experts_per_token": 4,
            "initial_context_length": 4096,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "num_experts_per_tok": 4,
            "num_local_experts": 32,
            "output_router_logits": False,
            "rms_norm_eps": 1e-05,
            "max_position_embeddings": 131072,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
        },
        methods={"eagle3": _ALWAYS},
    ),
    # Only for text: without its image and audio encoders. The last 18 layers read other layers' keys and values.
    "gemma-4-e4b": Shape(
        "Gemma-4-E4B",
        layers=42,
        hidden=2560,
        heads=8,
        kv_heads=2,
        head_dim=256,
        intermediate=10240,
        tied=True,
        vocabulary=262144,
        model=("gemma4_text", "Gemma4ForCausalLM"),
        rope={},
        more={
            **_GEMMA4_TEXT,
            "final_logit_softcapping": 30.0,
            "hidden_size_per_layer_input": 256,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
            "num_kv_shared_layers": 18,
            "vocab_size_per_layer_input": 262144,
        },
        # On Model Runner V2; on V1 from 0.21 on.
        methods={"mtp": Version("0.23.0")},
        assistant={
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": "gemma4_assistant",
            "backbone_hidden_size": 2560,
            "centroid_intermediate_top_k": 32,
            "dtype": "bfloat16",
            "num_centroids": 2048,
            "tie_word_embeddings": True,
            "use_ordered_embeddings": True,
            "text_config": {
                **_GEMMA4_TEXT,
                "model_type": "gemma4_text",
                "dtype": "bfloat16",
                "final_logit_softcapping": None,
                "head_dim": 256,
                "hidden_size": 256,
                "hidden_size_per_layer_input": 0,
                "intermediate_size": 2048,
                "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
                "num_attention_heads": 4,
                "num_hidden_layers": 4,
                "num_key_value_heads": 2,
                "num_kv_shared_layers": 4,
                "rms_norm_eps": 1e-06,
                "vocab_size": 262144,
                "vocab_size_per_layer_input": 0,
            },
        },
    ),
}


def why_not(name: str, method: str, vllm: Version, *, on_v2: bool) -> str | None:
    """Return why this vLLM cannot run a shape with a drafter.

    None: it can.

    Args:
        name: A key of `SHAPES`.
        method: A method of vLLM's speculative config, or `NO_DRAFTS`.
        on_v2: Also on Model Runner V2.
    """
    shape = SHAPES[name]
    # Drafters may need a newer vLLM than the model.
    since = min(shape.methods.values()) if method == NO_DRAFTS else shape.methods.get(method)
    if since is None:
        return f"--shape {name} has no drafter for {method}; it has one for {', '.join(shape.methods)}"
    if vllm.release < since.release:
        return f"--shape {name} with {method} needs vLLM {since} or later, found {vllm}"
    if on_v2 and shape.recurrent is not None and vllm.release < _HYBRIDS_ON_V2.release:
        return (
            f"--shape {name} is a hybrid, which needs vLLM {_HYBRIDS_ON_V2} or later on Model Runner V2, found {vllm}"
        )
    return None


def write_configs(shape: Shape, folder: Path, method: str, block: int) -> tuple[Path, Path | None]:
    """Write the configurations of a target and its drafter; return their folders.

    None: the drafter has no folder. A target that takes images gets its processors and its tokenizer too.

    Args:
        shape: The target. The drafter has its layer sizes, except with `draft_model`.
        method: `eagle` and `eagle3` (one layer), `dflash` and `dspark` (five layers), `draft_model` (Qwen3-0.6B),
            `mtp` or `NO_DRAFTS`.
        block: Positions that DFlash was trained on: 1 + the drafted tokens.
    """
    target = folder / "target"
    _write(target, _target(shape))
    if shape.images is not None:
        for name, keys in shape.images.processors.items():
            _write(target, dict(keys), name)
        write_tokenizer(target, shape.vocabulary, shape.images.tokens)
    drafter = folder / method
    if method == "mtp" and shape.assistant is not None:
        _write(drafter, dict(shape.assistant))
        return target, drafter
    if method in ("mtp", NO_DRAFTS):
        return target, None
    if method == "draft_model":
        _write(drafter, _target(SHAPES[DRAFT_MODEL]))
        return target, drafter
    last = shape.layers - 1
    after = [2, shape.layers // 2, last - 2] if shape.layers > 6 else [last - 2, last - 1, last]
    if method in ("eagle", "eagle3"):
        config = _drafter(shape, 1) | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "mlp_bias": False,
            "pretraining_tp": 1,
        }
        if method == "eagle3":
            config |= {
                "architectures": ["LlamaForCausalLMEagle3"],
                "draft_vocab_size": min(DRAFT_VOCABULARY, shape.vocabulary),
                "eagle_aux_hidden_state_layer_ids": after,
            }
    else:
        config = _drafter(shape, _DFLASH_LAYERS) | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": block,
            "num_target_layers": shape.layers,
            "layer_types": ["full_attention"] * _DFLASH_LAYERS,
            "eagle_aux_hidden_state_layer_ids": after,
            "dflash_config": {"mask_token_id": 0, "target_layer_ids": [i - 1 for i in after]},
        }
    if method == "dspark":
        # Its head's rank is made up.
        config |= {"architectures": ["Qwen3DSparkModel"], "block_size": block - 1, "markov_rank": 256}
    _write(drafter, config)
    return target, drafter


def write_tokenizer(folder: Path, vocabulary: int, special: Mapping[str, int] = MappingProxyType({})) -> None:
    """Give a shape's target a tokenizer with a word per token.

    A text then has its tokens again. An existing tokenizer stays.

    Args:
        special: Tokens that random prompts leave out -> their numbers.
    """
    if (folder / "tokenizer_config.json").exists():
        return
    names = {number: token for token, number in special.items()}
    words = {names.get(number, f"t{number}"): number for number in range(vocabulary)}
    kind = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    whole = {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": token, **kind} for number, token in sorted(names.items())],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    kinds = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": list(special),
    }
    (folder / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    # Written last: if it exists, the other file is complete.
    (folder / "tokenizer_config.json").write_text(json.dumps(kinds), encoding="utf-8")


def cache_bytes(shape: Shape, method: str, k: int, requests: int, length: int) -> int:
    """Return the bytes of a cache for requests of a length.

    In bfloat16, with the drafter's layers.

    Args:
        k: Drafted tokens per step.
        length: Tokens of each request.
    """
    draft = SHAPES[DRAFT_MODEL] if method == "draft_model" else shape
    of_mtp = 1 if shape.assistant is None else 0
    in_blocks = dict.fromkeys(("dflash", "dspark"), _DFLASH_LAYERS)
    drafting = (in_blocks | {"draft_model": draft.layers, "mtp": of_mtp, NO_DRAFTS: 0}).get(method, 1)
    _, kv_heads, head_dim = draft.draft_heads or (0, draft.kv_heads, draft.head_dim)
    token = shape.kv_bytes or 2 * shape.kv_heads * shape.head_dim * _ELEMENT
    of_draft = token if method == "mtp" else 2 * kv_heads * head_dim * _ELEMENT
    if shape.recurrent is None:
        return requests * length * (shape.layers * token + drafting * of_draft)
    attending = shape.layers // 4
    # vLLM gives all layers blocks of one size, which must fit a state.
    block = shape.recurrent.state_bytes(k)
    states = (shape.layers - attending) * (1 + k)
    blocks = sum(count * -(-length * size // block) for count, size in ((attending, token), (drafting, of_draft)))
    return requests * block * (states + blocks)


def _target(shape: Shape) -> dict[str, Any]:
    model_type, architecture = shape.model
    sizes = _common(shape, shape.layers, (shape.heads, shape.kv_heads, shape.head_dim))
    if model_type not in ("qwen3", "qwen3_moe"):
        # Other models have other keys for the layers with a window.
        sizes = {key: value for key, value in sizes.items() if "window" not in key}
    recurrent = {} if shape.recurrent is None else shape.recurrent.config()
    names = {"architectures": [architecture], "model_type": model_type}
    text = {**sizes, **recurrent, **shape.rope, **shape.more}
    if shape.images is None:
        return {**text, **names}
    text["model_type"] = f"{model_type}_text"
    return {**shape.images.config, "text_config": text, "tie_word_embeddings": shape.tied, **names}


def _drafter(shape: Shape, layers: int) -> dict[str, Any]:
    heads = shape.draft_heads or (shape.heads, shape.kv_heads, shape.head_dim)
    return _common(shape, layers, heads) | _rope(1000000.0) | {"tie_word_embeddings": False}


def _common(shape: Shape, layers: int, heads: tuple[int, int, int]) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "intermediate_size": shape.intermediate,
        "hidden_act": "silu",
        "max_position_embeddings": _POSITIONS,
        "rms_norm_eps": 1e-06,
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
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


def _write(folder: Path, config: dict[str, Any], name: str = "config.json") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
