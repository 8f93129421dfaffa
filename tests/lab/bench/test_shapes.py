# SPDX-License-Identifier: Apache-2.0
"""What the shapes for dummy weights say, against vLLM's own reading of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin_lab.bench import Host
from vllm_hwplugin_lab.bench._shapes import SHAPES, write_configs
from vllm_hwplugin_lab.bench.plan import ALL_SIDES, Case, NotOnThisHost, Settings, check, job_for

DRAFTERS = [(name, method) for name, shape in SHAPES.items() for method in shape.methods]
#: What vLLM makes of the drafter's config.
DRAFT = {
    "eagle3": ("LlamaForCausalLMEagle3", "llama"),
    "dflash": ("DFlashDraftModel", "qwen3"),
    "draft_model": ("Qwen3ForCausalLM", "qwen3"),
    ("qwen3_5_text", "mtp"): ("Qwen3_5MTP", "qwen3_5_mtp"),
    ("qwen3_next", "mtp"): ("Qwen3NextMTP", "qwen3_next_mtp"),
    ("deepseek_v3", "mtp"): ("DeepSeekMTPModel", "deepseek_mtp"),
    ("gemma4_text", "mtp"): ("Gemma4MTPModel", "gemma4_mtp"),
}


def config_of(folder: Path) -> Any:
    pytest.importorskip("vllm")
    from vllm.transformers_utils.config import get_config

    return get_config(folder, trust_remote_code=False)


@pytest.mark.parametrize(("name", "method"), DRAFTERS)
def test_vllm_knows_the_model_and_its_drafter(name: str, method: str, tmp_path: Path) -> None:
    speculative = pytest.importorskip("vllm.config.speculative")
    from vllm.model_executor.models.registry import ModelRegistry

    shape = SHAPES[name]
    target, drafter = write_configs(shape, tmp_path, method, 4)
    config = config_of(target)
    assert (config.model_type, config.architectures[0]) == shape.model
    of_draft = speculative.SpeculativeConfig.hf_config_override(config_of(drafter or target))
    expected = DRAFT.get(method) or DRAFT[shape.model[0], method]
    assert (of_draft.architectures[0], of_draft.model_type) == expected
    known = ModelRegistry.get_supported_archs()
    assert {config.architectures[0], of_draft.architectures[0]} <= set(known)
    if shape.assistant is None:
        same = "vocab_size" if method == "draft_model" else "hidden_size"
        assert getattr(of_draft, same) == getattr(config.get_text_config(), same)
    else:
        assert of_draft.backbone_hidden_size == config.hidden_size
    if method == "mtp":
        assert getattr(of_draft, "n_predict", None) in (None, 1)


@pytest.mark.parametrize(("name", "method"), DRAFTERS)
def test_a_job_has_what_its_shape_needs(
    settings: Settings, gpu_host: Host, tmp_path: Path, name: str, method: str
) -> None:
    host = dataclasses.replace(gpu_host, vllm="0.33.0", gpus=2)
    check([Case(name, method, 3)], host, ALL_SIDES)
    job = job_for(Case(name, method, 3), "patched", settings, host, None, tmp_path, own_process=True)
    assert job.options.get("tensor_parallel_size", 1) == (2 if name.endswith("-tp2") else 1)
    assert job.options.get("gdn_prefill_backend") == (None if SHAPES[name].recurrent is None else "triton")
    speculation = job.options["speculative_config"]
    assert ("model" in speculation) == (method != "mtp" or SHAPES[name].assistant is not None)
    target = json.loads((Path(job.options["model"]) / "config.json").read_text())
    vocabulary = target.get("text_config", target)["vocab_size"]
    assert all(token < vocabulary for w in job.workloads for prompt in w.prompts for token in prompt)


def test_a_model_with_images_has_what_reads_them(settings: Settings, gpu_host: Host, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    host, case = dataclasses.replace(gpu_host, vllm="0.33.0"), Case("qwen3-vl-4b", "eagle3", 3)
    options = job_for(case, "patched", settings, host, None, tmp_path, own_process=True).options
    tokenizer = transformers.AutoTokenizer.from_pretrained(options["model"])
    config = config_of(Path(options["model"]))
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    ids = [config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id]
    assert not options["skip_tokenizer_init"]
    assert tokenizer(" ".join(("t5", *names, "t151935"))).input_ids == [5, *ids, 151935]
    # vLLM's client leaves these out of random prompts.
    assert set(ids) <= set(tokenizer.all_special_ids)
    assert tokenizer.vocab_size == config.get_text_config().vocab_size
    # A feature of each of these layers is added in the text model.
    vision = config.vision_config
    assert max(vision.deepstack_visual_indexes) < vision.depth
    assert vision.out_hidden_size == config.get_text_config().hidden_size
    for kind in ("image", "video"):
        file = "preprocessor_config.json" if kind == "image" else "video_preprocessor_config.json"
        processor = json.loads((Path(options["model"]) / file).read_text())
        assert processor["patch_size"] == vision.patch_size
        assert processor["merge_size"] == vision.spatial_merge_size
        assert hasattr(transformers, processor[f"{kind}_processor_type"])


@pytest.mark.parametrize(
    ("name", "method", "vllm", "words"),
    [
        ("qwen3.5-4b", "none", "0.26.0", "with none needs vLLM 0.27.0 or later, found 0.26.0"),
        ("30b-a3b", "mtp", "0.26.0", "has no drafter for mtp; it has one for eagle3, dflash"),
        ("tiny", "mtp", "0.26.0", "--shape tiny has no drafter for mtp"),
        ("qwen3.5-4b", "dflash", "0.26.0", "with dflash needs vLLM 0.27.0 or later, found 0.26.0"),
        ("qwen3-next-4l", "mtp", "0.22.1", "is a hybrid, which needs vLLM 0.23.0 or later on Model Runner V2, found"),
        ("8b-fp8-tp2", "eagle3", "0.26.0", "needs 2 GPUs, and this host has 1"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(
    gpu_host: Host, name: str, method: str, vllm: str, words: str
) -> None:
    host = dataclasses.replace(gpu_host, vllm=vllm)
    with pytest.raises(NotOnThisHost) as error:
        check([Case(name, method, 3)], host, ALL_SIDES)
    assert words in str(error.value)
