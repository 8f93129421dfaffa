"""The decision whether a drafter may use FULL graphs, as a pure function; `test_draft_graphs` has it on proposers."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode

from vllm_hwplugin.spec_decode.draft_obstacles import DrafterFacts, obstacle

GOOD = DrafterFacts("EagleProposer", CUDAGraphMode.FULL_AND_PIECEWISE)


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
def test_no_obstacle(mode):
    assert obstacle(dataclasses.replace(GOOD, target_mode=CUDAGraphMode[mode])) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"proposer": "Gemma4Proposer", "covered": False}, "Gemma4Proposer has drafting code of its own"),
        ({"enforce_eager": True}, "enforce_eager"),
        ({"target_mode": CUDAGraphMode.PIECEWISE}, "cudagraph_mode is PIECEWISE"),
        ({"target_mode": CUDAGraphMode.NONE}, "cudagraph_mode is NONE"),
        ({"padded_batch": False}, "disable_padded_drafter_batch"),
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"context_parallel_size": 2}, "context parallelism"),
        ({"lora": True}, "LoRA adapters"),
        ({"breakable_any_mode": True}, "breakable CUDA graphs"),
        ({"shares_mtp_indices": True}, "top-k indices"),
        ({"attention": "no graph may hold it"}, "no graph may hold it"),
    ],
)
def test_obstacles(change, reason):
    assert reason in obstacle(dataclasses.replace(GOOD, **change))
