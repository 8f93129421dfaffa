# SPDX-License-Identifier: Apache-2.0
"""Select a DFlash draft's attention backend apart from its target's.

A draft's mask tokens see each other, so its layers need a backend with non-causal attention; the target's layers do
not. A layer shows in its configuration which model it belongs to, so the draft gets its own configuration. It is a
shallow copy: ``replace()`` would run ``VllmConfig.__post_init__`` again, with its effects on objects that target and
draft share (capture sizes, the platform's hooks).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.features import DFLASH_DRAFT_BACKEND

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def draft_config(target: VllmConfig) -> VllmConfig:
    """Return the configuration under which vLLM before 0.21.0 builds a DFlash draft.

    These versions have one setting, for the target's backend. The draft also takes that backend if it declares
    non-causal attention. Otherwise vLLM selects the draft's; the name, given by the user, the target's model class or
    the platform, counts only for the target. `target` is not changed.
    """
    attention = copy.copy(target.attention_config)
    named = attention.backend
    if named is None:
        decision = "target and draft select their attention backends separately"
    elif named.get_class().supports_non_causal():
        decision = f"the draft has the target's {named.name}, which declares non-causal attention"
    else:
        attention.backend = None
        decision = f"the draft selects its own backend: {named.name} is the target's and only causal"
    run_records.note(DFLASH_DRAFT_BACKEND, decision)
    # The name that vLLM declares from 0.21.0 on; a plain attribute here.
    attention.use_non_causal = True
    draft = copy.copy(target)
    draft.attention_config = attention
    return draft


def needs_non_causal(config: VllmConfig) -> bool:
    """Whether ``config`` is from :func:`draft_config`, so its layers need non-causal attention."""
    return bool(getattr(config.attention_config, "use_non_causal", False))


def without_mm_prefix(config: VllmConfig) -> VllmConfig:
    """Return ``config`` for a text-only draft of a target with images.

    The flag says that images are seen in both directions, and excludes backends that the draft could use. vLLM clears
    it in the ``ModelConfig`` that draft and target share. The target's metadata builders read it there later: since
    0.28.0 FlashAttention's then drops the ranges of the images, and the target's own output changes. Here neither
    ``config`` nor its ``model_config`` is changed.
    """
    text_only = copy.copy(config)
    text_only.model_config = copy.copy(config.model_config)
    text_only.model_config.model_arch_config = dataclasses.replace(
        config.model_config.model_arch_config, is_mm_prefix_lm=False
    )
    return text_only


def layouts_clash(runner: Any, kernel_block_sizes: Sequence[int]) -> bool:
    """Whether layers that share a KV cache tensor disagree on block dimensions.

    `runner` is V1's. `kernel_block_sizes` are tokens per block, by KV cache group; a last group may have none.
    """
    # Not at the top: vLLM's selector of backends imports this module, and this import loads much.
    from vllm.v1.kv_cache_interface import AttentionSpec

    groups: dict[str, Any] = {}
    for group in itertools.chain.from_iterable(runner.attn_groups):
        if isinstance(group.kv_cache_spec, AttentionSpec) and group.kv_cache_group_id < len(kernel_block_sizes):
            groups.update(dict.fromkeys(group.layer_names, group))
    cache_dtype = runner.cache_config.cache_dtype
    for tensor in runner.kv_cache_config.kv_cache_tensors:
        sharing = [groups[name] for name in tensor.shared_by if name in groups]
        # One backend agrees with itself, so an engine with one backend gets no more calls than in unpatched vLLM.
        if len({group.backend for group in sharing}) < 2:
            continue
        if len({_block_dim(group, kernel_block_sizes[group.kv_cache_group_id], cache_dtype) for group in sharing}) > 1:
            run_records.note(
                f"{DFLASH_DRAFT_BACKEND} KV cache",
                f"keys and values lie block by block, because {' and '.join(tensor.shared_by)} share memory",
            )
            run_records.use(DFLASH_DRAFT_BACKEND, True)
            return True
    return False


def _block_dim(group: Any, block_size: int, cache_dtype: str) -> int:
    spec = group.kv_cache_spec
    return int(
        group.backend.get_kv_cache_block_dim(block_size, spec.num_kv_heads, spec.head_size, cache_dtype_str=cache_dtype)
    )
