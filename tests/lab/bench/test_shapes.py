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
from vllm_hwplugin_lab.bench.plan import ALL_SIDES, Case, Settings, check, job_for

DRAFTERS = [(name, method) for name, shape in SHAPES.items() for method in shape.methods]
#: What vLLM makes of the drafter's config.
DRAFT = {
    "eagle": ("LlamaForCausalLM", "llama"),
    "eagle3": ("LlamaForCausalLMEagle3", "llama"),
    "dflash": ("DFlashDraftModel", "qwen3"),
    "dspark": ("Qwen3DSparkModel", "qwen3"),
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
