# SPDX-License-Identifier: Apache-2.0
"""A custom logits processor of Model Runner V2 that acts by the number of steps, which vLLM tells it of."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor


class Counting(LogitsProcessor):
    """Leaves out other tokens in each step, which it counts by a call that vLLM says comes "once per step"."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._steps = 0

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        return True

    def apply_staged_writes(self) -> None:
        self._steps += 1

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        logits[:, self._steps % 8 :: 8] = float("-inf")
        return logits
