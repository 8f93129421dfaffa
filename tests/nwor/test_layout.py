# SPDX-License-Identifier: Apache-2.0
"""Which dimensions of a KV cache count blocks and tokens: the shapes of released attention backends say it."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec  # noqa: E402

from vllm_hwplugin.nwor.layout import UnknownLayout, rows_of  # noqa: E402
from vllm_hwplugin.nwor.reference import ReferenceRows  # noqa: E402
from vllm_hwplugin.nwor.rows import Batch, Rejected  # noqa: E402

from ..released import take  # noqa: E402
from .steps import Layout  # noqa: E402

BLOCKS, TOKENS, HEADS, SIZE = 7, 16, 2, 8
BACKENDS = {
    "FLASH_ATTN": ("flash_attn", "FlashAttentionBackend"),
    "TRITON_ATTN": ("triton_attn", "TritonAttentionBackend"),
    "FLASHINFER": ("flashinfer", "FlashInferBackend"),
    "FLEX_ATTENTION": ("flex_attention", "FlexAttentionBackend"),
}
#: The versions in which a shape changed, up to the last one in which backends state it.
VERSIONS = ("0.20.2", "0.23.0", "0.26.0", "0.28.0")


class Layer(torch.nn.Module):
    """A layer as vLLM leaves it when its cache is bound."""

    def __init__(self, backend: Any, cache: Any) -> None:
        super().__init__()
        self.kv_cache, self._backend = cache, backend

    def get_attn_backend(self) -> Any:
        return self._backend


def spec(tokens: int = TOKENS) -> Any:
    return FullAttentionSpec(block_size=tokens, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float16)


def config(groups: dict[str, Any], blocks: int = BLOCKS) -> Any:
    """One KV cache group for each spec, which names its layers."""
    return types.SimpleNamespace(
        num_blocks=blocks,
        kv_cache_groups=[
            types.SimpleNamespace(layer_names=names.split(), kv_cache_spec=one) for names, one in groups.items()
        ],
    )


def named(name: str, **methods: Any) -> Any:
    return type(name, (), {"get_name": staticmethod(lambda: name), **methods})


def rows_in(cache: Any, backend: Any = None, planned: Any = None, dtype: str = "auto") -> Any:
    """The rows of the one layer that has this cache."""
    layer = Layer(backend or named("FLASH_ATTN"), cache)
    (rows,) = rows_of(config({"a": planned or spec()}), {"a": layer}, dtype, [layer]).rows
    return rows


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_released_backends_shape_says_where_tokens_are(vllm_tree: Callable, version: str, name: str) -> None:
    module, cls = BACKENDS[name]
    text = vllm_tree(version).read(f"vllm/v1/attention/backends/{module}.py")
    given = {"AttentionBackend": object, "kv_cache_uses_per_token_head_scales": lambda dtype: False}
    released = take(text, cls, ("get_kv_cache_shape",), given=given)
    shape = released.get_kv_cache_shape(BLOCKS, TOKENS, HEADS, SIZE)
    rows = rows_in(torch.zeros(shape), named(name, get_kv_cache_shape=staticmethod(released.get_kv_cache_shape)))
    assert rows.rows.shape[:2] == (BLOCKS, TOKENS)
    assert rows.num_bytes == 2 * HEADS * SIZE * 4


@pytest.mark.parametrize("shape", [(BLOCKS, HEADS, TOKENS, 2 * SIZE), (BLOCKS, TOKENS, 2 * HEADS * SIZE)])
def test_caches_of_one_form_for_all_backends_have_tokens_before_their_content(shape: tuple[int, ...]) -> None:
    rows = rows_in(torch.zeros(shape), dtype="fp8")
    assert (rows.rows.shape[:2], rows.num_bytes) == ((BLOCKS, TOKENS), 2 * HEADS * SIZE * 4)


def test_blocks_of_an_attention_kernel_may_be_smaller_than_those_that_are_planned() -> None:
    rows = rows_in(torch.zeros(4 * BLOCKS, HEADS, TOKENS // 4, 2 * SIZE))
    assert (rows.block_size, rows.num_slots) == (TOKENS // 4, BLOCKS * TOKENS)


def test_layers_of_one_group_may_have_specs_of_their_own() -> None:
    """vLLM's `UniformTypeKVCacheSpecs`; a layer's own spec says how many heads and tokens it has."""
    both = types.SimpleNamespace(kv_cache_specs={"a": spec()}, block_size=2 * TOKENS)
    rows = rows_in(torch.zeros(BLOCKS, HEADS, TOKENS, 2 * SIZE), planned=both)
    assert rows.num_slots == BLOCKS * TOKENS


def test_a_shape_is_asked_for_with_the_engines_type_of_cache() -> None:
    """With scales in the page a token has more bytes."""

    def shape(blocks: int, tokens: int, heads: int, size: int, cache_dtype_str: str = "auto") -> tuple[int, ...]:
        return (blocks, 2, tokens, heads, size) if cache_dtype_str == "auto" else (blocks, heads, tokens, 2 * size + 4)

    backend = named("FLASH_ATTN", get_kv_cache_shape=staticmethod(shape))
    cache = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * SIZE + 4, dtype=torch.int8)
    rows = rows_in(cache, backend, dtype="int8_per_token_head")
    assert rows.num_bytes == HEADS * (2 * SIZE + 4)


def test_layers_that_see_parts_of_one_memory_each_have_their_rows() -> None:
    memory = torch.zeros(BLOCKS, 2 * HEADS, TOKENS, 2 * SIZE)
    layers = {
        "all": Layer(named("FLASH_ATTN"), memory),
        "first heads": Layer(named("FLASH_ATTN"), memory[:, :HEADS]),
        "last heads": Layer(named("FLASH_ATTN"), memory[:, HEADS:]),
    }
    groups = [types.SimpleNamespace(layer_names=list(layers), kv_cache_spec=spec())]
    found = rows_of(types.SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=groups), layers, "auto", layers.values())
    assert [rows.layer for rows in found.rows] == list(layers)


@pytest.mark.parametrize("tokens", [4 * TOKENS, TOKENS // 4], ids=["several for a token", "one for several tokens"])
def test_rows_that_are_not_one_for_each_token_are_refused(tokens: int) -> None:
    """A layer may pool the frames of a token, or compress tokens, with the backend of those that do neither."""
    stretched = named("FLASH_ATTN", get_kv_cache_shape=lambda b, t, h, s, cache_dtype_str: (b, h, t * tokens, 2 * s))
    with pytest.raises(UnknownLayout, match=rf"{BLOCKS} blocks of {tokens} rows; .* {BLOCKS} blocks of {TOKENS}"):
        rows_in(torch.zeros(BLOCKS, HEADS, tokens, 2 * SIZE), stretched)


def test_a_cache_of_no_layer_is_refused() -> None:
    layer = Layer(named("FLASH_ATTN"), torch.zeros(BLOCKS, HEADS, TOKENS, 2 * SIZE))
    with pytest.raises(UnknownLayout, match=r"a\.resident: this KV cache belongs to no attention layer"):
        rows_of(config({"a": spec(), "a.resident": spec()}), {"a": layer}, "auto", [layer])


def test_shared_memory_is_found_once_the_drafters_not_and_mambas_left_out() -> None:
    cache = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * SIZE)
    layers = {name: Layer(named("TRITON_ATTN"), cache) for name in ("a", "shares_a", "drafts")}
    layers["m"] = Layer(named("MAMBA"), [cache])
    mamba = MambaSpec(block_size=TOKENS, shapes=((2, 3),), dtypes=(torch.float32,))
    layers["drafts_too"] = Layer(named("TRITON_ATTN"), cache)
    groups = config({"a shares_a drafts": spec(), "m": mamba, "drafts_too": spec()})
    found = rows_of(groups, layers, "auto", [layers[name] for name in ("a", "shares_a", "m")])
    assert [(cache.layer, cache.group) for cache in found.rows] == [("a", 0)]
    assert found.left_out == ("m",)
    assert found.groups == (0, 2)


@pytest.mark.parametrize(
    ("backend", "dtype", "words"),
    [
        ("DEEPSEEK_V32_INDEXER", "auto", "a has the attention backend DEEPSEEK_V32_INDEXER"),
        ("FLASHINFER", "nvfp4", "kv_cache_dtype=nvfp4"),
        ("CPU_ATTN", "auto", "the layout amx"),
    ],
)
def test_where_a_tokens_bytes_are_not_known_is_refused(backend: str, dtype: str, words: str) -> None:
    layer = Layer(named(backend), torch.zeros(BLOCKS, HEADS, TOKENS, 2 * SIZE))
    layer.isa = "amx"
    with pytest.raises(UnknownLayout, match=words):
        rows_of(config({"a": spec()}), {"a": layer}, dtype, [layer])


#: A request: its tokens, of them drafts, and of these rejected.
REQUESTS = st.integers(0, 4).flatmap(
    lambda drafts: st.tuples(st.integers(1 if drafts == 0 else 1 + drafts, 5), st.just(drafts), st.integers(0, drafts))
)


@settings(max_examples=100, deadline=None)
@given(
    groups=st.integers(1, 3),
    layers=st.integers(1, 2),
    tokens=st.sampled_from([1, 4, 16]),
    order=st.sampled_from([(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)]),
    requests=st.lists(REQUESTS, min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_kv_cache_groups_that_share_memory_have_slots_of_their_own(
    groups: int, layers: int, tokens: int, order: tuple[int, ...], requests: list[tuple[int, int, int]], seed: int
) -> None:
    """A hybrid model's groups take turns in one tensor: vLLM gives each block to one of them."""
    torch.manual_seed(seed)
    ends = [*itertools.accumulate(length for length, _, _ in requests)]
    blocks = 1 + -(-groups * ends[-1] // tokens)
    layout = Layout((blocks, 2, tokens, 3), order, 0, 2, torch.int16)
    tensors = [layout.make("cpu") for _ in range(layers)]
    found = {
        f"{group}.{one}": Layer(named("FLASH_ATTN"), tensors[one]) for one in range(layers) for group in range(groups)
    }
    specs = {" ".join(f"{group}.{one}" for one in range(layers)): spec(tokens) for group in range(groups)}
    rows = rows_of(config(specs, blocks), found, "auto", found.values()).rows
    slots = (torch.randperm((blocks - 1) * tokens) + tokens)[: groups * ends[-1]].view(groups, -1)
    batch = Batch(torch.tensor([0, *ends], dtype=torch.int32), dict(enumerate(slots.clone())), len(requests), 4)
    reference = ReferenceRows(rows, batch, keep=True)

    def written(spared: set[int]) -> list[Any]:
        after = [tensor.clone() for tensor in tensors]
        for number, cache in enumerate(after):
            by_slot = cache.movedim(2, 1)
            for token in set(range(ends[-1])) - spared:
                for group, slot in enumerate(slots[:, token].tolist()):
                    by_slot[slot // tokens, slot % tokens] = 1 + token + 100 * group + 1000 * number
        return after

    expected = written({end - 1 - one for end, (_, _, out) in zip(ends, requests, strict=True) for one in range(out)})
    reference.log(len(requests))
    for tensor, content in zip(tensors, written(set()), strict=True):
        tensor.copy_(content)
    reference.restore(Rejected(num_rejected=torch.tensor([out for _, _, out in requests], dtype=torch.int32)))
    assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))
