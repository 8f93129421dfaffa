# SPDX-License-Identifier: Apache-2.0
"""Which engines the draft phase's graphs leave as they are."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode
from vllm.model_executor.offloader import base as offloading
from vllm.model_executor.offloader.uva import UVAOffloader
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, LogitsProcessors, MinTokensLogitsProcessor
from vllm.v1.worker.utils import AttentionGroup

from vllm_hwplugin.spec_decode.obstacles import Part, why_not

from ..drafters import BLOCK, EAGLE, MAX_LEN, P_EAGLE, Runner, boot
from ..host_runner import FLASHINFER, builder


def draft_phase_obstacle(runner: Any) -> str | None:
    return why_not(runner, Part.V1_DRAFTING)


def sampling_obstacle(runner: Any) -> str | None:
    return why_not(runner, Part.V1_SAMPLING)


def runner_of(drafter: Any, method: str = "eagle", **changed: Any) -> SimpleNamespace:
    """What is read of vLLM's runner, with a drafter that has its graphs."""
    spec = SimpleNamespace(
        method=method,
        num_speculative_tokens=drafter.speculative_config.num_speculative_tokens,
        use_dflash=lambda: method == "dflash",
    )
    parallel = {"pipeline_parallel_size": 1, "enable_eplb": False, "use_ubatching": False}
    parallel |= {name: changed.pop(name) for name in list(changed) if name in parallel}
    return SimpleNamespace(
        drafter=drafter,
        speculative_config=spec,
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(**parallel)),
        model_config=SimpleNamespace(is_encoder_decoder=changed.pop("is_encoder_decoder", False)),
        input_batch=changed.get("input_batch", SimpleNamespace(logitsprocs=LogitsProcessors())),
        enable_prompt_embeds=changed.pop("enable_prompt_embeds", False),
        get_model=lambda: changed.get("model"),
    )


@pytest.fixture
def drafter(make: Any) -> Any:
    proposer = make("loop", EAGLE, 3)
    boot(proposer, CUDAGraphMode.FULL_DECODE_ONLY, Runner(0))
    return proposer


def test_an_engine_without_any_is_served(drafter: Any) -> None:
    assert draft_phase_obstacle(runner_of(drafter)) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"method": "draft_model"},
        {"pipeline_parallel_size": 2},
        {"enable_eplb": True},
        {"use_ubatching": True},
        {"is_encoder_decoder": True},
        {"enable_prompt_embeds": True},
        {"model": SimpleNamespace(get_mtp_target_hidden_states=None)},
    ],
    ids=str,
)
def test_an_engine_that_does_more_in_a_step_is_not(drafter: Any, changed: dict[str, Any]) -> None:
    assert draft_phase_obstacle(runner_of(drafter, **changed))


def test_nor_is_one_whose_weights_are_on_the_host(drafter: Any) -> None:
    before = offloading.get_offloader()
    offloading.set_offloader(UVAOffloader(1 << 30))
    try:
        assert "loaded from the host" in (draft_phase_obstacle(runner_of(drafter)) or "")
    finally:
        offloading.set_offloader(before)


def test_nor_is_a_drafter_that_does_more_on_the_host(drafter: Any) -> None:
    drafter.uses_mrope = True
    assert "uses_mrope" in (draft_phase_obstacle(runner_of(drafter)) or "")


def test_nor_one_that_plans_its_attention(make: Any) -> None:
    proposer = make("loop", EAGLE, 3)
    cls = builder(FLASHINFER)
    proposer.host.use(type(cls.__name__, (cls,), {"reorder_batch_threshold": 512}))
    boot(proposer, CUDAGraphMode.FULL_DECODE_ONLY, Runner(0))
    assert cls.__name__ in (draft_phase_obstacle(runner_of(proposer)) or "")


def test_nor_one_whose_kernels_need_smaller_blocks_than_the_cache_has(make: Any) -> None:
    """Its block tables are made when vLLM builds metadata, which a recorded phase does not."""
    if "kernel_block_size" not in {one.name for one in dataclasses.fields(AttentionGroup)}:
        pytest.skip("this vLLM's block tables are in kernels' blocks")
    proposer = make("loop", EAGLE, 3)
    proposer.vllm_config.model_config.max_model_len = MAX_LEN
    proposer.host.use(FlashAttentionMetadataBuilder, BLOCK // 2)
    boot(proposer, CUDAGraphMode.FULL_DECODE_ONLY, Runner(0))
    assert "block tables of the draft layers" in (draft_phase_obstacle(runner_of(proposer)) or "")


def test_nor_one_with_tokens_of_its_own(make: Any) -> None:
    proposer = make("loop", P_EAGLE, 3)
    boot(proposer, CUDAGraphMode.FULL_DECODE_ONLY, Runner(0))
    assert "tokens of its own" in (draft_phase_obstacle(runner_of(proposer)) or "")


def test_logits_processors_of_others_leave_sampling_to_vllm(drafter: Any) -> None:
    class Foreign(MinTokensLogitsProcessor):
        def __init__(self) -> None:
            pass

    def processed_by(*classes: type) -> SimpleNamespace:
        made = LogitsProcessors([cls.__new__(cls) for cls in classes])
        return runner_of(drafter, input_batch=SimpleNamespace(logitsprocs=made))

    assert sampling_obstacle(processed_by(MinTokensLogitsProcessor, LogitBiasLogitsProcessor)) is None
    assert "Foreign" in (sampling_obstacle(processed_by(MinTokensLogitsProcessor, Foreign)) or "")


def test_so_does_a_count_of_nans(drafter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    found = sampling_obstacle(runner_of(drafter))
    assert "VLLM_COMPUTE_NANS_IN_LOGITS" in (found or "")
