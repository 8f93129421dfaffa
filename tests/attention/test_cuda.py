# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN on CUDA over a stand-in for the kernel, on every supported vLLM: which layer gets what, what is refused.

The kernel itself is tested in tests/attention/paged and, on a GPU, in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from vllm_hwplugin.base.versions import SUPPORTED

torch = pytest.importorskip("torch")

from ..conftest import versions  # noqa: E402
from .layer import HEADS, KV_HEADS, Layer, config  # noqa: E402
from .paged_standin import paged  # noqa: E402
from .released import released  # noqa: E402
from .test_classes import arguments  # noqa: E402

every_version = pytest.mark.parametrize("version", versions("vllm/v1/attention/", "vllm/v1/worker/"))
ends = pytest.mark.parametrize("version", [SUPPORTED[0], SUPPORTED[-1]])
OWN = "vllm_hwplugin.attention.cuda"
FLASH = "vllm.v1.attention.backends.flash_attn"
Tree = Callable[[str], Any]


def layer_of(load: Any, head_size: int = 512, **options: Any) -> Layer:
    usual = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    return Layer(load, load(OWN).CudaFlashAttentionBackend, head_size, **usual | options)


@ends
def test_batch_invariance_reaches_the_kernel(version: str, vllm_tree: Tree) -> None:
    calls: list[dict[str, Any]] = []
    with released(version, vllm_tree(version), paged=paged(calls), flash=(3,)) as load:
        for asked in (False, True):
            load("vllm.envs").VLLM_BATCH_INVARIANT = asked
            layer = layer_of(load)
            layer.write(slice(None))
            layer.run(layer.metadata(causal=True))
    assert [call["batch_invariant"] for call in calls] == [False, True]


# -- each layer by its own head ----------------------------------------------------------------------------------------


@every_version
def test_each_layer_gets_what_is_made_for_its_head(version: str, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version), paged=paged(), flash=(3,)) as load:
        flash, own = load(FLASH), load(OWN)
        for head_size, made in (
            (64, flash.FlashAttentionImpl),
            (256, flash.FlashAttentionImpl),
            (264, own.LargeHeadAttentionImpl),
            (512, own.LargeHeadAttentionImpl),
        ):
            impl = own.CudaFlashAttentionBackend.get_impl_cls()(
                HEADS, head_size, 0.1, KV_HEADS, None, None, "auto", None, "decoder", None
            )
            assert type(impl) is made
            # vLLM plans its schedules by the windows of all layers that are one of its own.
            assert isinstance(impl, flash.FlashAttentionImpl)
            assert impl.sliding_window == (-1, -1)


@every_version
def test_a_large_head_asks_nothing_of_flash_attention(version: str, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version), paged=paged(), flash=(3, 4)) as load:
        flash = load(FLASH)
        own = load(OWN)
        flash.get_scheduler_metadata = MagicMock(side_effect=AssertionError("planned for a large head"))
        flash.get_flash_attn_version = MagicMock(return_value=3)
        layer = layer_of(load)
        assert not flash.get_flash_attn_version.called
        assert layer.impl.vllm_flash_attn_version is None
        layer.write(slice(None))
        metadata = layer.metadata(True)
        assert metadata.scheduler_metadata is None
        builder = layer.builder()
        assert (builder.aot_schedule, builder.use_cascade_attention(common_prefix_len=4096)) == (False, False)
        assert own.CudaFlashAttentionBackend.get_builder_cls() is type(builder)


@every_version
def test_graphs_of_large_heads_hold_any_batch(version: str, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version), paged=paged(), flash=(2,)) as load:
        support = load("vllm.v1.attention.backend").AttentionCGSupport
        builder = load(OWN).CudaFlashAttentionBackend.get_builder_cls()

        def of(*head_sizes: int) -> Any:
            specs = [Layer.spec(size) for size in head_sizes]
            group = SimpleNamespace(kv_cache_specs=dict(enumerate(specs))) if len(specs) > 1 else specs[0]
            return builder.get_cudagraph_support(config(), group)

        # With FlashAttention 2 vLLM's own hold batches of equal query lengths.
        assert of(256) is support.UNIFORM_BATCH
        assert of(264) is support.ALWAYS
        assert of(512, 320) is support.ALWAYS
        assert of(512, 256) is support.UNIFORM_BATCH


@every_version
def test_graphs_that_are_captured_with_short_queries_hold_no_mixed_batch(version: str, vllm_tree: Tree) -> None:
    short = SUPPORTED.index(version) < SUPPORTED.index("0.31.0")
    # Of the second model runner: the bound that it captures a mixed graph with.
    text = vllm_tree(version).read("vllm/v1/worker/gpu/cudagraph_utils.py")
    assert ("max_query_len = num_tokens" in text) is not short
    with released(version, vllm_tree(version), paged=paged(), flash=(3,)) as load:
        support = load("vllm.v1.attention.backend").AttentionCGSupport
        get = load(OWN).CudaFlashAttentionBackend.get_builder_cls().get_cudagraph_support
        expected = support.UNIFORM_BATCH if short else support.ALWAYS
        both = SimpleNamespace(kv_cache_specs={"small": Layer.spec(256), "large": Layer.spec(512)})
        for spec in (Layer.spec(256), Layer.spec(512), both):
            assert get(config(use_v2_model_runner=True), spec) is expected
            assert get(config(use_v2_model_runner=False), spec) is support.ALWAYS
        # As 0.20 and 0.21 say it.
        load("vllm.envs").VLLM_USE_V2_MODEL_RUNNER = True
        assert get(SimpleNamespace(), Layer.spec(512)) is expected


