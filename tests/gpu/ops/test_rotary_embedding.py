# SPDX-License-Identifier: Apache-2.0
"""The kernel on a GPU: bit for bit what the installed vLLM's RotaryEmbedding.forward_static computes there.

Inputs are random anew in every run; a failure shows the seed.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.compile.spec import ROTARY_EMBEDDING  # noqa: E402
from vllm_hwplugin.ops.rotary_embedding import rotary_embedding  # noqa: E402

from ...ops.rotary_shapes import DTYPES, MAX_POSITION, cache, same  # noqa: E402
from .kernel_checks import load_kernel, vllms  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    load_kernel(ROTARY_EMBEDDING)


def _forward_static(*args: Any) -> Any:
    base = pytest.importorskip("vllm.model_executor.layers.rotary_embedding.base")
    return base.RotaryEmbedding.forward_static(*args)


def _cache(rotary_dim: int, dtype: Any) -> Any:
    return cache(rotary_dim, dtype, "cuda")


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout_takes_its_own_path_to_the_same_bits(dtype: Any, neox: bool) -> None:
    def check(query: Any, key: Any, positions: Any, head_size: int, rotary_dim: int) -> None:
        cache = _cache(rotary_dim, dtype)
        flat = positions.flatten()
        expected = [
            _forward_static(
                flat, tensor.reshape(len(flat), -1), None, head_size, rotary_dim, cache, neox
            )[0].reshape(tensor.shape)
            for tensor in (query, key)
        ]  # fmt: skip
        rotary_embedding(positions, query, key, head_size, cache, neox)
        assert same(query, expected[0])
        assert same(key, expected[1])

    def random_of(*shape: int) -> Any:
        return torch.randn(shape, device="cuda").to(dtype)

    positions = torch.randint(0, MAX_POSITION, (37,), device="cuda")
    # Heads that have a dimension of their own; then heads before tokens in memory.
    check(random_of(37, 5, 64), random_of(37, 2, 64), positions, 64, 64)
    check(random_of(5, 37, 64).transpose(0, 1), random_of(2, 37, 64).transpose(0, 1), positions, 64, 64)
    # Nothing here is a multiple of 16 bytes: sizes, then strides, then the first element.
    check(random_of(37, 5 * 30), random_of(37, 30), positions, 30, 22)
    check(random_of(37, 5 * 64 + 1)[:, :-1], random_of(37, 64 + 3)[:, :-3], positions, 64, 64)
    check(random_of(37, 5 * 64 + 8)[:, 1:-7], random_of(37, 64 + 8)[:, 3:-5], positions, 64, 64)
    # More pairs than a block has threads.
    check(random_of(37, 2 * 514), random_of(37, 514), positions, 514, 514)
    # Batches, and batches of one token, whose stride means nothing.
    batches = torch.randint(0, MAX_POSITION, (4, 9), device="cuda")
    check(random_of(4, 9, 5 * 64), random_of(4, 9, 64), batches, 64, 64)
    wide = random_of(6, 8 * 64)
    check(wide[:, : 5 * 64].unsqueeze(1), wide[:, 5 * 64 : 6 * 64].unsqueeze(1), positions[:6, None], 64, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [5, 15000])
def test_a_float32_cache_rounds_once_at_an_offset_and_backwards(dtype: Any, tokens: int) -> None:
    """What vLLM's DeepSeek V4 layers ask for: heads of 512 whose last 64 elements are rotated."""
    common = pytest.importorskip("vllm.model_executor.layers.rotary_embedding.common")
    cache = _cache(64, torch.float32)
    positions = torch.randint(0, MAX_POSITION, (tokens,), device="cuda")
    cos, sin = cache[positions].chunk(2, dim=-1)
    # Heads that lie at multiples of 16 bytes, and heads that do not.
    for neox, inverse, pitch in itertools.product([True, False], [True, False], [512, 513]):
        query = torch.randn(tokens, 9, pitch, device="cuda").to(dtype)[..., :512]
        expected = query.clone()
        expected[..., 448:] = common.ApplyRotaryEmb.forward_static(
            query[..., 448:], cos, -sin if inverse else sin, neox, True
        )
        rotary_embedding(positions, query, None, 512, cache, neox, 448, inverse)
        assert same(query, expected)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_a_half_type_is_rounded_as_pytorch_rounds_it(dtype: Any, neox: bool) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, device="cuda").to(torch.int16).view(dtype)
    partner = torch.randperm(len(every), device="cuda")
    query = torch.stack([every, every[partner]]).view(2, 1024, 64).permute(1, 0, 2).reshape(1024, 128).contiguous()
    if not neox:
        query = query.view(1024, 2, 64).transpose(1, 2).reshape(1024, 128).contiguous()
    positions = torch.randint(0, MAX_POSITION, (1024,), device="cuda")
    cache = _cache(128, dtype)
    expected, _ = _forward_static(positions, query, None, 128, 128, cache, neox)
    rotary_embedding(positions, query, None, 128, cache, neox)
    assert same(query, expected)


