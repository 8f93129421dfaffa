# SPDX-License-Identifier: Apache-2.0
"""A small model that takes images, and what makes its inputs of one: Transformers' own also wants torchvision."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

from vllm_hwplugin_lab.bench._shapes import SHAPES, write_configs

from .simulated import HERE

#: Behind the words of the tests' tokenizer.
MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
IMAGE, VIDEO, START, END = range(4096, 4100)
_SIDE = 128
_ARCHITECTURE = "Qwen3VLForConditionalGeneration"
_SHAPE = dataclasses.replace(
    SHAPES["0.6b"], layers=4, hidden=128, heads=2, kv_heads=1, head_dim=64, intermediate=128, vocabulary=4160
)


def write_model(folder: Path, drafts: int) -> tuple[Path, Path]:
    """Qwen3-VL in small with an Eagle3 drafter; returns their folders."""
    target, drafter = write_configs(_SHAPE, folder, "eagle3", drafts + 1)
    assert drafter is not None
    text = json.loads((target / "config.json").read_text())
    positions = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [12, 10, 10]}
    del text["architectures"]
    whole = {
        "architectures": [_ARCHITECTURE],
        "model_type": "qwen3_vl",
        "text_config": {**text, "model_type": "qwen3_vl_text", "rope_parameters": positions},
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 2,
            "intermediate_size": 128,
            "out_hidden_size": _SHAPE.hidden,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "vocab_size": _SHAPE.vocabulary,
        "tie_word_embeddings": _SHAPE.tied,
        "eos_token_id": 0,
    }
    (target / "config.json").write_text(json.dumps(whole))
    _tokenizer().save_pretrained(target)
    return target, drafter


def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    words = HERE.parent / "assets" / "small" / "target" / "tokenizer.json"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(words))
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    return tokenizer


def register() -> None:
    """Have vLLM know the model, and make inputs of images alone."""
    from vllm.plugins import load_general_plugins

    # Before anything that they patch is imported.
    load_general_plugins()

    from transformers import Qwen2VLImageProcessor
    from transformers.models.qwen3_vl import Qwen3VLProcessor
    from vllm import ModelRegistry

    # It imports a function for sizes from a module that has one import of torchvision more.
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    absent: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    absent[names[-1]].functional = None
    sys.modules.update(absent)
    from vllm.model_executor.models import qwen3_vl

    for name in names:
        del sys.modules[name]
    # Else a process without that is asked what the model can do.
    ModelRegistry.register_model(_ARCHITECTURE, getattr(qwen3_vl, _ARCHITECTURE))

    processor = object.__new__(Qwen3VLProcessor)
    images = Qwen2VLImageProcessor(patch_size=16, min_pixels=_SIDE**2, max_pixels=_SIDE**2)
    # Of the second vLLM asks for sizes alone.
    processor.image_processor = processor.video_processor = images
    processor.chat_template = None
    processor.tokenizer = _tokenizer()
    processor.image_token, processor.video_token, *_ = MARKS
    processor.image_token_id, processor.video_token_id = IMAGE, VIDEO
    qwen3_vl.Qwen3VLProcessingInfo.get_hf_processor = lambda *_, **__: processor
