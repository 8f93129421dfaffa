# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN on MUSA over a stand-in for mate: metadata, cache and result on every supported vLLM, and what is refused.

The metadata is built by that version's own builder. The right answer comes from contiguous keys and values, so a token
that is written to a wrong place of the cache, or an argument that does not arrive, shows. Not run on MUSA hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from vllm_hwplugin.patching import SUPPORTED

torch = pytest.importorskip("torch")

from .mate_standin import mate  # noqa: E402
from .released import released  # noqa: E402

every_version = pytest.mark.parametrize("version", SUPPORTED)
ends = pytest.mark.parametrize("version", [SUPPORTED[0], SUPPORTED[-1]])
OWN = "vllm_hwplugin.attention.musa"
Tree = Callable[[str], Any]

HEADS, KV_HEADS, BLOCK = 4, 2, 16
# (tokens in this step, tokens in all) of each request
BATCH = ((1, 40), (5, 5), (3, 33))


def config(**settings: Any) -> Any:
    """A ``VllmConfig`` for one process without CUDA graphs."""
    model = MagicMock(rswa_window=None, is_mm_prefix_lm=False)
    compilation = MagicMock(max_cudagraph_capture_size=8)
    compilation.cudagraph_mode.has_full_cudagraphs.return_value = False
    kernel = SimpleNamespace(enable_jit_warmup=False)
    return MagicMock(model_config=model, compilation_config=compilation, kernel_config=kernel, **settings)


class Layer:
    """One attention layer, its cache with a random mapping of blocks, and the tokens of a batch."""

    def __init__(self, load: Any, head_size: int, seed: int = 0, **options: Any) -> None:
        self.module = load(OWN)
        self.common = load("vllm.v1.attention.backend").CommonAttentionMetadata
        self.backend = self.module.MusaFlashAttentionBackend
        self.scale = head_size**-0.5
        self.impl = self.backend.get_impl_cls()(HEADS, head_size, self.scale, KV_HEADS, **options)
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Any:
            return torch.randn(*shape, generator=generator).bfloat16()

        self.keys = [random(length, KV_HEADS, head_size) for _, length in BATCH]
        self.values = [random(length, KV_HEADS, head_size) for _, length in BATCH]
        self.query = random(sum(new for new, _ in BATCH), HEADS, head_size)
        width = max(-(-length // BLOCK) for _, length in BATCH)
        self.table = torch.randperm(20, generator=generator)[: len(BATCH) * width].view(len(BATCH), width).int()
        self.cache = self._cache(head_size)

    def _cache(self, head_size: int) -> Any:
        """As the model runner makes it: the memory in the backend's order, unused slots poisoned."""
        if not hasattr(self.backend, "get_kv_cache_shape"):
            return torch.full((20, KV_HEADS, BLOCK, 2 * head_size), float("nan"), dtype=torch.bfloat16)
        shape = self.backend.get_kv_cache_shape(20, BLOCK, KV_HEADS, head_size)
        order = self.backend.get_kv_cache_stride_order()
        memory = torch.full([shape[dim] for dim in order], float("nan"), dtype=torch.bfloat16)
        return memory.permute([order.index(dim) for dim in range(len(order))])

    def write(self, which: slice) -> None:
        for request, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            at = torch.arange(len(keys))
            slots = self.table[request, at // BLOCK] * BLOCK + at % BLOCK
            scales = SimpleNamespace(_k_scale=None, _v_scale=None)
            self.impl.do_kv_cache_update(scales, keys[which], values[which], self.cache, slots[which])

    def metadata(self, causal: bool, **more: Any) -> Any:
        new, lengths = zip(*BATCH, strict=True)
        start = torch.tensor([0, *new]).cumsum(0).int()
        common = self.common(
            query_start_loc=start,
            query_start_loc_cpu=start,
            seq_lens=torch.tensor(lengths).int(),
            num_reqs=len(BATCH),
            num_actual_tokens=int(start[-1]),
            max_query_len=max(new),
            max_seq_len=max(lengths),
            block_table_tensor=self.table,
            slot_mapping=torch.zeros(int(start[-1])),
            causal=causal,
            **more,
        )
        spec = MagicMock(block_size=BLOCK, num_kv_heads=KV_HEADS, sliding_window=None)
        builder = self.backend.get_builder_cls()(spec, ["layer"], config(), torch.device("cpu"))
        return builder.build(0, common)

    def run(self, metadata: Any, **more: Any) -> Any:
        output = torch.full_like(self.query, float("nan"))
        found = self.impl.forward(None, self.query, None, None, self.cache, metadata, output, **more)
        assert found is output
        return output

    def right(self, *, causal: bool, window: int | None = None, cap: float = 0.0, sinks: Any = None) -> Any:
        """By definition, a query and a head at a time, in float64."""
        rows = []
        token = 0
        for (new, length), keys, values in zip(BATCH, self.keys, self.values, strict=True):
            for position in range(length - new, length):
                for head in range(HEADS):
                    kv = head // (HEADS // KV_HEADS)
                    seen = torch.tensor(
                        [
                            (not causal or key <= position) and (window is None or abs(position - key) < window)
                            for key in range(length)
                        ]
                    )
                    scores = keys[seen, kv].double() @ self.query[token, head].double() * self.scale
                    scores = cap * torch.tanh(scores / cap) if cap else scores
                    mass = scores.exp().sum() + (sinks[head].double().exp() if sinks is not None else 0)
                    rows.append((scores.exp() / mass) @ values[seen, kv].double())
                token += 1
        return torch.stack(rows).view_as(self.query)


def close(found: Any, right: Any) -> None:
    torch.testing.assert_close(found.double(), right, atol=2e-2, rtol=2e-2)


@every_version
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("head_size", "layout"), [(512, "NHD"), (64, "HND")])
def test_the_right_answer(version: str, causal: bool, head_size: int, layout: str, vllm_tree: Tree) -> None:
    calls: list[dict[str, Any]] = []
    with released(version, vllm_tree(version), layout=layout, mate=mate(calls)) as load:
        layer = Layer(load, head_size)
        layer.write(slice(None))
        close(layer.run(layer.metadata(causal)), layer.right(causal=causal))
    assert [call["causal"] for call in calls] == [causal]
    assert calls[0]["deterministic"] is False


@ends
@pytest.mark.parametrize("causal", [True, False])
def test_window_softcap_and_sinks_arrive(version: str, causal: bool, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version), mate=mate()) as load:
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]).bfloat16()
        layer = Layer(load, 64, sliding_window=7, logits_soft_cap=2.0, sinks=sinks)
        layer.write(slice(None))
        close(layer.run(layer.metadata(causal)), layer.right(causal=causal, window=7, cap=2.0, sinks=sinks))


