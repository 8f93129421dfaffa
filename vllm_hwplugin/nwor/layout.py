# SPDX-License-Identifier: Apache-2.0
"""Where KV caches keep the bytes of a token: one strided view of bytes for each part of each layer.

The strides of the layers' tensors tell, for any order of dimensions, packed formats, and scales in the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_hwplugin.base.errors import HwpluginError

#: Attention backends that store a token's keys and values at its slot, in bytes that no other token shares. Sparse
#: attention is missing: an indexer stores its scales behind all values of a block.
_BACKENDS: Final = frozenset(
    (
        "FLASH_ATTN",
        "TRITON_ATTN",
        "FLASHINFER",
        "FLEX_ATTENTION",
        "FLASH_ATTN_MLA",
        "FLASHMLA",
        "TRITON_MLA",
        "CUTLASS_MLA",
        "FLASHINFER_MLA",
        "TOKENSPEED_MLA",
    )
)
_CPU: Final = "CPU_ATTN"
#: Prefixes of ``CacheConfig.cache_dtype`` whose tokens share no bytes. nvfp4 is missing: its scales are swizzled.
_CACHE_DTYPES: Final = ("auto", "float", "half", "bfloat16", "fp8", "int8", "int4")
_ALIGNMENTS: Final = (16, 4, 1)


class UnknownLayout(HwpluginError, RuntimeError):
    """A KV cache's layout does not tell where a token's bytes are."""


@dataclass(frozen=True)
class CacheRows:
    """A part of a layer's KV cache, token by token.

    Attributes:
        layer: name of the first layer that uses it; others may share it.
        group: index of the layer's KV cache group, which has its slots.
        rows: [blocks, tokens of a block, outer, inner, run] uint8; the last dimension is contiguous.
    """

    layer: str
    group: int
    rows: torch.Tensor

    @property
    def block_size(self) -> int:
        return int(self.rows.shape[1])

    @property
    def num_slots(self) -> int:
        return int(self.rows.shape[0]) * self.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of one token."""
        return int(self.rows[0, 0].numel())

    @property
    def word(self) -> int:
        """Bytes that one access can move at the start of any token's row."""
        numbers = (self.rows.data_ptr(), self.rows.shape[4], *self.rows.stride()[:4])
        return next(word for word in _ALIGNMENTS if all(number % word == 0 for number in numbers))


@dataclass(frozen=True)
class ModelCaches:
    """A model's KV caches.

    Attributes:
        rows: of layers with keys and values, each piece of memory once.
        left_out: names of layers whose state has no row for each token, such as Mamba's.
        groups: KV cache groups that have keys and values, the drafter's included.
    """

    rows: tuple[CacheRows, ...]
    left_out: tuple[str, ...]
    groups: tuple[int, ...]


def rows_of(
    kv_cache_config: Any, layers: Mapping[str, Any], cache_dtype: str, wanted: Iterable[torch.nn.Module]
) -> ModelCaches:
    """Return where the wanted layers keep the bytes of a token.

    `layers` is ``CompilationConfig.static_forward_context``, whose layers have their ``kv_cache``.

    Raises:
        UnknownLayout: the layout of a wanted layer's keys and values is unknown.
    """
    if not cache_dtype.startswith(_CACHE_DTYPES):
        raise UnknownLayout(f"with kv_cache_dtype={cache_dtype} tokens may share bytes")
    modules = {id(module) for module in wanted}
    rows: dict[tuple[Any, ...], CacheRows] = {}
    left_out: list[str] = []
    groups: dict[int, None] = {}
    for group, kv_cache_group in enumerate(kv_cache_config.kv_cache_groups):
        for name in kv_cache_group.layer_names:
            if (layer := layers.get(name)) is None:
                # vLLM also stores caches that belong to no layer, such as offloaded ones.
                raise UnknownLayout(f"{name}: this KV cache belongs to no attention layer, so its layout is unknown")
            spec = getattr(kv_cache_group.kv_cache_spec, "kv_cache_specs", {}).get(name, kv_cache_group.kv_cache_spec)
            if isinstance(spec, AttentionSpec):
                groups[group] = None
            elif id(layer) in modules:
                left_out.append(name)
                continue
            if id(layer) not in modules:
                continue
            for part in _parts(name, layer, spec, cache_dtype):
                _check_slots(name, part, kv_cache_config.num_blocks, spec.block_size)
                key = (group, part.data_ptr(), part.shape, part.stride())
                rows.setdefault(key, CacheRows(name, group, part))
    return ModelCaches(tuple(rows.values()), tuple(left_out), tuple(groups))


