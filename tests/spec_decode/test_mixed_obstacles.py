# SPDX-License-Identifier: Apache-2.0
"""What has graphs of mixed batches: FlashAttention 2 and 4, drafters that graphs do not hold, layers with a gated delta
rule; MLA if asked for.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

from vllm_hwplugin.base import gates
from vllm_hwplugin.spec_decode.obstacles import Part, why_not

from .metadata_builders import FLASH_MLA, builder
from .test_obstacles import MIXED, change, group, refused, runner_v2


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
    assert (
        refused(change(made, "adaptive_verification", object()), runner_v2, "verified")
        == Part.V2_INPUTS | Part.V2_DRAFTING
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ""),
        ({"vllm_config.parallel_config.data_parallel_size": 2}, "ranks of data parallelism each"),
        ({"attn_groups": [[group(GDNAttentionMetadataBuilder)]]}, "GDNAttentionMetadataBuilder takes requests by"),
    ],
)
def test_adaptive_verification_has_graphs_where_the_device_knows_the_requests(
    changed: dict[str, Any], words: str
) -> None:
    runner = change(runner_v2(), "adaptive_verification", object())
    for path, value in changed.items():
        change(runner, path, value)
    reason = why_not(runner, MIXED)
    assert f"from step to step, and {words}" in str(reason) if words else reason is None


#: What is not as graphs need it.
REFUSED = [
    ({"compilation_config.static_forward_context": {}}, "they are NoneType"),
    ({"prefill": "flashinfer"}, "flashinfer computes their prompts; --gdn-prefill-backend triton"),
    ({"older": True}, "up to 0.31"),
    ({"max_num_reqs": 1}, "there is one request at a time"),
    ({"vllm_config.parallel_config.data_parallel_size": 2}, "ranks of data parallelism"),
    ({}, ""),
]


@pytest.mark.parametrize(("changed", "words"), REFUSED, ids=[words or "served" for _, words in REFUSED])
def test_layers_with_a_gated_delta_rule_are_served_where_their_kernels_are_known(
    changed: dict[str, Any], words: str
) -> None:
    changed = dict(changed)
    more = {"gdn_prefill_backend": changed.pop("prefill", "triton")}
    if not changed.pop("older", False):
        more["checkpoint_builder"] = None
    made = group(GDNAttentionMetadataBuilder, "layers.1", **more)
    type(made.get_metadata_builder()).__qualname__ = GDNAttentionMetadataBuilder.__qualname__
    runner = change(runner_v2(), "attn_groups", [[made]])
    layers = {"layers.1": type("QwenGatedDeltaNetAttention", (), {})()}
    standard = {"compilation_config.static_forward_context": layers, "max_num_reqs": 8}
    for path, value in (standard | changed).items():
        change(runner, path, value)
    reason = why_not(runner, MIXED)
    assert words in str(reason) if words else reason is None


@pytest.mark.parametrize(
    ("asked", "capability", "refused"),
    [("auto", 90, True), ("triton", 90, False), ("auto", 80, False)],
)
def test_before_a_start_it_is_known_what_hopper_needs(
    asked: str, capability: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current_platform, "is_cuda", lambda: True)
    monkeypatch.setattr(current_platform, "is_device_capability", lambda asked: asked == capability)
    text = SimpleNamespace(model_type="qwen3_next", linear_key_head_dim=8)
    runner = change(runner_v2(), "model_config.hf_text_config", text)
    runner.vllm_config.additional_config = {"gdn_prefill_backend": asked}
    runner.vllm_config.model_config = runner.model_config
    # Where there are builders, they say it.
    runner.attn_groups = []
    assert ("--gdn-prefill-backend triton gives these graphs" in str(why_not(runner, MIXED))) is refused


def _told(self: object, num_decode_tokens: int, max_query_len: int) -> None: ...


def _measuring(self: object, num_decode_tokens: int) -> None: ...


@pytest.mark.parametrize(
    ("asked", "build", "ranks", "reason"),
    [
        ("mla-prompts", _told, 1, None),
        ("mla-prompts", _told, 2, "ranks of data parallelism do not know of each other's longest requests"),
        ("", _told, 1, "FlashAttnMLAMetadataBuilder supports UNIFORM_BATCH"),
        # Up to 0.30.
        ("mla-prompts", _measuring, 1, "FlashAttnMLAMetadataBuilder supports UNIFORM_BATCH"),
    ],
)
def test_flash_attn_mla_takes_short_prompts_if_asked_for(
    asked: str, build: object, ranks: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(gates.MORE_GRAPHS, asked)
    made = group(builder(FLASH_MLA), "layers.0", reorder_batch_threshold=512)
    of_class = {"_build_decode": build, "get_cudagraph_support": lambda *_: AttentionCGSupport.UNIFORM_BATCH}
    for name, method in of_class.items():
        setattr(type(made.get_metadata_builder()), name, method)
    runner = change(runner_v2(), "attn_groups", [[made]])
    runner = change(runner, "vllm_config.parallel_config.data_parallel_size", ranks)
    found = why_not(runner, MIXED)
    # The vLLM here may have another reason for several ranks.
    assert (found is None) == (reason is None)
    assert (found or "").endswith(reason or "")
    found = why_not(change(runner, "adaptive_verification", object()), MIXED) or ""
    assert ("takes requests by the host's counts" in found) == (asked != "" and build is _told and ranks == 1)
