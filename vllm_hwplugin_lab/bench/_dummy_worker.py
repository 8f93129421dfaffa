# SPDX-License-Identifier: Apache-2.0
"""`BenchWorker` of an engine with a dummy shape: an Eagle3 drafter has a head of its own, as published ones have.

While vLLM loads a checkpoint it notes whether that has an ``lm_head``. Of a dummy shape nothing is loaded, so vLLM
would give the drafter the target's, which in Qwen3's case has nearly five times as many rows for each draft step to
read. vLLM imports this module, the worker's extension, before it makes the models.
"""

from __future__ import annotations

from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

from ._worker import BenchWorker

__all__ = ["BenchWorker"]

Eagle3LlamaForCausalLM.has_own_lm_head = True
