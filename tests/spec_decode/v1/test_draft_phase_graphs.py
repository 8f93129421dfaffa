# SPDX-License-Identifier: Apache-2.0
"""A DFlash phase in graphs, on CPU tensors: a padded batch drafts what vLLM drafts, and padding writes nothing."""

from __future__ import annotations

import dataclasses
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm.v1.worker.gpu_model_runner", exc_type=ImportError)

from vllm import SamplingParams  # noqa: E402
from vllm.config import CUDAGraphMode  # noqa: E402
from vllm.v1.outputs import SamplerOutput  # noqa: E402
from vllm.v1.sample.metadata import SamplingMetadata  # noqa: E402

from vllm_hwplugin.spec_decode.decode_batch import GraphShape  # noqa: E402
from vllm_hwplugin.spec_decode.v1 import draft_phase, draft_phase_graphs  # noqa: E402
from vllm_hwplugin.spec_decode.v1.draft_phase import DraftPhase  # noqa: E402
from vllm_hwplugin.spec_decode.v1.draft_phase_graphs import PhaseGraphs, PhaseRecorder  # noqa: E402

from .. import recorded_graph  # noqa: E402
from ..dflash_drafter import DFlashModel, let_models_fuse  # noqa: E402
from ..drafters import HIDDEN, MAX_REQS, MAX_TOKENS, VOCAB, Runner, boot, propose  # noqa: E402
from ..recorded_graph import Graph, RecordedGraphs  # noqa: E402

DRAFTS = 3
WIDTH = 1 + DRAFTS


def plain_next_token(sampled: Any, discarded: Any, backup: Any, next_ids: Any, counts: Any, *_: Any, **__: Any) -> None:
    """vLLM's Triton kernel in torch, so that it can be recorded on any device."""
    valid = sampled != -1
    counts.copy_(valid.sum(1) * ~discarded)
    last = sampled.gather(1, (valid.sum(1, keepdim=True) - 1).clamp(min=0))[:, 0]
    next_ids.copy_(torch.where(counts > 0, last, backup[: len(last)]))


def plain_inputs(cu_drafts: Any, counts: Any, starts: Any, indices: Any, rejected: Any, *_: Any) -> None:
    """Another one: every request has drafts here."""
    verified = torch.diff(cu_drafts, prepend=cu_drafts.new_zeros(1))
    rejected.copy_(verified + 1 - counts)
    indices.copy_(starts[1:] - 1 - rejected)


def plain_rejection(verified: Any, drawn_from: Any, logits: Any, sampling_metadata: Any) -> SamplerOutput:
    """And vLLM's rejection sampler, of greedy requests."""
    best = logits.argmax(-1).view(-1, WIDTH)
    accepted = (verified.draft_token_ids.view(-1, DRAFTS) == best[:, :-1]).cumprod(1).sum(1, keepdim=True)
    return SamplerOutput(torch.where(torch.arange(WIDTH) <= accepted, best, -1).int(), None)


def recorded(run: Callable[[], None], *_: Any) -> Graph:
    run()
    return Graph(run, {})


def greedy_metadata() -> SamplingMetadata:
    """That of requests which ask for nothing else."""
    fields = {field.name: None for field in dataclasses.fields(SamplingMetadata)}
    nothing: dict[str, Any] = {"all_greedy": True, "no_penalties": True, "generators": {}, "output_token_ids": []}
    return SamplingMetadata(**fields | nothing)