def _check_slots(name: str, rows: torch.Tensor, num_blocks: int, block_size: int) -> None:
    """Refuse a cache without one row per token: some models' differ."""
    if rows.shape[0] * rows.shape[1] != num_blocks * block_size:
        raise UnknownLayout(
            f"the KV cache of {name} has {rows.shape[0]} blocks of {rows.shape[1]} rows; expected a row for each token "
            f"of {num_blocks} blocks of {block_size} tokens"
        )


def _parts(name: str, layer: Any, spec: Any, cache_dtype: str) -> Iterator[torch.Tensor]:
    backend, cache = layer.get_attn_backend(), layer.kv_cache
    if not isinstance(cache, torch.Tensor):
        raise UnknownLayout(f"the KV cache of {name} is a {type(cache).__name__}, expected one tensor")
    if backend.get_name() == _CPU:
        yield from _cpu_parts(name, layer, cache)
    elif backend.get_name() not in _BACKENDS:
        raise UnknownLayout(f"{name} has the attention backend {backend.get_name()}, whose cache layout is unknown")
    else:
        yield as_rows(name, cache, *_block_and_token(name, backend, spec, cache, cache_dtype))


def _block_and_token(name: str, backend: Any, spec: Any, cache: torch.Tensor, cache_dtype: str) -> tuple[int, int]:
    """Return the dimensions that count blocks and tokens of a block."""
    if not hasattr(backend, "get_kv_cache_shape"):
        # From 0.29 on all caches are [blocks, heads, tokens, content]; MLA layers drop the single head.
        return 0, cache.dim() - 2

    def shape(blocks: int, tokens: int) -> tuple[int, ...]:
        sizes: tuple[int, ...] = backend.get_kv_cache_shape(
            blocks, tokens, spec.num_kv_heads, spec.head_size, cache_dtype_str=cache_dtype
        )
        return sizes

    plain, more_blocks, more_tokens = shape(3, 128), shape(5, 128), shape(3, 256)
    by_block = [i for i, (size, other) in enumerate(zip(plain, more_blocks, strict=True)) if size != other]
    by_token = [i for i, (size, other) in enumerate(zip(plain, more_tokens, strict=True)) if size != other]
    if len(plain) != cache.dim() or len(by_block) != 1 or len(by_token) != 1:
        raise UnknownLayout(
            f"the KV cache of {name} is {tuple(cache.shape)}, which does not fit {backend.get_name()}'s shape "
            f"for 3 blocks of 128 tokens, {plain}"
        )
    return by_block[0], by_token[0]


def _cpu_parts(name: str, layer: Any, cache: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield views of keys (by element) and of values (by token)."""
    # AMX interleaves tokens within a word.
    if (isa := getattr(layer, "isa", None)) not in ("vec", "vec16"):
        raise UnknownLayout(f"{name} has CPU_ATTN with the layout {isa}, which is unknown; expected vec or vec16")
    blocks, heads, tokens, content = cache.shape
    size = content // 2
    keys, values = cache.view(blocks, heads, 2, tokens, size).unbind(2)
    strides = keys.stride()[:2]
    by_element = keys.as_strided((blocks, heads, size, tokens), (*strides, tokens, 1))
    yield as_rows(name, by_element, 0, 3)
    yield as_rows(name, values, 0, 2)


def as_rows(name: str, cache: torch.Tensor, block: int, token: int) -> torch.Tensor:
    """Return a view as bytes: [blocks, block's tokens, outer, inner, run].

    `block` and `token` are the dimensions of `cache` that count blocks and tokens of a block.

    Raises:
        UnknownLayout: a token's bytes lie in more than two dimensions of runs.
    """
    element = cache.element_size()
    run = element
    outer: list[tuple[int, int]] = []
    others = [(cache.stride(i), cache.shape[i]) for i in range(cache.dim()) if i not in (block, token)]
    for stride, size in sorted(others):
        if size == 1:
            continue
        if stride * element == run and not outer:
            run *= size
        else:
            outer.append((size, stride * element))
    if len(outer) > 2:
        raise UnknownLayout(
            f"the KV cache of {name}, {tuple(cache.shape)} with strides {cache.stride()}, has a token's bytes in runs "
            f"of {run} by {' by '.join(str(size) for size, _ in outer)}; expected at most two dimensions of runs"
        )
    outer += [(1, 0)] * (2 - len(outer))
    (inner_size, inner_stride), (outer_size, outer_stride) = outer
    shape = (cache.shape[block], cache.shape[token], outer_size, inner_size, run)
    strides = (cache.stride(block) * element, cache.stride(token) * element, outer_stride, inner_stride, 1)
    view = torch.empty(0, dtype=torch.uint8, device=cache.device)
    return view.set_(cache.untyped_storage(), cache.storage_offset() * element, shape, strides)