@ends
def test_a_token_without_a_slot_is_not_written(version: str, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version), mate=mate()) as load:
        layer = Layer(load, 64)
        nothing = torch.full((len(layer.keys[0]),), -1)
        layer.impl.do_kv_cache_update(MagicMock(), layer.keys[0], layer.values[0], layer.cache, nothing)
        assert layer.cache.isnan().all()


@ends
def test_batch_invariance_asks_for_a_deterministic_kernel(version: str, vllm_tree: Tree) -> None:
    calls: list[dict[str, Any]] = []
    with released(version, vllm_tree(version), mate=mate(calls)) as load:
        load("vllm.envs").VLLM_BATCH_INVARIANT = True
        layer = Layer(load, 64)
        layer.write(slice(None))
        layer.run(layer.metadata(causal=True))
    assert [call["deterministic"] for call in calls] == [True]


@ends
def test_without_a_cache_the_output_is_zero(version: str, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version), mate=mate()) as load:
        assert not Layer(load, 64).run(None).any()


@every_version
def test_a_batch_with_an_image_is_refused_and_one_without_is_not(version: str, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version), mate=mate()) as load:
        layer = Layer(load, 64)
        layer.write(slice(None))
        # Up to 0.23 vLLM puts the ranges into the metadata of a layer, later into what that is built from.
        in_common = "mm_req_doc_ranges" in layer.common.__dataclass_fields__
        assert in_common == (SUPPORTED.index(version) >= SUPPORTED.index("0.24.0"))

        def run(ranges: dict[int, list[tuple[int, int]]]) -> None:
            if in_common:
                layer.run(layer.metadata(True, mm_req_doc_ranges=ranges))
            else:
                metadata = layer.metadata(True)
                metadata.mm_prefix_range = ranges
                layer.run(metadata)

        run({0: [], 1: []})
        with pytest.raises(NotImplementedError, match=r"text only.*--language-model-only"):
            run({0: [], 1: [(0, 3)]})


@ends
def test_the_builder_leaves_out_what_only_vllms_kernels_have(version: str, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version), mate=mate()) as load:
        # As on a device for which vLLM has FlashAttention 3.
        load("vllm.v1.attention.backends.flash_attn").get_flash_attn_version = lambda **_: 3
        backend = load(OWN).MusaFlashAttentionBackend
        builder = backend.get_builder_cls()(MagicMock(), ["layer"], config(), torch.device("cpu"))
        assert builder.aot_schedule is False
        assert builder.use_cascade_attention(common_prefix_len=4096) is False
        support = load("vllm.v1.attention.backend").AttentionCGSupport.UNIFORM_BATCH
        assert backend.get_builder_cls().get_cudagraph_support(None, None) is support


@ends
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"alibi_slopes": [0.5]}, "no ALiBi"),
        ({"kv_cache_dtype": "fp8"}, "does not support KV cache type fp8"),
        ({"attn_type": "encoder_only"}, "does not support attention type encoder_only"),
        ({"head_size": 520}, "does not support head size 520"),
        ({"sinks": torch.zeros(3)}, r"sinks have shape \(3,\), expected one for each head: \(4,\)"),
    ],
)
def test_a_layer_that_needs_more_is_refused(
    version: str, options: dict[str, Any], reason: str, vllm_tree: Tree
) -> None:
    with released(version, vllm_tree(version), mate=mate()) as load, pytest.raises(ValueError, match=reason):
        Layer(load, **{"head_size": 64} | options)


@ends
def test_a_step_that_needs_more_is_refused(version: str, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version), mate=mate()) as load:
        layer = Layer(load, 64)
        metadata = layer.metadata(True)
        with pytest.raises(NotImplementedError, match="does not quantize its output"):
            layer.run(metadata, output_scale=torch.ones(1))
        metadata.causal = torch.ones(len(BATCH), dtype=torch.int32)
        with pytest.raises(NotImplementedError, match="one mask for all requests"):
            layer.run(metadata)


@ends
def test_without_mate_there_is_no_backend(version: str, vllm_tree: Tree) -> None:
    with released(version, vllm_tree(version)) as load, pytest.raises(ImportError, match="mate"):
        load(OWN)