class Target:
    """The runner's side of a step: tensors that stay where they are, of which vLLM writes a batch's part.

    What lies behind is an earlier batch's, but for slots and lengths, which vLLM pads.
    """

    def __init__(self, graphed: Any, runner: Runner) -> None:
        self.host, self.runner = graphed.host, runner
        host: Any = self.host
        host.input_ids = types.SimpleNamespace(gpu=torch.zeros(MAX_TOKENS, dtype=torch.int32))
        host.positions = torch.zeros(MAX_TOKENS, dtype=torch.int64)
        host.input_batch = types.SimpleNamespace(
            num_reqs=0,
            vocab_size=VOCAB,
            req_ids=[],
            sampling_metadata=greedy_metadata(),
            logitsprocs=types.SimpleNamespace(all=[]),
        )
        host.requests: dict[str, Any] = {}
        host.rejection_sampler = plain_rejection
        host.discard_request_mask = types.SimpleNamespace(np=torch.zeros(MAX_REQS, dtype=torch.bool).numpy())
        host.model = types.SimpleNamespace(compute_logits=lambda hidden: hidden)
        host.get_model = lambda: host.model
        host.model_config = types.SimpleNamespace(
            is_encoder_decoder=False, generation_config="vllm", override_generation_config={}
        )
        host.uses_mrope = host.enable_prompt_embeds = False
        host.async_output_copy_stream = host.valid_sampled_token_count_copy_stream = None
        host.draft_token_ids_copy_stream = host.valid_sampled_token_count_event = None
        host.speculative_config.method = "dflash"
        host.use_async_scheduling = False
        graphed.backup_next_token_ids = types.SimpleNamespace(
            gpu=torch.zeros(MAX_REQS, dtype=torch.int32), copy_to_gpu=lambda count: None
        )
        self.hidden = torch.zeros(MAX_TOKENS, HIDDEN, dtype=torch.int64)
        self.seq_lens = torch.zeros(MAX_REQS, dtype=torch.int32)
        self.slots = torch.zeros(MAX_TOKENS, dtype=torch.int64)
        host.draft_phase = DraftPhase(host)

    def start(self, mode: CUDAGraphMode) -> None:
        """vLLM's start of the drafter, and then of the target: each FULL graph is followed by its phase."""
        boot(self.host.drafter, mode, self.runner)
        for size in (8, 4, 2, 1):
            self.capture(size)

    def capture(self, size: int, *, profiling: bool = False) -> None:
        """The end of the patched `_dummy_run` that captures the target's graph of so many requests."""
        template, hidden = self.runner.template(), self.hidden[: size * WIDTH]
        template.seq_lens, template.slot_mapping = self.seq_lens, self.slots
        self.host.draft_phase.capture_behind((hidden, [hidden]), template, profiling=profiling)

    def step(self, batch: dict[str, Any], padded: int) -> torch.Tensor:
        """The calls of the patched `execute_model` and `sample_tokens`, with tokens that vLLM has sampled."""
        host, metadata = self.host, batch["common_attn_metadata"]
        count, num_tokens = metadata.num_reqs, metadata.num_actual_tokens
        host.input_ids.gpu[:num_tokens] = batch["target_token_ids"]
        host.positions[:num_tokens] = batch["target_positions"]
        self.hidden[:num_tokens] = batch["target_hidden_states"]
        self.seq_lens[:count], self.seq_lens[count:] = metadata.seq_lens, 0
        self.slots[:num_tokens], self.slots[num_tokens:] = metadata.slot_mapping, -1
        metadata.seq_lens, metadata.slot_mapping = self.seq_lens[:count], self.slots[:num_tokens]
        host.input_batch.num_reqs = count
        scheduled = types.SimpleNamespace(total_num_scheduled_tokens=num_tokens)
        verified = types.SimpleNamespace(num_draft_tokens=[DRAFTS] * count)
        hidden, phase = self.hidden[: padded * WIDTH], host.draft_phase
        sample_hidden, logits = phase.logits(
            scheduled, verified, hidden_states=hidden, indices=torch.arange(num_tokens)
        )
        assert len(logits) == num_tokens
        drafts: torch.Tensor = phase.propose(
            scheduled,
            sampled_tokens(batch),
            types.SimpleNamespace(all_greedy=True),
            hidden,
            sample_hidden,
            [hidden],
            verified,
            metadata,
            None,
        )
        return drafts


def sampled_tokens(batch: dict[str, Any]) -> torch.Tensor:
    """int32 [batch, 1 + drafts]: the last valid one is the batch's next token."""
    tokens = torch.full((len(batch["next_token_ids"]), WIDTH), -1, dtype=torch.int32)
    for row, rejected in enumerate(batch["num_rejected_tokens_gpu"].tolist()):
        tokens[row, : DRAFTS - rejected] = 1
        tokens[row, DRAFTS - rejected] = batch["next_token_ids"][row]
    return tokens


