# SPDX-License-Identifier: Apache-2.0
"""`BenchWorker` of an engine with a dummy shape, whose drafters have what vLLM would read from a checkpoint.

vLLM notes while it loads an Eagle3 drafter whether that has an ``lm_head``. Of a dummy shape nothing is loaded, so vLLM
would give the drafter the target's, which in Qwen3's case has nearly five times as many rows for each draft step to
read. Gemma 4's assistant looks tokens up in a buffer of indices, which dummy weights leave as the memory was. vLLM
imports this module, the worker's extension, before it makes the models.
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
