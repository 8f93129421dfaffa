# SPDX-License-Identifier: Apache-2.0
"""Kernels that are compiled at their first use, compiled before the first request."""

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
    """Have every such kernel of a runner's attention layers compiled, its drafter's included.

    What fails is a line in the log and in the process's journal: serving may need that kernel late, or never.

    Args:
        runner: vLLM's ``GPUModelRunner``, with its KV cache bound and before it captures graphs.

    Raises:
        RuntimeError: it failed, and ``VLLM_HWPLUGIN_STRICT=1``.
    """
    target = _builders(group for groups in runner.attn_groups for group in groups)
    builders: list[tuple[Any, dict[str, bool]]] = [(builder, {}) for builder in target]
    drafter = getattr(runner, "drafter", None)
    # DFlash's queries see later ones, unless the checkpoint says otherwise; vLLM asks that only in later versions.
    causal = runner.speculative_config is None or runner.speculative_config.method not in MASK_METHODS
    how = {"drafts": True, "causal": getattr(drafter, "dflash_causal", causal)}
    builders += [(builder, how) for builder in _builders(getattr(drafter, "draft_attn_groups", ()))]
    if not builders:
        return
    started = time.monotonic()
    logger.info("compiling attention kernels that are not there yet: minutes at a host's first start with a model")
    try:
        with torch.inference_mode():
            calls = sum(builder.warm_up(**options) for builder, options in builders)
    except Exception as error:
        told = (
            f"attention kernels were not all compiled before serving ({type(error).__name__}: {error}); a request that "
            "needs one waits for it"
        )
        if gates.read(gates.STRICT).flag:
            raise RuntimeError(f"{gates.STRICT}=1, but {told}") from error
        journal.note(_NOTE, told)
        logger.warning("%s", told)
        return
    done = f"attention kernels are compiled, in {time.monotonic() - started:.1f} s by {calls} calls"
    journal.note(_NOTE, done)
    logger.info("%s", done)


def _builders(groups: Any) -> list[Any]:
    """Metadata builders that can call each of their layers' kernels once (`warm_up`).

    Of each group the first: others are its copies, for batches that are split in two.
    """
    found = [group.get_metadata_builder(0) for group in groups]
    return [builder for builder in found if hasattr(builder, "warm_up")]
