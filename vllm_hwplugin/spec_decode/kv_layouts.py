# SPDX-License-Identifier: Apache-2.0
"""Do layers with different backends share KV cache memory in a way that makes their blocks overlap?

For a model with several kinds of attention, vLLM lets one layer of each KV cache group share a tensor: block ``i``
belongs to one group, so the groups never touch the same block. That is only true while all of them agree where block
``i`` lies. Before 0.23.0 some backends keep all keys before all values (``[2, blocks, ...]``: FlashAttention,
FlexAttention) and others keep each block's keys and values together (``[blocks, 2, ...]``: Triton, FlashInfer), so a
draft with a backend of its own could write into the target's blocks. vLLM has the same trouble between attention and
Mamba layers and lays the keys and values out block by block there; :func:`layouts_clash` says where else it must.
FlexAttention cannot read that layout and fails at its first forward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_hwplugin import journal
from vllm_hwplugin.features import DFLASH_DRAFT_BACKEND


def layouts_clash(
    kv_cache_config: Any, attn_groups: Sequence[Sequence[Any]], kernel_block_sizes: Sequence[int], cache_dtype: str
) -> bool:
    """Whether one KV cache tensor holds layers whose backends index blocks by different dimensions.

    Args:
        kv_cache_config: vLLM's ``KVCacheConfig``; its tensors say which layers share memory.
        attn_groups: the runner's ``AttentionGroup`` objects, by KV cache group.
        kernel_block_sizes: tokens a block, by KV cache group. A last group of layers without a cache has none.
        cache_dtype: ``CacheConfig.cache_dtype``, which decides the shape for some backends.
    """
    groups: dict[str, Any] = {}
    for group in itertools.chain.from_iterable(attn_groups):
        if isinstance(group.kv_cache_spec, AttentionSpec) and group.kv_cache_group_id < len(kernel_block_sizes):
            groups.update(dict.fromkeys(group.layer_names, group))
    for tensor in kv_cache_config.kv_cache_tensors:
        sharing = [groups[name] for name in tensor.shared_by if name in groups]
        # One backend agrees with itself, and an engine without a second one is asked nothing that stock does not ask.
        if len({group.backend for group in sharing}) < 2:
            continue
        if len({_block_dim(group, kernel_block_sizes[group.kv_cache_group_id], cache_dtype) for group in sharing}) > 1:
            journal.note(
                f"{DFLASH_DRAFT_BACKEND} KV cache",
                f"keys and values lie block by block, because {' and '.join(tensor.shared_by)} share memory",
            )
            journal.use(DFLASH_DRAFT_BACKEND, True)
            return True
    return False


def _block_dim(group: Any, block_size: int, cache_dtype: str) -> int:
    spec = group.kv_cache_spec
    return int(
        group.backend.get_kv_cache_block_dim(block_size, spec.num_kv_heads, spec.head_size, cache_dtype_str=cache_dtype)
    )
