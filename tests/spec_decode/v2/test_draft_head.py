# SPDX-License-Identifier: Apache-2.0
"""The draft's head: rows that follow the traffic, their ids, and which engines keep the whole head."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
    VocabParallelEmbeddingShardIndices,
)

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.features import V2_DRAFT_HEAD, gate_of
from vllm_hwplugin.spec_decode.v2 import draft_head

WORDS, WIDTH = 256, 32
ROWS = WORDS // 4


class Dequantized:
    """Stands in for vLLM's FP8 method: it quantizes by row, and multiplies in float32."""

    def create_weights(self, *_: object, **__: object) -> None:
        pass

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight.data.float()
        scale = weight.abs().amax(1, keepdim=True) / 448
        layer.weight = torch.nn.Parameter((weight / scale).to(torch.float8_e4m3fn).t(), requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return (x.float() @ layer.weight.float()) * layer.weight_scale.t()


class Draft(torch.nn.Module):
    """Its embedding is its head."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.embed_tokens = self.lm_head = head

    def get_top_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head.quant_method.apply(self.lm_head, hidden).argmax(-1)


class Runner:
    """What `draft_head` reads of vLLM's runner, and the methods before which it puts itself."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        head: Any = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
        torch.nn.Module.__init__(head)
        weight = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
        words = WORDS // ranks
        start, end = rank * words, (rank + 1) * words
        head.weight = torch.nn.Parameter(weight[start:end], requires_grad=False)
        head.quant_method, head.tp_size, head.org_vocab_size = UnquantizedEmbeddingMethod(), ranks, WORDS
        head.shard_indices = VocabParallelEmbeddingShardIndices(start, end, WORDS, WORDS, start, end, WORDS, WORDS)
        self.model = torch.nn.ModuleDict({"lm_head": head})
        self.speculative_config = SimpleNamespace(method="mtp", draft_sample_method="greedy")
        self.speculator = SimpleNamespace(
            model=Draft(head), speculative_config=self.speculative_config, use_local_argmax_reduction=False
        )
        self.model_config = SimpleNamespace(dtype=torch.bfloat16, head_dtype=torch.bfloat16)
        self.decode_query_len = 2
        parallel = SimpleNamespace(tensor_parallel_size=ranks)
        self.vllm_config = SimpleNamespace(parallel_config=parallel, weight_transfer_config=None)
        tokens = np.zeros((1, 64), dtype=np.int32)
        self.req_states = SimpleNamespace(
            req_id_to_index={"r": 0},
            num_computed_tokens_np=np.array([8]),
            prompt_len=SimpleNamespace(np=np.array([2])),
            all_token_ids=SimpleNamespace(_uva_buf=SimpleNamespace(np=tokens)),
        )

    def add_requests(self, scheduler_output: Any) -> None:
        pass

    def finish_requests(self, scheduler_output: Any) -> None:
        for name in scheduler_output.finished_req_ids:
            self.req_states.req_id_to_index.pop(name, None)

    def reload_weights(self) -> None:
        pass

    def reset_lora_state(self) -> None:
        pass

    def wake_up(self) -> None:
        """As the hunk in the worker's `wake_up` does; the next step has other requests."""
        self.hwplugin_woken = True
        self.add_requests(SimpleNamespace(scheduled_new_reqs=[]))

    def begin(self, tokens: list[int]) -> None:
        request = SimpleNamespace(prefill_token_ids=tokens)
        self.add_requests(SimpleNamespace(scheduled_new_reqs=[request]))


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_head, "Fp8PtpcOnlineLinearMethod", Dequantized)
    monkeypatch.setattr(draft_head, "_copy_of", lambda source: draft_head.Fp8Head(source, None))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Runner]:
    def make(form: str) -> Runner:
        monkeypatch.setenv(gate_of(V2_DRAFT_HEAD), form)
        runner = Runner()
        draft_head.install(runner)
        return runner

    return make


def rows_of(runner: Runner) -> draft_head.Ring:
    ring = runner.speculator.model.get_top_tokens.__self__.ring
    assert isinstance(ring, draft_head.Ring)
    return ring


def assert_drafts_are_the_best_inside(runner: Runner) -> None:
    """Each token with a row is what its own direction drafts, and nothing else is drafted."""
    weight = runner.model["lm_head"].weight.float()
    inside = np.sort(rows_of(runner).token_of)
    hidden = torch.randn(500, WIDTH, generator=torch.Generator().manual_seed(1))
    scale = weight.abs().amax(1, keepdim=True) / 448
    known = ((weight / scale).to(torch.float8_e4m3fn).float() * scale)[inside]
    expected = torch.from_numpy(inside)[(hidden @ known.t()).argmax(-1)]
    assert torch.equal(runner.speculator.model.get_top_tokens(hidden), expected)


