# SPDX-License-Identifier: Apache-2.0
"""Compilation of attention kernels before the first request."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from vllm_hwplugin import gates, journal
from vllm_hwplugin.spec_decode.drafters import MASK_METHODS

logger = logging.getLogger("vllm.hwplugin")

_NOTE = "attention-warm-up"


def warm_up(runner: Any) -> None:
    """Compile the kernels of a runner's attention layers, with its drafter's.

    A failure is only logged and recorded: serving may need that kernel late, or never.

    Args:
        runner: vLLM's ``GPUModelRunner``, with its KV cache bound, before it captures graphs.

    Raises:
        RuntimeError: A compilation failed, and ``VLLM_HWPLUGIN_STRICT=1``.
    """
    target = _builders(group for groups in runner.attn_groups for group in groups)
    builders: list[tuple[Any, dict[str, bool]]] = [(builder, {}) for builder in target]
    drafter = getattr(runner, "drafter", None)
    # DFlash's attention is not causal unless the checkpoint's configuration says so, which only later vLLMs read.
    causal = runner.speculative_config is None or runner.speculative_config.method not in MASK_METHODS
    options = {"drafts": True, "causal": getattr(drafter, "dflash_causal", causal)}
    builders += [(builder, options) for builder in _builders(getattr(drafter, "draft_attn_groups", ()))]
    if not builders:
        return
    started = time.monotonic()
    logger.info("compiling missing attention kernels: takes minutes at a host's first start with a model")
    try:
        with torch.inference_mode():
            calls = sum(builder.warm_up(**options) for builder, options in builders)
    except Exception as error:
        failure = (
            f"not all attention kernels were compiled before serving ({type(error).__name__}: {error}); a request that "
            "needs one waits for its compilation"
        )
        if gates.read(gates.STRICT).flag:
            raise RuntimeError(f"{gates.STRICT}=1, but {failure}") from error
        journal.note(_NOTE, failure)
        logger.warning("%s", failure)
        return
    done = f"attention kernels compiled in {time.monotonic() - started:.1f} s by {calls} calls"
    journal.note(_NOTE, done)
    logger.info("%s", done)


def _builders(groups: Any) -> list[Any]:
    """Return each group's metadata builder that has `warm_up`."""
    # A group's further builders are copies for ubatches.
    builders = [group.get_metadata_builder(0) for group in groups]
    return [builder for builder in builders if hasattr(builder, "warm_up")]
