# SPDX-License-Identifier: Apache-2.0
"""Blocks of layers that share KV cache memory do not overlap, when the layers have different backends.

The runner's functions that shape the memory, and the shapes of the backends, are executed as they were released.
"""

from __future__ import annotations

import ast
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm_hwplugin.spec_decode import dflash_draft_backend  # noqa: E402

from ..released import take, text_of  # noqa: E402
from .attention_host import BACKEND_CLASSES  # noqa: E402

GATE = "VLLM_HWPLUGIN_DFLASH_DRAFT_BACKEND"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"
BACKENDS = "vllm/v1/attention/backends/"
BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 6, 16, 2, 8
# The shapes of some backends depend on it.
CACHE_DTYPE = "fp8"


@dataclass(frozen=True)
class Spec:
    """Stands in for `AttentionSpec`."""

    block_size: int = BLOCK_SIZE
    num_kv_heads: int = HEADS
    head_size: int = HEAD_SIZE
    dtype: Any = torch.bfloat16
    page_size_padded: int | None = None

    @property
    def storage_block_size(self) -> int:
        return self.block_size

    @property
    def page_size_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize


class MambaSpec:
    pass


@pytest.fixture
def runner(vllm_tree: Callable, notes, monkeypatch: pytest.MonkeyPatch):
    """`runner(version, groups, shared, ...)`: the cache of each layer; a group maps layers to their backends."""
    monkeypatch.setattr("vllm.v1.kv_cache_interface.AttentionSpec", Spec)

    def caches(
        version: str,
        groups: list[dict[str, str]],
        shared: list[list[str]],
        *,
        layout: str = "NHD",
        patched: bool = True,
    ) -> dict[str, torch.Tensor]:
        tree, spec = vllm_tree(version), Spec()
        cls = take(
            text_of(tree, RUNNER, **({} if patched else {GATE: "off"})),
            "GPUModelRunner",
            {
                "_reshape_kv_cache_tensors",
                "_update_hybrid_attention_mamba_layout",
                "_kv_cache_spec_attn_group_iterator",
            },
            given={
                "torch": torch,
                "AttentionSpec": Spec,
                "MambaSpec": MambaSpec,
                "get_dtype_size": lambda dtype: dtype.itemsize,
                "layouts_clash": dflash_draft_backend.layouts_clash,
                **{name: type(name, (), {}) for name in mixins(tree)},
            },
        )
        made = cls()
        made.runner_only_attn_layers = set()
        made.cache_config = types.SimpleNamespace(cache_dtype=CACHE_DTYPE)
        made.attn_groups = [
            [
                types.SimpleNamespace(
                    backend=of_one_dtype(backend(tree, name, layout)),
                    layer_names=[layer for layer, of in layers.items() if of == name],
                    kv_cache_spec=spec,
                    kv_cache_group_id=gid,
                )
                for name in dict.fromkeys(layers.values())
            ]
            for gid, layers in enumerate(groups)
        ]
        tensors = [types.SimpleNamespace(shared_by=names) for names in shared]
        made.kv_cache_config = types.SimpleNamespace(kv_cache_groups=groups, kv_cache_tensors=tensors)
        raw = {}
        for names in shared:
            memory = torch.zeros(BLOCKS * spec.page_size_bytes, dtype=torch.int8)
            raw |= dict.fromkeys(names, memory)
        return made._reshape_kv_cache_tensors(raw, [BLOCK_SIZE] * len(groups))

    return caches


def mixins(tree: Any) -> list[str]:
    (cls,) = (n for n in ast.parse(tree.read(RUNNER)).body if getattr(n, "name", None) == "GPUModelRunner")
    return [ast.unparse(base) for base in cls.bases]


def backend(tree: Any, name: str, layout: str) -> type:
    base = take(
        tree.read("vllm/v1/attention/backend.py"),
        "AttentionBackend",
        {"get_kv_cache_block_dim", "get_kv_cache_stride_order"},
        given={"ABC": object, "abstractmethod": lambda method: method},
    )
    file, cls = BACKEND_CLASSES[name]
    return take(
        tree.read(BACKENDS + file),
        cls,
        {"get_kv_cache_shape", "get_kv_cache_stride_order"},
        given={
            "AttentionBackend": base,
            "get_kv_cache_layout": lambda: layout,
            "kv_cache_uses_per_token_head_scales": lambda _: False,
        },
    )


def of_one_dtype(backend: Any) -> type:
    """The backend, which says the shape only of a cache of the engine's type."""

    class OfOneDtype(backend):
        @staticmethod
        def get_kv_cache_shape(*sizes: int, cache_dtype_str: str = "auto") -> tuple[int, ...]:
            assert cache_dtype_str == CACHE_DTYPE
            return backend.get_kv_cache_shape(*sizes, cache_dtype_str=cache_dtype_str)

    return OfOneDtype


def block_of(cache: torch.Tensor, index: int) -> torch.Tensor:
    """Keys and values of one kernel block, whichever dimension counts the blocks."""
    (dim,) = (dim for dim in (0, 1) if cache.shape[dim] != 2)
    return cache.select(dim, index)


def overlapping(one: torch.Tensor, other: torch.Tensor) -> list[tuple[int, int]]:
    """Pairs of different blocks of two layers that share memory and touch the same bytes."""
    found = []
    for mine, its in itertools.permutations(range(BLOCKS), 2):
        one.zero_()
        other.zero_()
        block_of(one, mine).fill_(1)
        if block_of(other, its).any():
            found.append((mine, its))
    return found


@pytest.mark.parametrize(
    ("version", "layout", "target", "draft"),
    [
        ("0.22.1", "NHD", "TRITON_ATTN", "FLASH_ATTN"),
        ("0.22.1", "HND", "FLASHINFER", "FLASH_ATTN"),
        ("0.20.2", "NHD", "TRITON_ATTN", "FLEX_ATTENTION"),
    ],
)
def test_a_draft_does_not_write_into_the_targets_blocks(runner, notes, version, layout, target, draft) -> None:
    groups = [{"full": target, "draft": draft}, {"sliding": target, "sliding2": target}]
    shared = [["full", "sliding"], ["draft", "sliding2"]]
    stock = runner(version, groups, shared, layout=layout, patched=False)
    assert overlapping(stock["draft"], stock["sliding2"])
    assert not notes
    patched = runner(version, groups, shared, layout=layout)
    assert overlapping(patched["draft"], patched["sliding2"]) == []
    assert overlapping(patched["full"], patched["sliding"]) == []
    assert {name: cache.shape for name, cache in patched.items()} == {name: c.shape for name, c in stock.items()}
    assert "draft and sliding2 share memory" in notes["dflash-draft-backend KV cache"]


@pytest.mark.parametrize(
    ("groups", "shared"),
    [
        ([{"target": "TRITON_ATTN", "draft": "FLASH_ATTN"}], [["target"], ["draft"]]),
        (
            [{"full": "FLASH_ATTN", "draft": "FLEX_ATTENTION"}, {"sliding": "FLASH_ATTN"}],
            [["full", "sliding"], ["draft"]],
        ),
    ],
    ids=["nothing shared", "one layout"],
)
def test_memory_without_a_clash_stays_as_it_is(runner, notes, groups, shared) -> None:
    stock, patched = (runner("0.22.1", groups, shared, patched=side) for side in (False, True))
    assert {name: cache.stride() for name, cache in patched.items()} == {name: c.stride() for name, c in stock.items()}
    assert not notes
