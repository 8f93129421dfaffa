# SPDX-License-Identifier: Apache-2.0
"""Reasons why rejected drafts stay in the KV cache although the mode asks to take them out."""

from __future__ import annotations

from typing import Any, Final

import torch
from packaging.version import Version

from vllm_hwplugin.base import run_records

_FREED_BLOCKS: Final = Version("0.24.0")
#: ``CompilationMode.STOCK_TORCH_COMPILE``: torch.compile wraps the whole model, so no module hook runs.
_WHOLE_MODEL_COMPILED: Final = 1


def vllm_version() -> Version:
    """Return this process's public vLLM version, 0 if unknown."""
    entry = run_records.current()
    return Version(Version(entry.vllm_version or "0").public) if entry is not None else Version("0")


def of_config(config: Any, vllm: Version) -> str | None:
    """Return why an engine of this configuration keeps rejected drafts, or None."""
    speculative, parallel, model = config.speculative_config, config.parallel_config, config.model_config
    if speculative is None:
        return "there is no speculative decoding"
    tree = getattr(speculative, "speculative_token_tree", None)
    obstacles = {
        "a KV connector: before vLLM 0.24 a step may write into blocks that were freed and are being loaded": (
            config.kv_transfer_config is not None and vllm < _FREED_BLOCKS
        ),
        "micro-batches, whose tokens have their own buffers": parallel.use_ubatching,
        "pipeline parallelism: only the last stage samples": parallel.pipeline_parallel_size > 1,
        "context parallelism, which was never tested": (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
        ),
        "cascade attention, which was never tested; leave disable_cascade_attn at its default": (
            not model.disable_cascade_attn
        ),
        "a tree of drafts, in which the rejected ones are not the last": tree is not None and not is_chain(tree),
        "adaptive verification, which drops drafts on the device": (
            getattr(speculative, "enable_adaptive_verification", False)
        ),
        "an encoder-decoder model": model.is_encoder_decoder,
        # AITER's backend reuses another backend's name; VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT gives it another layout.
        "ROCm, where attention may shuffle the bytes of a block's tokens": torch.version.hip is not None,
        "torch.compile around the whole model": config.compilation_config.mode == _WHOLE_MODEL_COMPILED,
    }
    return next((reason for reason, applies in obstacles.items() if applies), None)


def of_model(model: torch.nn.Module) -> str | None:
    """Return why a model runs no forward hook, or None."""
    if type(model).__call__ is not torch.nn.Module.__call__ or model._compiled_call_impl is not None:
        return f"{type(model).__name__} is compiled as a whole and runs no hook"
    return None


def is_chain(tree: str) -> bool:
    """Whether a ``speculative_token_tree`` has one draft at each depth.

    The argument is a text of tuples of child indices.

    >>> is_chain("[(0,), (0, 0)]"), is_chain("[(0,), (1,)]")
    (True, False)
    """
    return not any(character in tree for character in "123456789")
