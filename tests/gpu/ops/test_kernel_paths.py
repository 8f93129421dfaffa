# SPDX-License-Identifier: Apache-2.0
"""Every kernel that is compiled, launched once on tensors as small as its path allows: what `compute-sanitizer` reads.

The contents are such that one right answer is known without a reference, and the tensors such that they end where the
last thread reads or writes. That a path takes the kernel it is meant for is tested, too: all of them together have to
be all kernels in the libraries.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops import (  # noqa: E402
    fused_qk_norm_rope,
    merge_attn_states,
    rms_norm_dynamic_per_token_quant,
    rotary_embedding,
    silu_and_mul_per_block_quant,
    topk_softmax,
)
from vllm_hwplugin.ops.compile import torch_build  # noqa: E402
from vllm_hwplugin.ops.compile.jit import provide  # noqa: E402
from vllm_hwplugin.ops.compile.spec import KERNELS  # noqa: E402

from .kernel_checks import load_kernel  # noqa: E402

pytestmark = pytest.mark.gpu

HALVES = (torch.bfloat16, torch.float16)
TYPES = (*HALVES, torch.float32)
FLOAT8 = torch.float8_e4m3fn
QUANTISED = (FLOAT8, torch.int8)
LARGEST = {FLOAT8: 448.0, torch.int8: 127.0}
NAN = float("nan")


def _full(shape: tuple[int, ...], value: float, dtype: Any = torch.float32) -> Any:
    return torch.full(shape, value, device="cuda").to(dtype)


def _unlike(shape: tuple[int, ...], dtype: Any) -> Any:
    """Of a quantised type: what no right answer is."""
    return torch.full(shape, 0x7F if dtype == FLOAT8 else -128, dtype=torch.int8, device="cuda").view(dtype)


def _all(tensor: Any, value: float) -> bool:
    return bool((tensor.float() == value).all())


def _near(tensor: Any, value: float, bound: float = 2.0**-7) -> bool:
    return bool(((tensor.float() - value).abs() <= bound * abs(value)).all())


def _fused_qk_norm_rope(dtype: Any) -> None:
    """Weights are 0, and so are query and key; the value is as it was."""
    # Tokens, heads of query, key and value, head size, rotated elements.
    paths = {
        "element by element": (5, 3, 2, 1, 80, 20),
        "heads of 128": (5, 3, 2, 1, 128, 128),
        "heads of 512, a part rotated": (5, 3, 2, 1, 512, 64),
        "heads of 16": (5, 3, 2, 1, 16, 16),
        "heads of 128, two of five a thread": (26215, 3, 2, 1, 128, 128),
        "heads of 256, two of five a thread": (13109, 3, 2, 1, 256, 64),
    }
    for (words, path), cache_type, neox in itertools.product(paths.items(), (dtype, torch.float32), [True, False]):
        tokens, queries, keys, values, size, rotated = path
        qkv = _full((tokens, (queries + keys + values) * size), 1.0, dtype)
        weight = _full((size,), 0.0, dtype)
        cache = _full((3, rotated), 1.0, cache_type)
        positions = torch.full((tokens,), 2, device="cuda")
        fused_qk_norm_rope.fused_qk_norm_rope(
            qkv, queries, keys, values, size, 1e-6, weight, weight.clone(), cache, neox, positions
        )  # fmt: skip
        assert _all(qkv[:, : -values * size], 0.0), (words, cache_type, neox)
        assert _all(qkv[:, -values * size :], 1.0), (words, cache_type, neox)


def _merge_attn_states(dtype: Any) -> None:
    """Both parts are 1 with the same weight; what the prefix has beyond the context is not read."""
    # Tokens, heads, head size, elements between heads.
    paths = {
        "rows that fill no block": (33, 5, 80, 80),
        "more threads than packs": (7, 3, 8, 8),
        "heads in longer rows": (33, 16, 128, 192),
        "several rounds": (3, 2, 8192, 8192),
    }
    for (words, path), scaled, context in itertools.product(paths.items(), [False, True], [None, 2]):
        tokens, heads, size, pitch = path
        known = tokens if context is None else context
        prefix, suffix = (_full((tokens, heads, pitch), 1.0, dtype)[..., :size] for _ in range(2))
        prefix[known:] = NAN
        lses = [_full((heads, tokens), 0.0) for _ in range(2)]
        output = _full((tokens, heads, pitch), NAN, FLOAT8 if scaled else dtype)[..., :size]
        lse = _full((heads, tokens), NAN)
        scale = _full((1,), 1.0) if scaled else None
        merge_attn_states.merge_attn_states(output, lse, prefix, lses[0], suffix, lses[1], context, scale)
        assert _all(output, 1.0), (words, scaled, context)
        assert _near(lse[:, :known], math.log(2.0)), (words, scaled, context)
        assert _all(lse[:, known:], 0.0), (words, scaled, context)


def _topk_softmax(dtype: Any) -> None:
    """All experts are alike: the first ones are chosen, each with the same weight."""
    index_types = itertools.cycle([torch.int32, torch.int64, torch.uint32])
    # Rows that no warp divides, more than which a part of a warp takes each; the experts that a kernel is for.
    paths = [(2049, most) for most in (8, 16, 32, 64, 128, 256)]
    paths += [(5, most) for most in (32, 64, 128, 256, 384, 512, 1024, 1504)]
    for (tokens, most), less, biased in itertools.product(paths, [0, 3, 16], [False, True]):
        # As many as there is place for; some fewer, which no wide load divides; as many in rows that are apart.
        experts = most - less % 16
        gating = _full((tokens, most + less if less == 16 else experts), 0.0, dtype)[:, :experts]
        topk = min(experts, 40)
        weights = _full((tokens, topk), NAN)
        indices = torch.full((tokens, topk), 12345, dtype=next(index_types), device="cuda")
        places = torch.full((tokens, topk), -12345, dtype=torch.int32, device="cuda")
        bias = _full((experts,), 0.5) if biased else None
        padding = torch.arange(tokens, device="cuda") % 2 == 1 if less else None
        topk_softmax.topk_softmax(weights, indices, places, gating, not less, bias, padding)
        slots = torch.arange(topk, device="cuda").expand(tokens, topk)
        wanted = slots if padding is None else slots.masked_fill(padding[:, None], -1)
        found = indices.view(torch.int32) if indices.dtype == torch.uint32 else indices
        assert torch.equal(found.long(), wanted), (tokens, experts, biased)
        assert torch.equal(places.long(), slots * tokens + torch.arange(tokens, device="cuda")[:, None]), experts
        assert _near(weights, 1 / (experts if less else topk), 2.0**-20), (tokens, experts, biased)


def _rms_norm_dynamic_per_token_quant(dtype: Any) -> None:
    """All elements of a row are alike, and so each is the largest number."""
    width = 16 // dtype.itemsize
    paths = {
        "element by element": (5, 1025),
        "too long for registers": (5, 2049 * width),
        "a chunk a lane": (5, 9 * width),
        "four chunks a lane": (5, 100 * width),
        "a chunk a thread": (5, 129 * width),
        "two chunks a thread": (5, 1027 * width),
        "two chunks a thread, many rows": (513, 131 * width),
        "four chunks a thread": (513, 515 * width),
    }
    for (words, (rows, hidden)), quantised, added in itertools.product(paths.items(), QUANTISED, [False, True]):
        given = _full((rows, hidden), 1.0, dtype)
        residual = _full((rows, hidden), 1.0, dtype) if added else None
        result, scale = _unlike((rows, hidden), quantised), _full((rows, 1), NAN)
        bound = _full((1,), 1.0) if quantised == FLOAT8 else None
        rms_norm_dynamic_per_token_quant.rms_norm_dynamic_per_token_quant(
            result, given, _full((hidden,), 1.0, dtype), scale, 1e-6, bound, residual
        )
        assert _all(result, LARGEST[quantised]), (words, quantised, added)
        assert _near(scale, 1 / LARGEST[quantised]), (words, quantised, added)
        assert residual is None or _all(residual, 2.0), (words, quantised, added)


def _silu_and_mul_per_block_quant(dtype: Any) -> None:
    """All elements of a group are alike, and so each is the largest number."""
    # Tokens, hidden size, elements before the first one.
    paths = {
        "element by element": (5, 384, 1),
        "8 bytes": (5, 384, 0),
        "8 bytes, blocks of unequal size": (3, 18944, 0),
        "16 bytes": (2049, 384, 0),
        "16 bytes of two rows": (10923, 384, 0),
    }
    value = 1 / (1 + math.exp(-1))
    for (words, (tokens, hidden, offset)), quantised, group, turned in itertools.product(
        paths.items(), QUANTISED, [64, 128], [False, True]
    ):
        given = _full((offset + tokens * 2 * hidden,), 1.0, dtype)[offset:].view(tokens, 2 * hidden)
        out, groups = _unlike((tokens, hidden), quantised), hidden // group
        scales = _full((groups, tokens), NAN).t() if turned else _full((tokens, groups), NAN)
        bound = _full((1,), 1.0) if quantised == FLOAT8 else None
        silu_and_mul_per_block_quant.silu_and_mul_per_block_quant(out, given, scales, group, bound, turned)
        assert _all(out, LARGEST[quantised]), (words, quantised, group, turned)
        assert _near(scales, value / LARGEST[quantised]), (words, quantised, group, turned)


def _rotary_embedding(dtype: Any) -> None:
    """Every cosine and sine is 1, and so is every element: the first of a pair is 0 then, and the second is 2."""
    for size, cache_type in itertools.product((80, 514), (dtype, torch.float32)):
        query, key = _full((5, 3 * size), 1.0, dtype), _full((5, 2, size), 1.0, dtype)
        positions = torch.full((5,), 2, device="cuda")
        rotary_embedding.rotary_embedding(positions, query, key, size, _full((3, size), 1.0, cache_type), False)
        for tensor in (query.view(5, 3, size), key):
            assert _all(tensor[..., ::2], 0.0), (size, cache_type)
            assert _all(tensor[..., 1::2], 2.0), (size, cache_type)


PATHS: dict[str, tuple[Callable[[Any], None], tuple[Any, ...]]] = {
    "fused_qk_norm_rope": (_fused_qk_norm_rope, HALVES),
    "merge_attn_states": (_merge_attn_states, TYPES),
    "topk_softmax": (_topk_softmax, TYPES),
    "rotary_embedding": (_rotary_embedding, TYPES),
    "rms_norm_dynamic_per_token_quant": (_rms_norm_dynamic_per_token_quant, TYPES),
    "silu_and_mul_per_block_quant": (_silu_and_mul_per_block_quant, HALVES),
}


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for name, (_, types) in PATHS.items()
        for dtype in types
    ],
)
def test_every_path_writes_what_it_has_to(name: str, dtype: Any) -> None:
    load_kernel(KERNELS[name])
    PATHS[name][0](dtype)


@pytest.mark.parametrize("name", PATHS)
def test_the_paths_are_all_kernels_of_the_library(name: str) -> None:
    load_kernel(KERNELS[name])
    run, types = PATHS[name]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for dtype in types:
            run(dtype)
        torch.cuda.synchronize()
    compiled = set(_compiled(provide(KERNELS[name], torch_build.installed()).read_bytes()))
    ran = {_short(event.name) for event in profile.events()}
    assert compiled, "no kernel was found in the library"
    assert compiled <= ran, f"not launched: {sorted(compiled - ran)}"


def _compiled(library: bytes) -> Iterator[str]:
    """The kernels by the names under which the library registers them with CUDA."""
    for mangled in set(re.findall(rb"\0(_ZN\d+_GLOBAL__N_\w*?kernelI\w+)(?=\0)", library)):
        yield _short(mangled.decode())


def _short(name: str) -> str:
    """A kernel's name with its template's arguments, as profilers of several versions have it."""
    if name.startswith("_Z"):
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
        demangle.restype = ctypes.c_char_p
        name = demangle(name.encode(), None, None, None).decode()
    return name.replace("(anonymous namespace)::", "").removeprefix("void ").partition("(")[0].replace(" ", "")
