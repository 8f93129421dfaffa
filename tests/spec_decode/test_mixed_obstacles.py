# SPDX-License-Identifier: Apache-2.0
"""What keeps graphs of mixed batches away no more: FlashAttention 2 and 4, and drafters that graphs do not hold."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

from vllm_hwplugin.spec_decode.obstacles import Part, why_not

from .test_obstacles import MIXED, TAIL, change, group, refused, runner_v2


@pytest.mark.parametrize(
    ("cls", "versions_of_layers", "served"),
    [
        (FlashAttentionMetadataBuilder, (2, 2), True),
        (FlashAttentionMetadataBuilder, (4, 2), True),
        # vLLM found none for this device.
        (FlashAttentionMetadataBuilder, (2, None), False),
        (FlashAttentionMetadataBuilder, (), False),
        (type("Other", (FlashAttentionMetadataBuilder,), {}), (2, 2), False),
    ],
)
def test_flash_attention_2_and_4_take_prompts_where_the_builder_is_vllms(
    cls: type, versions_of_layers: tuple[int | None, ...], served: bool
) -> None:
    names = [f"layers.{place}" for place in range(len(versions_of_layers))]
    made = group(cls, *names)
    flash = made.get_metadata_builder()
    type(flash).__qualname__, type(flash).__name__ = cls.__qualname__, cls.__name__
    assert flash.get_cudagraph_support(None, None) == AttentionCGSupport.UNIFORM_BATCH
    layers = {
        name: SimpleNamespace(impl=SimpleNamespace(vllm_flash_attn_version=version))
        for name, version in zip(names, versions_of_layers, strict=True)
    }
    runner = change(runner_v2(), "compilation_config.static_forward_context", layers)
    reason = why_not(change(runner, "attn_groups", [[made]]), MIXED)
    assert reason == (None if served else f"only some batches can have graphs: {cls.__name__} supports UNIFORM_BATCH")


def test_a_drafter_that_graphs_do_not_hold_leaves_the_target_its_graphs() -> None:
    made = change(runner_v2(), "speculative_config.method", "ngram")
    made.speculator = type("AnotherSpeculator", (SimpleNamespace,), {})()
    assert refused(made, runner_v2) == Part.V2_DRAFTING
    assert refused(change(made, "adaptive_verification", object()), runner_v2, "verified") == TAIL | MIXED
