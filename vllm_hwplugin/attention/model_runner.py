# SPDX-License-Identifier: Apache-2.0
"""What vLLM's model runners announce of the batches that they capture in FULL graphs."""

from __future__ import annotations

from typing import Any

import vllm.envs as envs
from packaging.version import Version
from vllm.version import __version__


def captures_short_queries(vllm_config: Any) -> bool:
    """Whether vLLM captures FULL graphs of mixed batches with a shorter longest query than it replays them with.

    Up to 0.30 the second model runner does: it spreads the tokens of such a graph evenly over the requests, and says
    that the longest of those is the longest. A kernel whose launch that bound decides leaves out the tokens behind it,
    and FlashAttention 3 masks nothing where it says one token, at heads of up to 64 and of more than 128.
    """
    if Version(__version__) >= Version("0.31.0"):
        return False
    # 0.20 and 0.21 have the variable alone.
    return bool(getattr(vllm_config, "use_v2_model_runner", envs.VLLM_USE_V2_MODEL_RUNNER))
