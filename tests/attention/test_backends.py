# SPDX-License-Identifier: Apache-2.0
"""What both backends of the plugin do for a layer on every supported vLLM, over stand-ins for their kernels.

Metadata and cache are vLLM's in both. What is CUDA's alone is in test_cuda, and what is MUSA's in tests/musa.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest

from vllm_hwplugin.base.versions import SUPPORTED

torch = pytest.importorskip("torch")

from ..conftest import versions  # noqa: E402
from ..musa.mate_standin import mate  # noqa: E402
from .layer import BATCH, Layer, close  # noqa: E402
from .paged_standin import paged  # noqa: E402
from .released import released  # noqa: E402

Tree = Callable[[str], Any]
Calls = list[dict[str, Any]]


class Own(NamedTuple):
    """A backend: its class, the head sizes and layouts that it is tried with, and vLLM with its kernels' stand-in."""

    module: str
    cls: str
    tried: tuple[tuple[int, str], ...]
    kernels: Callable[[Calls | None], dict[str, Any]]

    def on(self, version: str, tree: Tree, calls: Calls | None = None, **more: Any) -> AbstractContextManager[Any]:
        return released(version, tree(version), **self.kernels(calls), **more)

    def layer(self, load: Any, head_size: int | None = None, **options: Any) -> Layer:
        return Layer(load, getattr(load(self.module), self.cls), head_size or self.tried[0][0], **options)


CUDA = Own(
    "vllm_hwplugin.attention.cuda",
    "CudaFlashAttentionBackend",
    ((512, "NHD"), (320, "HND")),
    lambda calls: {"paged": paged(calls), "flash": (3,)},
)
MUSA = Own(
    "vllm_hwplugin.musa.attention",
    "MusaFlashAttentionBackend",
    ((512, "NHD"), (64, "HND")),
    lambda calls: {"mate": mate(calls)},
)
both = pytest.mark.parametrize("own", [CUDA, MUSA], ids=["CUDA", "MUSA"])
every_version = pytest.mark.parametrize("version", versions("vllm/v1/attention/", "vllm/v1/worker/"))
ends = pytest.mark.parametrize("version", [SUPPORTED[0], SUPPORTED[-1]])


@both
@every_version
@pytest.mark.parametrize(("causal", "tried"), [(True, 0), (False, 1)])
def test_the_right_answer(own: Own, version: str, causal: bool, tried: int, vllm_tree: Tree) -> None:
    calls: Calls = []
    head_size, layout = own.tried[tried]
    with own.on(version, vllm_tree, calls, layout=layout) as load:
        layer = own.layer(load, head_size)
        layer.write(slice(None))
        close(layer.run(layer.metadata(causal)), layer.right(causal=causal))
    assert [call["causal"] for call in calls] == [causal]


@both
@ends
@pytest.mark.parametrize("causal", [True, False])
def test_window_softcap_and_sinks_arrive(own: Own, version: str, causal: bool, vllm_tree: Tree) -> None:
    with own.on(version, vllm_tree) as load:
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]).bfloat16()
        layer = own.layer(load, own.tried[1][0], sliding_window=7, logits_soft_cap=2.0, sinks=sinks)
        layer.write(slice(None))
        close(layer.run(layer.metadata(causal)), layer.right(causal=causal, window=7, cap=2.0, sinks=sinks))


@both
@ends
def test_tokens_of_padding_are_left_out(own: Own, version: str, vllm_tree: Tree) -> None:
    with own.on(version, vllm_tree) as load:
        layer = own.layer(load)
        layer.write(slice(None))
        metadata = layer.metadata(True)
        real = layer.right(causal=True)
        layer.query = torch.cat([layer.query, torch.full_like(layer.query[:2], float("nan"))])
        found = layer.run(metadata)
        close(found[:-2], real)
        assert found[-2:].isnan().all()


@both
@ends
def test_without_a_cache_the_output_is_zero(own: Own, version: str, vllm_tree: Tree) -> None:
    with own.on(version, vllm_tree) as load:
        assert not own.layer(load).run(None).any()


@ends
@pytest.mark.parametrize(
    ("own", "options", "reason"),
    [
        (CUDA, {"alibi_slopes": [0.5]}, "no ALiBi"),
        # Of the rest vLLM asks MUSA's declarations before it makes a layer.
        (MUSA, {"alibi_slopes": [0.5]}, "no ALiBi"),
        (CUDA, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype is fp8"),
        (CUDA, {"attn_type": "encoder_only"}, "attn_type is encoder_only"),
        (CUDA, {"head_size": 520}, "head_size is 520"),
        (CUDA, {"sinks": torch.zeros(3)}, r"sinks have shape \(3,\), expected one for each head: \(4,\)"),
    ],
)
def test_a_layer_that_needs_more_is_refused(
    own: Own, version: str, options: dict[str, Any], reason: str, vllm_tree: Tree
) -> None:
    with own.on(version, vllm_tree) as load, pytest.raises(ValueError, match=reason):
        own.layer(load, **options)


@both
@ends
def test_a_step_that_needs_more_is_refused(own: Own, version: str, vllm_tree: Tree) -> None:
    with own.on(version, vllm_tree) as load:
        layer = own.layer(load)
        metadata = layer.metadata(True)
        for scale in ("output_scale", "output_block_scale"):
            with pytest.raises(NotImplementedError, match="does not quantize its output"):
                layer.run(metadata, **{scale: torch.ones(1)})
        metadata.causal = torch.ones(len(BATCH), dtype=torch.int32)
        with pytest.raises(NotImplementedError, match="one mask for all requests"):
            layer.run(metadata)


@both
@every_version
def test_a_batch_with_an_image_is_refused_and_one_without_is_not(own: Own, version: str, vllm_tree: Tree) -> None:
    with own.on(version, vllm_tree) as load:
        layer = own.layer(load)
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
        with pytest.raises(NotImplementedError, match="--language-model-only"):
            run({0: [], 1: [(0, 3)]})
