# SPDX-License-Identifier: Apache-2.0
"""vLLM's sampler of Model Runner V2 on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.logits_processor import loader
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState


def sampler(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Sampler:
    """One for two requests, made as `load_model` makes it."""
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    device, config = torch.device("cpu"), VllmConfig()
    states = RequestState(
        max_num_reqs=2, max_model_len=8, max_num_batched_tokens=8, num_speculative_steps=3, vocab_size=16, device=device
    )
    return Sampler(
        vllm_config=config,
        max_num_reqs=2,
        vocab_size=16,
        device=device,
        req_states=states,
        custom_logits_processors=loader.build_custom_logits_processors(config, states, False, ()),
        **settings,
    )