@pytest.fixture
def sides(make_dflash: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Target]:
    """A stock proposer, and a runner whose phases are recorded. vLLM samples."""
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    return start(make_dflash, monkeypatch)


def start(make_dflash: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Target]:
    stock, target = prepared(make_dflash, monkeypatch)
    target.start(CUDAGraphMode.FULL_DECODE_ONLY)
    RecordedGraphs.sealed = True
    return stock, target


def prepared(make_dflash: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Target]:
    let_models_fuse(monkeypatch)
    runner = Runner(1)
    stock, graphed = make_dflash("stock", DRAFTS), make_dflash("graphs", DRAFTS)
    monkeypatch.setattr(draft_phase_graphs, "record_graph", recorded)
    # Of row starts that it has on the host, vLLM reads the last one. Here they look like the device's.
    monkeypatch.setattr(recorded_graph, "_HOST_READS", ())
    monkeypatch.setattr(draft_phase, "reserved_memory", lambda: 0)
    names = graphed.prepare_inputs_padded.__func__.__globals__
    monkeypatch.setitem(names, "_eagle_prepare_next_token_padded", plain_next_token)
    monkeypatch.setitem(names, "_eagle_prepare_inputs_padded", plain_inputs)
    target = Target(graphed, runner)
    boot(stock, CUDAGraphMode.NONE, runner)
    return stock, target


def test_recording_writes_nothing(sides: tuple[Any, Target]) -> None:
    """All requests are padding meanwhile."""
    stock, target = sides
    assert torch.equal(target.host.drafter.model.cache[:-1], stock.model.cache[:-1])


def test_padding_drafts_nothing_and_writes_nothing(sides: tuple[Any, Target]) -> None:
    """Rows of the block table that a batch does not reach still name blocks of earlier batches."""
    stock, target = sides
    graphed, drafted = target.host.drafter, set()
    graphed.model.cache.copy_(stock.model.cache)
    for size, padded in ((8, 8), (3, 4), (1, 1), (7, 8), (5, 8), (2, 2), (3, 4), (6, 8)):
        batch = target.runner.batch(DRAFTS, size=size)
        expected = propose(stock, batch)
        found = target.step(batch, padded)
        assert found.data_ptr() == target.host.draft_phase._plan.buffers.drafts.data_ptr(), "no graph drafted"
        assert found.tolist() == expected.tolist()
        drafted.update(found.flatten().tolist())
        # All but the row that takes what has no slot.
        assert torch.equal(graphed.model.cache[:-1], stock.model.cache[:-1])
    assert len(drafted) > 30
    phase = target.host.draft_phase
    assert (phase._sampling.outcomes(), phase._drafting.outcomes()) == ({"not_captured": 8}, {"served": 8})