@pytest.mark.parametrize("version", ["0.30.0", "0.33.0"])
def test_flash_attention_4_is_not_compiled_ahead_for_large_heads(version: str, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version), paged=paged(), flash=(3, 4)) as load:
        flash = load(FLASH)
        (name,) = [name for name in vars(flash) if name.startswith("_FA4_DENSE")]
        kernel = MagicMock()
        setattr(flash, name, kernel)

        def build(head_size: int) -> Any:
            settings = config()
            settings.kernel_config.enable_jit_warmup = True
            settings.model_config.hf_config.model_type = "gemma4"
            own = load(OWN).CudaFlashAttentionBackend.get_builder_cls()
            builder = own(Layer.spec(head_size), ["layer"], settings, torch.device("cpu"))
            assert builder.vllm_config is settings
            assert settings.kernel_config.enable_jit_warmup is True
            return kernel.register_warmup.called

        assert build(512) is False
        assert build(256) is True


# -- memory ------------------------------------------------------------------------------------------------------------


@ends
def test_halves_of_a_batch_have_a_scratch_each(version: str, vllm_tree: Tree) -> None:
    calls: list[dict[str, Any]] = []
    with released(version, vllm_tree(version), paged=paged(calls), flash=(3,)) as load:
        scratch = load("vllm_hwplugin.attention.cuda")
        parallel = SimpleNamespace(use_ubatching=True, num_ubatches=2)
        scratch.get_current_vllm_config_or_none = lambda: SimpleNamespace(parallel_config=parallel)
        layer = layer_of(load)
        layer.write(slice(None))
        for half in (0, 1, 0):
            scratch.dbo_current_ubatch_id = lambda half=half: half
            layer.run(layer.metadata(True))
        first, second, third = (call["scratch"] for call in calls)
        assert first is third
        assert first is not second


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["use_rswa", "use_dcp", "use_pcp", "use_adaptive_verification"])
def test_what_later_versions_ask_is_refused_for_large_heads_alone(asked: str, vllm_tree: Tree) -> None:
    version = SUPPORTED[-1]
    with released(version, vllm_tree(version), paged=paged(), flash=(3,)) as load:
        made, stock = load(OWN).CudaFlashAttentionBackend, load(FLASH).FlashAttentionBackend
        (reason,) = made.validate_configuration(**arguments(made, head_size=512, **{asked: True}))
        assert "FLASH_ATTN>256 does not declare" in reason
        usual = arguments(made, head_size=256, **{asked: True})
        assert made.validate_configuration(**usual) == stock.validate_configuration(**usual)


@every_version
def test_what_is_declared_is_accepted(version: str, vllm_tree: Tree) -> None:
    # Without FlashAttention 3 and 4 as well: sinks are then not for vLLM's own kernels.
    with released(version, vllm_tree(version), paged=paged(), flash=(2,)) as load:
        made = load(OWN).CudaFlashAttentionBackend
        good = arguments(
            made,
            head_size=512,
            block_size=None,
            has_sink=True,
            use_non_causal=True,
            use_batch_invariant=True,
            use_kv_connector=True,
            has_sliding_window=True,
        )
        assert made.validate_configuration(**good) == []
        assert made.validate_configuration(**good | {"kv_cache_dtype": "bfloat16", "block_size": 64}) == []


@ends
def test_more_query_heads_of_a_kv_head_than_the_kernel_takes_are_refused(version: str, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version), paged=paged(), flash=(3,)) as load:
        make = load(OWN).CudaFlashAttentionBackend.get_impl_cls()

        def impl(head_size: int, heads: int, kv_heads: int | None) -> Any:
            return make(heads, head_size, 0.1, kv_heads, None, None, "auto")

        assert impl(512, 128, 2).num_queries_per_kv == 64
        assert impl(512, 130, None).num_queries_per_kv == 1
        with pytest.raises(ValueError, match="heads above 256: too many query heads; use --attention-backend TRITON"):
            impl(512, 130, 2)
        # Others are vLLM's own.
        assert impl(256, 130, 2).num_queries_per_kv == 65


@ends
def test_context_parallelism_is_refused(version: str, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version), paged=paged(), flash=(3,)) as load:
        load("vllm.distributed.parallel_state").get_pcp_group = lambda: SimpleNamespace(world_size=2, rank_in_group=0)
        with pytest.raises(ValueError, match="context parallelism; use tensor parallelism"):
            layer_of(load)
