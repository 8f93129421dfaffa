# SPDX-License-Identifier: Apache-2.0
"""Kernels of linear layers and norms that overlap: against float32, and the same bits however they were launched."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("vllm")

from torch.nn import functional as F  # noqa: E402

from vllm_hwplugin.linear import operations  # noqa: E402
from vllm_hwplugin.ops.compile.spec import KERNELS  # noqa: E402

from ..ops.kernel_checks import load_kernel  # noqa: E402

pytestmark = pytest.mark.gpu

#: Layers of Qwen3-8B, and of Qwen3-0.6B, whose hidden size is 1024: outputs, inputs, whether an activation follows.
LAYERS = [
    (6144, 4096, False),
    (4096, 4096, False),
    (24576, 4096, True),
    (4096, 12288, False),
    (4096, 1024, False),
    (1024, 2048, False),
    (6144, 1024, True),
    (1024, 3072, False),
    (151936, 1024, False),
]


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("written for Hopper")
    load_kernel(KERNELS["skinny_linear"])


def linear(x: Any, weight: Any, gated: bool, tile: Any, *, overlap: bool) -> Any:
    out = torch.full((len(x), len(weight) // (2 if gated else 1)), float("nan"), device="cuda", dtype=torch.bfloat16)
    torch.ops.hwplugin.skinny_linear(out, x, weight, gated, *tile, overlap)
    return out


def apart(found: Any, expected: Any) -> float:
    """The norm of the difference, by that of what is expected."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("outputs", "inputs", "gated"), LAYERS)
def test_sums_are_as_exact_as_cublass_and_the_same_bits_at_each_call(outputs: int, inputs: int, gated: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02
    for tokens in range(1, operations.MOST_TOKENS + 1):
        # Rows that lie apart, as those of a part of qkv do.
        x = torch.randn(tokens, inputs + 264, device="cuda", dtype=torch.bfloat16)[:, 8 : 8 + inputs]
        expected = x.float() @ weight.float().t()
        if gated:
            gate, up = expected.bfloat16().float().chunk(2, 1)
            expected = F.silu(gate) * up
        for tile in operations.TILES if tokens in (1, 8, 9, 16, 17, 32) else [operations.tile_for(outputs, inputs)]:
            if outputs % tile[0] or inputs % tile[1]:
                continue
            found = linear(x, weight, gated, tile, overlap=True)
            assert apart(found, expected) < 5e-3, (tokens, tile)
            for overlap in (False, True, True):
                assert torch.equal(linear(x, weight, gated, tile, overlap=overlap), found), (tokens, tile)


@pytest.mark.parametrize("hidden", [1024, 1280, 2560, 4096, 8192])
@pytest.mark.parametrize("tokens", [1, 16, 3000])
def test_norms_round_once(hidden: int, tokens: int) -> None:
    x, residual = torch.randn(2, tokens, hidden, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(hidden, device="cuda", dtype=torch.bfloat16) + 0.5
    found, total = operations.add_rms_norm(x, residual, weight, 1e-6)
    added = x.float() + residual.float()
    assert torch.equal(total, added.bfloat16())
    assert apart(found, F.rms_norm(added, (hidden,), weight.float(), 1e-6)) < 3e-3
    assert apart(operations.rms_norm(x, weight, 1e-6), F.rms_norm(x.float(), (hidden,), weight.float(), 1e-6)) < 3e-3


@pytest.mark.parametrize("tokens", [1, 4, 16, 32])
def test_a_graph_of_layers_that_overlap_gives_the_bits_of_one_in_which_they_do_not(tokens: int) -> None:
    torch.manual_seed(0)
    sizes = {"qkv": (2048, 1024), "o": (1024, 1024), "both": (6144, 1024), "down": (1024, 3072)}
    stack = [
        {name: torch.randn(*size, device="cuda", dtype=torch.bfloat16) * 0.02 for name, size in sizes.items()}
        for _ in range(8)
    ]
    start, scale = (torch.randn(tokens, 1024, device="cuda", dtype=torch.bfloat16), torch.ones(1024, device="cuda"))
    scale = scale.bfloat16()

    def layer(x: Any, weight: Any, gated: bool, *, overlap: bool) -> Any:
        tile = operations.tile_for(*weight.shape)
        assert tile is not None
        out = x.new_empty(tokens, len(weight) // (2 if gated else 1))
        torch.ops.hwplugin.skinny_linear(out, x, weight, gated, *tile, overlap)
        return out

    def norm(x: Any, residual: Any, *, overlap: bool) -> Any:
        out, total = torch.empty_like(residual), torch.empty_like(residual)
        torch.ops.hwplugin.skinny_norm(out, total, x, residual, scale, 1e-6, overlap)
        return out, total

    def forward(*, overlap: bool) -> Any:
        found, residual = torch.zeros_like(start), start
        for one in stack:
            x, residual = norm(found, residual, overlap=overlap)
            heads = layer(x, one["qkv"], False, overlap=overlap)[:, :1024]
            x, residual = norm(layer(heads, one["o"], False, overlap=overlap), residual, overlap=overlap)
            found = layer(layer(x, one["both"], True, overlap=overlap), one["down"], False, overlap=overlap)
        return norm(found, residual, overlap=overlap)[0]

    expected = forward(overlap=False)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward(overlap=True)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = forward(overlap=True)
    for _ in range(300):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
