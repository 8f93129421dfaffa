# SPDX-License-Identifier: Apache-2.0
"""Whether layers that share KV cache memory count their blocks alike; test_called_hunks.py calls the runner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from vllm_hwplugin.spec_decode import dflash_draft_backend

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)


def backend(block_dim: int) -> type:
    """A backend whose cache of the engine's type counts blocks in this dimension."""

    class Backend:
        @staticmethod
        def get_kv_cache_block_dim(*sizes: int, cache_dtype_str: str) -> int:
            assert (sizes, cache_dtype_str) == ((16, 2, 8), "fp8")
            return block_dim

    return Backend


BLOCKS_FIRST, HALVES_FIRST = backend(0), backend(1)


def group(layer: str, of: type | None, spec: Any = SPEC, gid: int = 0) -> SimpleNamespace:
    return SimpleNamespace(layer_names=[layer], backend=of, kv_cache_spec=spec, kv_cache_group_id=gid)


@pytest.mark.parametrize(
    ("groups", "clash"),
    [
        ([group("draft", HALVES_FIRST), group("sliding", BLOCKS_FIRST)], True),
        ([group("draft", HALVES_FIRST), group("sliding", HALVES_FIRST)], False),
        ([group("draft", backend(1)), group("sliding", HALVES_FIRST)], False),
        ([group("draft", HALVES_FIRST), group("alone", BLOCKS_FIRST)], False),
        # Attention without a cache, and another kind of cache.
        ([group("draft", HALVES_FIRST), group("sliding", None, gid=1)], False),
        ([group("draft", HALVES_FIRST), group("sliding", None, object.__new__(MambaSpec))], False),
    ],
)
def test_keys_and_values_lie_block_by_block_where_backends_of_shared_memory_differ(
    groups: list[Any], clash: bool, notes: dict[str, str]
) -> None:
    tensors = [SimpleNamespace(shared_by=["draft", "sliding"]), SimpleNamespace(shared_by=["alone"])]
    runner = SimpleNamespace(
        attn_groups=[groups],
        cache_config=SimpleNamespace(cache_dtype="fp8"),
        kv_cache_config=SimpleNamespace(kv_cache_tensors=tensors),
    )
    assert dflash_draft_backend.layouts_clash(runner, [16]) is clash
    assert ("draft and sliding share memory" in notes.get("dflash-draft-backend KV cache", "")) is clash