def test_rows_follow_prompts_and_answers(installed: Callable[[str], Runner]) -> None:
    runner = installed("rows")
    ring = rows_of(runner)
    assert runner.speculator.use_local_argmax_reduction
    assert runner.speculator.model.embed_tokens is runner.model["lm_head"]
    assert runner.speculator.model.lm_head.weight.shape == (WIDTH, ROWS)
    assert_drafts_are_the_best_inside(runner)
    generator = np.random.default_rng(2)
    for _ in range(40):
        runner.begin(generator.integers(0, WORDS, 20).tolist())
        assert_drafts_are_the_best_inside(runner)
        held = np.flatnonzero(ring.slot_of >= 0)
        assert np.array_equal(np.sort(ring.token_of), held)
        assert np.array_equal(ring.token_of[ring.slot_of[held]], held)
        # The lowest ids never leave.
        assert set(range(ROWS // 4)) <= set(held)
    # All words at once: one ring's worth.
    runner.begin(list(range(WORDS)))
    assert_drafts_are_the_best_inside(runner)


def test_answers_are_counted_and_get_rows(installed: Callable[[str], Runner]) -> None:
    runner = installed("rows")
    runner.req_states.all_token_ids._uva_buf.np[0, :8] = [1, 2, 3, 4, 5, 200, 201, 202]
    runner.finish_requests(SimpleNamespace(finished_req_ids={"r", "unknown"}))
    assert (rows_of(runner).slot_of[[200, 201, 202]] >= 0).all()
    assert not runner.req_states.req_id_to_index
    assert (rows_of(runner).sampled, rows_of(runner).inside) == (6, 3)
    assert_drafts_are_the_best_inside(runner)


def test_a_running_answer_gets_rows_once_it_is_computed(installed: Callable[[str], Runner]) -> None:
    runner = installed("rows")
    ring, states = rows_of(runner), runner.req_states
    states.req_id_to_index |= {"other": 1}
    states.num_computed_tokens_np, states.prompt_len.np = np.array([12, 12]), np.array([2, 2])
    states.all_token_ids._uva_buf.np = np.full((2, 64), 203, dtype=np.int32)
    states.all_token_ids._uva_buf.np[0, :12] = [1, 2, 3, 4, 5, 200, 201, 202, 210, 210, 210, 210]
    step = SimpleNamespace(finished_req_ids=set())
    for _ in range(2):  # one for each request
        runner.finish_requests(step)
    assert (ring.slot_of[[200, 201, 202, 203]] >= 0).all()
    assert ring.slot_of[210] < 0  # of steps that may still run
    assert (ring.sampled, ring.inside) == (12, 3)
    runner.finish_requests(SimpleNamespace(finished_req_ids={"r"}))
    assert ring.slot_of[210] >= 0
    assert (ring.sampled, ring.inside) == (16, 3)  # no token twice
    assert_drafts_are_the_best_inside(runner)


@pytest.mark.parametrize("after", ["reload_weights", "reset_lora_state", "wake_up", "many requests"])
@pytest.mark.parametrize("form", ["copy", "rows"])
def test_new_weights_are_copied(
    form: str, after: str, installed: Callable[[str], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "copy" and after == "many requests":
        pytest.skip("a copy is not fed")
    monkeypatch.setattr(draft_head, "FEEDS", 3)
    runner = installed(form)
    draft, head = runner.speculator.model, runner.speculator.model.lm_head
    address = head.weight.data_ptr()
    runner.model["lm_head"].weight.data.mul_(-1)
    if form == "rows":
        # Sleep of level 2.
        head.ids.fill_(1 << 40)
    for _ in range(3):
        runner.begin([1]) if after == "many requests" else getattr(runner, after)()
    assert draft.lm_head.weight.data_ptr() == address
    if form == "rows":
        assert_drafts_are_the_best_inside(runner)
    stored = (head.weight.float() * head.weight_scale.t()).t()
    assert torch.allclose(stored, runner.model["lm_head"].weight.float()[: len(stored)], rtol=0.07, atol=0.01)


def test_vllms_copy_is_made_again_after_a_sleep(
    installed: Callable[[str], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer writes weights between a sleep and the next request, and vLLM is not told."""
    refreshed: list[torch.nn.Module] = []
    monkeypatch.setattr(draft_head, "_copy_of", lambda source: torch.nn.Linear(1, 1))
    monkeypatch.setattr(draft_head, "refresh_quantized_lm_heads", refreshed.append, raising=False)
    runner = installed("copy")
    runner.begin([1])
    assert refreshed == []
    runner.wake_up()
    runner.begin([1])
    assert refreshed == [runner.speculator.model]


def test_two_ranks_have_rows_of_their_words_and_draft_the_best_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gate_of(V2_DRAFT_HEAD), "rows")
    # The stand-in's model is none of vLLM's, whose logits are known.
    monkeypatch.setattr(draft_head, "other_logits", lambda _: None)
    runners = [Runner(rank, 2) for rank in range(2)]
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(
        draft_head, "tensor_model_parallel_all_gather", lambda pairs, dim: torch.cat((pairs, *sent), dim)
    )
    for runner in runners:
        draft_head.install(runner)
        assert runner.speculator.model.lm_head.weight.shape == (WIDTH, ROWS // 2)
        runner.begin([3, 100, 120, 130, 250])
    rings = [rows_of(runner) for runner in runners]
    inside = np.concatenate([np.sort(ring.token_of) + rank * WORDS // 2 for rank, ring in enumerate(rings)])
    assert {100, 120, 250} <= set(inside)
    whole = Runner().model["lm_head"].weight.float()
    scale = whole.abs().amax(1, keepdim=True) / 448
    known = ((whole / scale).to(torch.float8_e4m3fn).float() * scale)[inside]
    hidden = torch.randn(500, WIDTH, generator=torch.Generator().manual_seed(1))
    expected = torch.from_numpy(inside)[(hidden @ known.t()).argmax(-1)]
    assert {int(token) // (WORDS // 2) for token in expected} == {0, 1}
    first, second = (runner.speculator.model for runner in runners)
    # What the second rank sends is what it would get from a rank without any logit.
    sent.append(torch.tensor([[-torch.inf, 0.0]]).repeat(500, 1))
    others = second.get_top_tokens(hidden)
    values = second.lm_head.quant_method.apply(second.lm_head, hidden).amax(-1)
    sent[:] = [torch.stack((values, others.float()), -1)]
    assert torch.equal(first.get_top_tokens(hidden), expected)


def change(path: str, value: object) -> Callable[[Runner], None]:
    def apply(runner: Runner) -> None:
        owner, _, name = path.rpartition(".")
        found: Any = runner
        for part in owner.split(".") if owner else ():
            found = found[part] if isinstance(found, torch.nn.ModuleDict) else getattr(found, part)
        setattr(found, name, value)

    return apply


def added_words(runner: Runner) -> None:
    runner.model["lm_head"].shard_indices = VocabParallelEmbeddingShardIndices(
        0, WORDS, WORDS, WORDS + 8, 0, WORDS, WORDS, WORDS + 8
    )


def few_words(runner: Runner) -> None:
    runner.model["lm_head"].shard_indices = VocabParallelEmbeddingShardIndices(0, 63, 63, 63, 0, 63, 63, 63)


class Gemma4Speculator(SimpleNamespace):
    pass


class InklingMTP(Draft):
    pass


def gemma(runner: Runner) -> None:
    runner.speculator = Gemma4Speculator(**vars(runner.speculator))


def inkling(runner: Runner) -> None:
    runner.speculator.model.__class__ = InklingMTP


ALWAYS = {
    "InklingMTP multiplies by": inkling,
    "this worker does not draft": change("speculator", None),
    "the drafter is dflash": change("speculative_config.method", "dflash"),
    "the drafter is draft_model": change("speculative_config.method", "draft_model"),
    "Gemma4Speculator drafts with several heads": gemma,
    "vLLM quantizes the draft's head already": change("speculative_config.draft_lm_head_quantization", "fp8"),
    "the drafter has its own vocabulary": change("speculator.model.draft_id_to_target_id", torch.zeros(1)),
    "the drafter does not share": change("model", torch.nn.ModuleDict()),
    "the head is quantized (Dequantized)": change("model.lm_head.quant_method", Dequantized()),
    "the head has a bias": change("model.lm_head.bias", torch.zeros(1)),
    "the head has a bias, or added words": added_words,
    "computes in torch.float32": change("model_config.head_dtype", torch.float32),
    "tensor parallelism of 4": change("vllm_config.parallel_config.tensor_parallel_size", 4),
}
WITH_ROWS = {
    "drafts are sampled": change("speculative_config.draft_sample_method", "probabilistic"),
    "acceptance is estimated": change("speculator.enable_adaptive_verification", True),
    "drafts have a watermark": change("speculator.draft_watermarker", object()),
    "fewer than 64 words": few_words,
    "SimpleNamespace drafts in another way": change("vllm_config.parallel_config.tensor_parallel_size", 2),
}


@pytest.mark.parametrize("reason", [*ALWAYS, *WITH_ROWS])
def test_keeps_the_whole_head(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gate_of(V2_DRAFT_HEAD), "rows")
    runner = Runner()
    (ALWAYS | WITH_ROWS)[reason](runner)
    draft = getattr(runner.speculator, "model", None)
    head = getattr(draft, "lm_head", None)
    said = draft_head.obstacle(runner, "rows")
    assert said is not None
    assert reason in said
    assert (draft_head.obstacle(runner, "copy") is None) == (reason in WITH_ROWS)
    draft_head.install(runner)
    assert getattr(draft, "lm_head", None) is head
    assert not getattr(runner.speculator, "use_local_argmax_reduction", False)


@pytest.mark.parametrize(
    ("form", "vllms", "stays"), [("rows", True, True), ("copy", False, True), ("copy", True, False)]
)
def test_a_head_that_weight_updates_look_for_stays(
    form: str, vllms: bool, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_head, "quantized_lm_head_copy", object() if vllms else None)
    runner = Runner()
    runner.vllm_config.weight_transfer_config = object()
    assert ("would not find the head" in (draft_head.obstacle(runner, form) or "")) == stays


#: What differs from an engine that has a copy by default.
BY_DEFAULT: dict[str, dict[str, Any]] = {
    "reads the head once": {"speculative_config.num_speculative_tokens": 1},
    "takes little time": {"pays_from": 400_000_000},
    "only one GPU of": {"vllm_config.parallel_config.data_parallel_size": 2},
    "capability 9.0 was": {"capability": 80},
    "2% of the GPU's memory": {"memory": 50 * WORDS * WIDTH - 1},
    "before 0.33": {"vllms": None},
    "weights may change": {"vllm_config.model_config.enable_sleep_mode": True},
    "could not give it back": {"vllm_config.cache_config.kv_cache_memory_bytes": 1},
    "too little memory": {"vllm_config.model_config.original_max_model_len": -1},
    "": {},
}


@pytest.mark.parametrize("reason", BY_DEFAULT)
def test_by_default_a_large_head_is_copied_until_memory_is_short(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"pays_from": 1, "capability": 90, "memory": 50 * WORDS * WIDTH, "vllms": object(), **BY_DEFAULT[reason]}
    monkeypatch.delenv(gate_of(V2_DRAFT_HEAD), raising=False)
    monkeypatch.setattr(draft_head, "PAYS_FROM", asked["pays_from"])
    monkeypatch.setattr(draft_head, "quantized_lm_head_copy", asked["vllms"])
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (0, asked["memory"]), raising=False)
    platform = SimpleNamespace(is_device_capability=lambda one: one == asked["capability"])
    monkeypatch.setattr(draft_head, "current_platform", platform)
    monkeypatch.setattr(run_records, "current", lambda: SimpleNamespace(live={"engine-report"}))
    runner: Any = Runner()
    runner.device, runner.speculative_config.num_speculative_tokens = "cuda", 2
    runner.vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None, num_gpu_blocks_override=None),
        model_config=SimpleNamespace(enable_sleep_mode=False, original_max_model_len=None),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            world_size=1,
            data_parallel_size=1,
            worker_extension_cls="",
            distributed_executor_backend="uni",
        ),
        weight_transfer_config=None,
    )
    for path, value in BY_DEFAULT[reason].items():
        if "." in path:
            change(path, value)(runner)
    whole, draft = runner.model["lm_head"], runner.speculator.model
    said = draft_head.why_not_by_default(runner) or ""
    assert reason in said
    assert bool(reason) == bool(said)
    draft_head.install(runner)
    assert isinstance(draft.lm_head, draft_head.Fp8Head) == (not said)
    if not said:
        # FP8, and a scale for each row.
        assert runner.leave_draft_head() == WORDS * (WIDTH + 4)
        runner.reload_weights()
        runner.wake_up()
    assert draft.lm_head is whole


def test_a_gpu_without_a_kernel_keeps_the_whole_head(
    installed: Callable[[str], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no kernel\nfor this GPU")

    noted: dict[str, str] = {}
    monkeypatch.setattr(run_records, "note", noted.__setitem__)
    monkeypatch.setattr(Dequantized, "create_weights", refuse)
    runner = installed("copy")
    assert runner.speculator.model.lm_head is runner.model["lm_head"]
    assert noted[V2_DRAFT_HEAD].endswith("the head cannot be quantized: ValueError: no kernel")


def test_a_drafter_that_cannot_be_read_keeps_the_whole_head(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> None:
        raise AttributeError("lm_head")

    monkeypatch.setenv(gate_of(V2_DRAFT_HEAD), "rows")
    monkeypatch.setattr(draft_head, "other_logits", refuse)
    runner = Runner(rank=0, ranks=2)
    draft_head.install(runner)
    assert runner.speculator.model.lm_head is runner.model["lm_head"]
