# SPDX-License-Identifier: Apache-2.0
"""What drafting is given, and when it is left to vLLM. That graphs draft as vLLM is shown on the simulated device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

import torch
from vllm.v1.worker.gpu.spec_decode import utils

from vllm_hwplugin.spec_decode.v2.tail_graphs import TailGraphs

HIDDEN, OTHER = torch.ones(8, 2), torch.ones(8, 4)


@pytest.mark.parametrize(
    "model",
    [
        SimpleNamespace(),
        SimpleNamespace(get_mtp_target_hidden_states=lambda: OTHER),
        # A target has states for MTP layers alone, and another drafter, from 0.32 on.
        SimpleNamespace(get_mtp_target_hidden_states=lambda: None),
    ],
)
def test_drafting_starts_from_the_states_that_vllm_gives_a_drafter(model: Any) -> None:
    if not hasattr(utils, "get_drafter_hidden_states"):
        pytest.skip("this vLLM has no function for it")
    graphs = TailGraphs(SimpleNamespace(max_num_reqs=2, model=model))
    assert graphs._draft_hidden_states(HIDDEN).equal(utils.get_drafter_hidden_states(model, HIDDEN))
