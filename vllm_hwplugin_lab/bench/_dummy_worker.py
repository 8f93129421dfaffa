# SPDX-License-Identifier: Apache-2.0
"""`BenchWorker` for dummy shapes: provides what vLLM would read from a drafter's checkpoint.

While vLLM loads an Eagle3 drafter it notes whether the drafter has an ``lm_head``. For a dummy shape it loads nothing,
and would use the target's ``lm_head``, which for Qwen3 has nearly five times as many rows to read per draft step.
Gemma 4's assistant looks tokens up in a buffer of indices, which dummy weights leave uninitialized. vLLM imports this
module, the worker's extension, before it makes the models.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

from ._worker import BenchWorker

__all__ = ["BenchWorker"]

Eagle3LlamaForCausalLM.has_own_lm_head = True

try:
    from vllm.model_executor.models import gemma4_mtp
except ImportError:  # before vLLM 0.21
    pass
else:

    class _Ordered(gemma4_mtp.Gemma4MTPMaskedEmbedder):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            self.token_ordering.copy_(torch.arange(len(self.token_ordering)))

    gemma4_mtp.Gemma4MTPMaskedEmbedder = _Ordered
