# SPDX-License-Identifier: Apache-2.0
"""Which V1 engines prepare every step anew, or the attention metadata of every step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.attention.backends.triton_attn", exc_type=ImportError)

from vllm.v1.attention.backends.flex_attention import FlexAttentionMetadataBuilder
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder

from vllm_hwplugin.fallback import FeatureRequired
from vllm_hwplugin.spec_decode.obstacles import Part, why_not
from vllm_hwplugin.spec_decode.v1.step_inputs import StepInputs


def metadata_of(runner: Any) -> str | None:
    return why_not(runner, Part.V1_METADATA)


def builder(cls: type, **attributes: Any) -> Any:
    """One that has not been set up: what it is decides."""
    made = cls.__new__(cls)
    vars(made).update(attributes)
    return made


def runner(*builders: Any, **changed: Any) -> Any:
    """What is read of a V1 runner that drafts with Eagle3; `changed` by the dotted path of the attribute."""
    group = [SimpleNamespace(get_metadata_builder=lambda ubatch, one=one: one) for one in builders]
    made = SimpleNamespace(
        speculative_config=SimpleNamespace(method="eagle3"),
        drafter=SimpleNamespace(),
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(
                pipeline_parallel_size=1,
                decode_context_parallel_size=1,
                prefill_context_parallel_size=1,
                data_parallel_size=1,
            )
        ),
        lora_config=None,
        model_config=SimpleNamespace(
            is_encoder_decoder=False, is_hybrid=False, rswa_window=None, uses_mrope=False, uses_xdrope_dim=0
        ),
        cache_config=SimpleNamespace(mamba_cache_mode="none", kv_sharing_fast_prefill=False),
        enable_prompt_embeds=False,
        is_mm_prefix_lm=False,
        attn_groups=[group],
    )
    for path, value in changed.items():
        *owners, name = path.split("__")
        owner = made
        for one in owners:
            owner = getattr(owner, one)
        setattr(owner, name, value)
    return made


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"speculative_config": None}, "does not draft"),
        ({"speculative_config__method": "ngram_gpu"}, "changes from step to step"),
        ({"vllm_config__parallel_config__pipeline_parallel_size": 2}, "pipeline"),
        ({"vllm_config__parallel_config__prefill_context_parallel_size": 2}, "context is split"),
        ({"vllm_config__parallel_config__decode_context_parallel_size": 2}, "context is split"),
        ({"lora_config": object()}, "LoRA"),
        ({"model_config__is_encoder_decoder": True}, "encoder"),
        ({"model_config__uses_mrope": True}, "several dimensions"),
        ({"model_config__uses_xdrope_dim": 4}, "several dimensions"),
        ({"enable_prompt_embeds": True}, "embeddings"),
        ({"model_config__is_hybrid": True, "cache_config__mamba_cache_mode": "align"}, "mamba_cache_mode is align"),
    ],
)
def test_an_engine_that_is_not_served(changed: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(**changed)
    assert words in (why_not(made, Part.V1_INPUTS) or "")
    monkeypatch.setenv("VLLM_HWPLUGIN_V1_STEP_INPUTS", "on")
    with pytest.raises(FeatureRequired, match=words):
        StepInputs(made).capture()


@pytest.mark.parametrize("changed", [{}, {"model_config__is_hybrid": True}])
def test_an_engine_that_is_served(changed: dict[str, Any]) -> None:
    assert why_not(runner(**changed), Part.V1_INPUTS) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"vllm_config__parallel_config__data_parallel_size": 2}, "data parallelism"),
        ({"is_mm_prefix_lm": True}, "prompts"),
        ({"model_config__rswa_window": 64}, "prompts"),
        ({"cache_config__kv_sharing_fast_prefill": True}, "share keys"),
        ({"routed_experts_initialized": True}, "slots"),
        ({"drafter__set_per_group_block_table": object()}, "each KV cache group"),
    ],
)
def test_metadata_that_is_made_anew(changed: dict[str, Any], words: str) -> None:
    assert words in (metadata_of(runner(builder(TritonAttentionMetadataBuilder), **changed)) or "")


def test_builders() -> None:
    windows = builder(TritonAttentionMetadataBuilder, aot_schedule=True, aot_sliding_window=(127, 0))
    whole = builder(TritonAttentionMetadataBuilder, aot_schedule=True, aot_sliding_window=(-1, -1))
    assert metadata_of(runner(builder(TritonAttentionMetadataBuilder), whole)) is None
    assert "FlexAttentionMetadataBuilder" in (metadata_of(runner(whole, builder(FlexAttentionMetadataBuilder))) or "")
    assert "windows" in (metadata_of(runner(windows)) or "")
