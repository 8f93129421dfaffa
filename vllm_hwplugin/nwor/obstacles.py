# SPDX-License-Identifier: Apache-2.0
"""Where rejected drafts stay in the KV cache although the mode asks to take them out, and why."""

from __future__ import annotations

from typing import Any, Final

import torch
from packaging.version import Version

from vllm_hwplugin import journal

_FREED_BLOCKS: Final = Version("0.24.0")
#: ``CompilationMode.STOCK_TORCH_COMPILE``: torch.compile around the model itself, in which no hook of a module runs.
_WHOLE_MODEL_COMPILED: Final = 1


def vllm_version() -> Version:
    """That of the vLLM in this process, without its local part, as its journal has it; 0 where that has none."""
    entry = journal.current()
    return Version(Version(entry.vllm_version or "0").public) if entry is not None else Version("0")


def of_config(config: Any, vllm: Version) -> str | None:
    """Why an engine of this configuration keeps rejected drafts; None where nothing is against taking them out.

    Args:
        config: ``VllmConfig``.
        vllm: the version, without its local part.
    """
    speculative, parallel, model = config.speculative_config, config.parallel_config, config.model_config
    if speculative is None:
        return "there is no speculative decoding"
    tree = getattr(speculative, "speculative_token_tree", None)
    obstacles = {
        "a KV connector: before vLLM 0.24 a step may write into blocks that were freed and are being loaded": (
            config.kv_transfer_config is not None and vllm < _FREED_BLOCKS
        ),
        "micro-batches, whose tokens have buffers of their own": parallel.use_ubatching,
        "pipeline parallelism: only the last stage samples": parallel.pipeline_parallel_size > 1,
        "context parallelism: it was never run with it": (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1
        ),
        "cascade attention: it was never run with it; leave disable_cascade_attn as it is by default": (
            not model.disable_cascade_attn
        ),
        "a tree of drafts, in which the rejected ones are not the last": tree is not None and not is_chain(tree),
        "adaptive verification, which drops drafts on the device": (
            getattr(speculative, "enable_adaptive_verification", False)
        ),
        "an encoder-decoder model": model.is_encoder_decoder,
        # AITER's backend has the name of another one, and with VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT not its layout.
        "ROCm, where attention may shuffle the bytes of a block's tokens": torch.version.hip is not None,
        "torch.compile around the whole model": config.compilation_config.mode == _WHOLE_MODEL_COMPILED,
    }
    return next((reason for reason, found in obstacles.items() if found), None)


def of_model(model: torch.nn.Module) -> str | None:
    """Why nothing can run before a model's forward pass; None where a hook of the module does."""
    if type(model).__call__ is not torch.nn.Module.__call__ or model._compiled_call_impl is not None:
        return f"{type(model).__name__} is compiled whole, and runs no hook"
    return None


def is_chain(tree: str) -> bool:
    """Whether ``speculative_token_tree``, a text of tuples of child indices, has one draft at each depth.

    >>> is_chain("[(0,), (0, 0)]"), is_chain("[(0,), (1,)]")
    (True, False)
    """
    return not any(character in tree for character in "123456789")