def test_weights_that_no_graph_reads_leave_every_later_step_to_vllm(
    sides: tuple[Any, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another shape than those that were recorded, which stay as they were."""
    stock, target = sides
    graphed = target.host.drafter
    graphed.model.cache.copy_(stock.model.cache)
    # vLLM's way from a batch to the drafter.
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(target.host, "propose_draft_token_ids", lambda *_: propose(graphed, asked[-1]), raising=False)
    for weights in ((23,), (3, 5, 7, 11), (3, 5, 7, 11), (3, 5, 7, 11)):
        for proposer in (stock, graphed):
            proposer.model.model.fuse(*weights)
        batch = target.runner.batch(DRAFTS, size=3)
        asked.append(dict(batch))
        expected = propose(stock, batch)
        assert target.step(batch, 4).tolist() == expected.tolist()
        assert torch.equal(graphed.model.cache[:-1], stock.model.cache[:-1])


@pytest.fixture
def left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Target], None]:
    """`left_to_vllm(stock, target)`: batches go vLLM's way from the target to the drafter, and drafts are its own."""

    def compare(stock: Any, target: Target) -> None:
        graphed = target.host.drafter
        graphed.model.cache.copy_(stock.model.cache)
        for size, padded in ((8, 8), (3, 4), (1, 1)):
            batch = target.runner.batch(DRAFTS, size=size)
            asked, expected = dict(batch), propose(stock, batch)
            with monkeypatch.context() as patch:
                patch.setattr(
                    target.host, "propose_draft_token_ids", lambda *_, a=asked: propose(graphed, a), raising=False
                )
                assert target.step(batch, padded).tolist() == expected.tolist()
            assert torch.equal(graphed.model.cache[:-1], stock.model.cache[:-1])

    return compare


@pytest.mark.parametrize("of", ["target", "draft"])
def test_a_head_in_the_place_of_another_leaves_every_later_step_to_vllm(
    make_dflash: Any, left_to_vllm: Any, monkeypatch: pytest.MonkeyPatch, uses: dict[str, tuple[bool, str]], of: str
) -> None:
    """vLLM calls it outside of its own graphs, so it would go on with the new one."""
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    stock, target = prepared(make_dflash, monkeypatch)
    models = {"target": target.host.model, "draft": target.host.drafter.model}
    for model in models.values():
        model.lm_head = torch.nn.Linear(2, 2)
    target.start(CUDAGraphMode.FULL_DECODE_ONLY)
    RecordedGraphs.sealed = True
    models[of].lm_head.weight = torch.nn.Parameter(torch.ones(2, 2))
    left_to_vllm(stock, target)
    phase = target.host.draft_phase
    assert phase._drafting.outcomes() == ({"not_captured": 3} if of == "target" else {"moved": 1, "not_captured": 2})
    given_up = {"v1-draft-phase", *(("draft-full-graph", "dflash-full-graph") if of == "draft" else ())}
    reason = "the weight of a Linear is another tensor than at capture"
    assert {feature for feature, said in uses.items() if said == (False, reason)} == given_up


def test_without_the_graphs_of_the_context_there_is_no_phase(
    make_dflash: Any, monkeypatch: pytest.MonkeyPatch, fail: Any, uses: Any, left_to_vllm: Any
) -> None:
    """It records the context, too, and replays it where the context's own graphs would be."""
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    stock, target = prepared(make_dflash, monkeypatch)
    fail(DFlashModel, "precompute_and_store_context_kv")
    target.start(CUDAGraphMode.FULL_DECODE_ONLY)
    RecordedGraphs.sealed = True
    assert uses["v1-draft-phase"] == (False, "capturing the graphs that it is built on failed")
    left_to_vllm(stock, target)


def test_the_memory_on_record_is_that_of_the_phases_alone_and_counted_once(
    make_dflash: Any, monkeypatch: pytest.MonkeyPatch, notes: dict[str, str]
) -> None:
    """The first shape needs some, which the others share; the target's graphs need some between them."""
    _, target = prepared(make_dflash, monkeypatch)
    reserved = iter(mib << 20 for mib in (10, 110, 130, 130, 150, 150, 170, 171))
    monkeypatch.setattr(draft_phase, "reserved_memory", lambda: next(reserved))
    target.start(CUDAGraphMode.FULL_DECODE_ONLY)
    assert "101 MiB" in notes["v1-draft-phase"]


@pytest.mark.parametrize("profiled", [12, 8, 7])
def test_the_memory_profile_needs_what_the_largest_shape_needs(
    make_dflash: Any, monkeypatch: pytest.MonkeyPatch, profiled: int
) -> None:
    """Whatever the shape is that vLLM measures. What is recorded then is not kept, but until the ranks of tensor
    parallelism have exchanged what it reads.
    """
    _, target = prepared(make_dflash, monkeypatch)
    boot(target.host.drafter, CUDAGraphMode.FULL_DECODE_ONLY, target.runner)
    record, shapes, made = PhaseRecorder.record, [], []

    def watched(self: PhaseRecorder, rung: GraphShape, *args: Any) -> PhaseGraphs:
        graphs = record(self, rung, *args)
        shapes.append(rung.num_reqs)
        made.append(weakref.ref(graphs))
        return graphs

    exchanged: list[bool] = []
    monkeypatch.setattr(PhaseRecorder, "record", watched)
    monkeypatch.setattr(draft_phase, "settle_all_reduce", lambda: exchanged.append(made[0]() is not None))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda: 0)
    target.capture(profiled, profiling=True)
    assert shapes == [8 if profiled >= 8 else 4]
    assert exchanged == [True]
    assert made[0]() is None


def test_the_memory_profile_finds_the_allocator_as_it_was(make_dflash: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given back here, vLLM's next run would take again, and be charged with for each graph."""
    _, target = prepared(make_dflash, monkeypatch)
    boot(target.host.drafter, CUDAGraphMode.FULL_DECODE_ONLY, target.runner)
    held, empty = [130 << 20], torch.empty

    def gives_back() -> int:
        held[0] = 34 << 20
        return held[0]

    def takes(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.uint8:
            held[0] += size[0]
        return empty(*size, **options)

    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda: held[0])
    monkeypatch.setattr(draft_phase, "reserved_memory", gives_back)
    monkeypatch.setattr(torch, "empty", takes)
    target.capture(8, profiling=True)
    assert held == [130 << 20]


class Filtering:
    """vLLM's rejection sampler, which samples what each request is filtered by.

    Args:
        native: whether torch draws what it samples at random.
    """

    def __init__(self, native: bool) -> None:
        sampler = types.SimpleNamespace(forward_native="torch", forward="torch" if native else "FlashInfer")
        self.sampler = types.SimpleNamespace(topk_topp_sampler=sampler)

    def __call__(self, verified: Any, drawn_from: Any, logits: Any, asked: SamplingMetadata) -> SamplerOutput:
        tokens = torch.zeros(len(verified.num_draft_tokens), WIDTH, dtype=torch.int32)
        for column, one in enumerate((asked.top_k, asked.top_p, asked.temperature)):
            if one is not None:
                tokens[:, column] = (one * 100).round()
        return SamplerOutput(tokens, None)


@pytest.mark.parametrize("native", [True, False], ids=["native", "FlashInfer"])
def test_requests_are_filtered_by_a_graph_as_the_models_defaults_are(
    make_dflash: Any, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    _, target = prepared(make_dflash, monkeypatch)
    host = target.host
    host.rejection_sampler = Filtering(native)
    host.model_config.override_generation_config = {"top_k": 20, "top_p": 0.8}
    target.start(CUDAGraphMode.FULL_DECODE_ONLY)
    RecordedGraphs.sealed = True
    host.input_batch.num_reqs, host.input_batch.req_ids = 3, list("abc")
    host.requests = dict.fromkeys("abc", types.SimpleNamespace(sampling_params=SamplingParams(top_k=20)))
    scheduled = types.SimpleNamespace(
        total_num_scheduled_tokens=3 * WIDTH,
        scheduled_spec_decode_tokens=dict.fromkeys("abc", [0] * DRAFTS),
        has_structured_output_requests=False,
    )
    verified = types.SimpleNamespace(num_draft_tokens=[DRAFTS] * 3)
    hidden, indices = target.hidden[: 4 * WIDTH], torch.arange(3 * WIDTH)
    # What vLLM has for requests that do not ask: the vocabulary's size, and 1.
    k, p = torch.tensor([20, VOCAB, 3], dtype=torch.int32), torch.tensor([0.8, 1.0, 0.5])
    temperature = torch.tensor([0.6, 0.0, 1.0])
    monkeypatch.setattr(host, "_sample", lambda *_: None, raising=False)
    for top_k, top_p in ((k, p), (None, None), (k, None), (None, p), (k.flip(0), p.flip(0))):
        host.input_batch.sampling_metadata = dataclasses.replace(
            greedy_metadata(), all_greedy=False, top_k=top_k, top_p=top_p, temperature=temperature
        )
        _, logits = host.draft_phase.logits(scheduled, verified, hidden_states=hidden, indices=indices)
        found = host.draft_phase.sample(logits, verified)
        if (top_k is None) == (top_p is None) and (native or top_k is None):
            expected = Filtering(native)(verified, None, None, host.input_batch.sampling_metadata)
            assert found.sampled_token_ids.tolist() == expected.sampled_token_ids.tolist()
        else:
            assert found is None
    outcomes = {"served": 3, "sampling_parameters": 2} if native else {"served": 1, "sampling_parameters": 4}
    assert host.draft_phase._sampling.outcomes() == outcomes