@pytest.mark.sanitizer
def test_nothing_beside_the_tensors_is_written() -> None:
    space = torch.full((64 + 7 * 3 * 64 + 64,), float("nan"), device="cuda", dtype=torch.bfloat16)
    query = space[64:-64].view(7, 192)[:, 64:128]
    query.copy_(torch.ones_like(query))
    rotary_embedding(torch.arange(7, device="cuda"), query, None, 64, _cache(64, torch.bfloat16), True)
    assert not query.isnan().any()
    assert int(space.isnan().sum()) == len(space) - 7 * 64


@pytest.mark.sanitizer
@pytest.mark.parametrize(("tokens", "heads", "rotary_dim"), [(0, 2, 64), (5, 0, 64), (5, 2, 0)])
def test_nothing_to_rotate_is_no_error(tokens: int, heads: int, rotary_dim: int) -> None:
    query = torch.randn(tokens, heads * 64, device="cuda")
    before = query.clone()
    positions = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    rotary_embedding(positions, query, query.clone(), 64, _cache(64, torch.float32)[:, :rotary_dim], True)
    assert torch.equal(query, before)


def _mistakes() -> dict[str, tuple[dict[str, Any], str]]:
    def ones(*shape: int, dtype: Any = torch.float32) -> Any:
        return torch.ones(shape, dtype=dtype, device="cuda")

    long = torch.arange(10, device="cuda")
    return {
        "positions of another type": ({"positions": long[:5].int()}, "positions is Int; expected Long"),
        "positions with gaps": ({"positions": long[::2]}, "positions has to be contiguous"),
        "positions elsewhere": ({"positions": torch.arange(5)}, "positions is not on query's device, cuda:0"),
        "other tokens": ({"positions": long[:4]}, r"query.size\(0\) is 5; expected 4, as positions has"),
        "query of another type": ({"query": ones(5, 16, dtype=torch.int32)}, "query is Int; expected Float, Half or"),
        "key of another type": ({"key": ones(5, 8, dtype=torch.half)}, "key is Half; expected query's type, Float"),
        "key elsewhere": ({"key": torch.ones(5, 8)}, "key is not on query's device, cuda:0"),
        "key of another size": ({"key": ones(5, 12)}, "key has 12 elements a token; expected a multiple of"),
        "heads of another size": ({"query": ones(5, 2, 4)}, "the heads of query have 4 elements; expected head_size=8"),
        "gaps in query": ({"query": ones(5, 32)[:, ::2]}, "query has stride 2 in its last dimension; expected 1"),
        "query that overlaps": ({"query": ones(1, 16).expand(5, 16)}, r"query.stride\(0\) is 0, so its elements"),
        "no head size": ({"head_size": 0}, "head_size is 0; expected a positive number"),
        "cache of another type": (
            {"cos_sin_cache": ones(12, 8, dtype=torch.half)},
            "cos_sin_cache is Half; expected query's type, Float",
        ),
        "cache elsewhere": ({"cos_sin_cache": torch.ones(12, 8)}, "cos_sin_cache is not on query's device"),
        "odd cache": ({"cos_sin_cache": ones(12, 7)}, "rotary_dim is 7; expected an even number"),
        "large cache": ({"cos_sin_cache": ones(12, 16)}, "rotary_dim is 16; expected an even number of at most"),
        "flat cache": ({"cos_sin_cache": ones(8)}, "cos_sin_cache has 1 dimensions; expected"),
        "turned cache": ({"cos_sin_cache": ones(8, 12).t()}, "cos_sin_cache has stride 12 in its last dimension"),
        "offset": ({"rope_dim_offset": 1}, "rope_dim_offset is 1; expected 0 to head_size - rotary_dim, 0"),
    }


def test_a_mistake_is_an_error_that_says_what_was_expected_and_writes_nothing() -> None:
    for name, (changes, words) in _mistakes().items():
        good = {
            "positions": torch.arange(5, device="cuda"),
            "query": torch.randn(5, 16, device="cuda"),
            "key": torch.randn(5, 8, device="cuda"),
            "head_size": 8,
            "cos_sin_cache": _cache(8, torch.float32),
            "is_neox": True,
        }
        arguments = {**good, **changes}
        before = {key: value.clone() for key, value in arguments.items() if isinstance(value, torch.Tensor)}
        with pytest.raises(RuntimeError, match=f"rotary_embedding: {words}"):
            rotary_embedding(**arguments)
        assert all(torch.equal(arguments[key], value) for key, value in before.items()), name
        rotary_embedding(**good)


def test_vllms_own_operation_has_this_schema_and_differs_by_roundings_only() -> None:
    theirs = vllms("rotary_embedding")
    ours = torch.ops.hwplugin.rotary_embedding.default
    assert str(ours._schema) == str(theirs._schema).replace("_C::", "hwplugin::", 1)
    cache = _cache(128, torch.float32)
    for neox, inverse in itertools.product([True, False], [True, False]):
        positions = torch.randint(0, MAX_POSITION, (65,), device="cuda")
        query, key = (torch.randn(65, heads * 128, device="cuda").bfloat16() for heads in (16, 2))
        expected = query.clone(), key.clone()
        theirs(positions, *expected, 128, cache, neox, 0, inverse)
        ours(positions, query, key, 128, cache, neox, 0, inverse)
        for found, wanted in zip((query, key), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=2.0**-20, rtol=2.0**-7)
