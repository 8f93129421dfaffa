# SPDX-License-Identifier: Apache-2.0
"""Graphs of a step's inputs and tail, beside vLLM without them, over the scheduler's own order of calls."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

from vllm.model_executor.layers import logits_processor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    VocabParallelEmbedding,
    VocabParallelEmbeddingShardIndices,
)
from vllm.model_executor.models.interfaces import LocalArgmaxMixin
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

from vllm_hwplugin.base.features import gate_of
from vllm_hwplugin.base.gates import PLAIN_DECODE
from vllm_hwplugin.base.versions import Versions
from vllm_hwplugin.spec_decode import obstacles
from vllm_hwplugin.spec_decode.step_counts import Reason
from vllm_hwplugin.spec_decode.v2 import recording

from .. import engines
from ..engines import BLOCK, DRAFTS, MAX_REQS, VOCAB, config_of
from ..walks import BEST, MORE, PLAIN, UNPATCHED, Sides, host_of_graphs, walk
from .released_modules import ReleasedModules
from .scheduled_runner import STAND_INS, Side, read_by_the_plugin
from .test_mixed_graphs import Whole

pytestmark = pytest.mark.each_vllm("v2-tail-graph")
#: What requests ask of V2's sampler beside what `MORE` has. vLLM's front end refuses some of it beside drafts.
ALTERED: list[dict[str, Any]] = [
    {"temperature": 0.6, "seed": 11, "repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"temperature": 0.9, "seed": 13, "min_p": 0.2, "logit_bias": {4: 3.0, 7: -2.0}},
    {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": [3], "allowed_token_ids": [1, 3, 5, 8, 12]},
]
#: All features but one that pads what stock vLLM does not (`test_mixed_graphs`).
ALIKE = {"VLLM_HWPLUGIN_V2_MIXED_GRAPHS": "off"}


def wander(sides: Sides, kinds: list[dict[str, Any]], walks: int = 8, steps: int = 20) -> None:
    """Add requests of these kinds at random, and compare after each step. The same ways in each run."""
    for number in range(walks):
        chance = random.Random(number)
        for _ in range(steps):
            if chance.random() < 0.3:
                prompt = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 2 * BLOCK))]
                sides.add(prompt=prompt, max_tokens=chance.choice((2, 5, 9, 20)), **chance.choice(kinds))
            sides.step()
        sides.restart()


@pytest.fixture
def vllm_with_schedules(vllm_here: Any) -> Any:
    if not Versions(">=0.32").covers(vllm_here.version):
        pytest.skip("Model Runner V2 has no schedule of numbers of drafts")
    return vllm_here


#: Else a batch whose number of drafts goes by that of requests may have no graph in vLLM, and no padding.
GRAPHS_OF_COUNTS = {gate_of("backport-draft-count-graphs"): "auto"}


@contextmanager
def both(tree: Any, kind: Callable[[ReleasedModules], Side] = Side) -> Iterator[Sides]:
    with host_of_graphs() as monkeypatch:
        choices = (UNPATCHED | GRAPHS_OF_COUNTS, ALIKE)
        stock, patched = (ReleasedModules(tree, STAND_INS, **chosen) for chosen in choices)
        read_by_the_plugin(patched, monkeypatch)
        # The largest graph samples its requests in two chunks.
        monkeypatch.setattr(recording, "_MOST_LOGITS_BYTES", 4 * VOCAB * 2 * (1 + DRAFTS))
        yield Sides(kind(stock), kind(patched))


def test_nothing_differs_whatever_happens_to_requests(vllm_here: Any) -> None:
    with both(vllm_here) as sides:
        walks = walk(sides, 2 * (PLAIN + BEST) + MORE + ALTERED, examples=25)
    # The walks lead there: a step of this has three graphs more than vLLM's, whatever became of other requests. One
    # with a prompt, or with fewer drafts, has the graph that samples.
    assert sum(graphs > stock for stock, graphs in sides.replays) > 2 * walks
    tail, inputs = sides.both[1].runner.tail_graphs, sides.both[1].runner.step_inputs._step_counts.outcomes()
    sampling, drafting = tail._sampling.outcomes(), tail._drafting.outcomes()
    assert min(sampling["served"], inputs["served"]) > 2 * walks
    # Whatever a request asks the sampler for, vLLM samples, and nothing else.
    asked = {"sampling_parameters", "structured_output"}
    assert sampling.keys() >= asked
    assert not (drafting.keys() | inputs.keys()) & asked
    assert drafting["served"] >= inputs["served"]


class Alternating(Side):
    """vLLM samples in each second step in place of a graph, which then drafts.

    Before it does, nobody may rely on what rows of padding hold.
    """

    def __init__(self, modules: ReleasedModules, **how: Any) -> None:
        super().__init__(modules, **how)
        self._steps, self._written = 0, 0

    @torch.inference_mode()
    def inputs(self) -> dict[str, Any]:
        tail = getattr(self.runner, "tail_graphs", None)
        held = None if tail is None else tail.held
        if held is not None:
            self._steps += 1
            by_vllm = self._steps % 2 == 0
            tail.held = dataclasses.replace(
                held, sampling=Reason.SAMPLING_PARAMETERS if by_vllm else tail._needed(tail.captured, held.rows)
            )
            # What the step before left is copied to the host, as far as it had requests.
            written, outputs = max(len(held.req_ids), self._written), tail.captured.buffers.outputs
            for counts in (outputs.num_sampled, outputs.num_rejected) if by_vllm else ():
                counts[written:].fill_(DRAFTS)
        self._written = self.executed.input_batch.num_reqs
        return super().inputs()


def test_nor_does_it_whoever_samples_and_whatever_is_left_of_other_batches(
    vllm_with_schedules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests of two tokens have a graph of three, which one request of three may have used before."""

    def sizes(*arguments: Any, **choices: Any) -> Any:
        config = config_of(*arguments, **choices)
        config.compilation_config.cudagraph_capture_sizes = [6]
        return config

    monkeypatch.setattr(engines, "config_of", sizes)
    with both(vllm_with_schedules, partial(Alternating, schedule=[[1, 1, 2], [2, 4, 1]])) as sides:
        wander(sides, PLAIN + BEST, walks=4)
        tail = sides.both[1].runner.tail_graphs
    counts = tail._sampling.outcomes()
    assert min(counts["served"], counts["sampling_parameters"]) > 10
    assert {(one.query_len, one.shape.num_reqs) for one in tail.captured.graphs.values()} == {(3, 2), (2, 3)}


def test_nor_does_it_where_the_number_of_drafts_goes_by_that_of_requests(vllm_with_schedules: Any) -> None:
    with both(vllm_with_schedules, partial(Side, schedule=[[1, 1, 2], [2, 4, 1]])) as sides:
        walks = walk(sides, PLAIN + BEST + MORE, examples=8)
        tail = sides.both[1].runner.tail_graphs
    assert tail.captured.most_reqs == {3: 1, 2: 3}
    assert tail._drafting.outcomes()["served"] > 2 * walks
    # Where the number changes.
    assert tail._drafting.outcomes()["fewer_drafts"] > 0


def assert_nothing_differs(tree: Any, kind: Callable[[ReleasedModules], Side]) -> None:
    with both(tree, kind) as sides:
        wander(sides, PLAIN + BEST, walks=4)
        tail, inputs = sides.both[1].runner.tail_graphs, sides.both[1].runner.step_inputs._step_counts.outcomes()
    assert min(inputs["served"], tail._drafting.outcomes()["served"], tail._sampling.outcomes()["served"]) > 10


def test_nor_does_it_where_a_window_has_blocks_of_its_own(vllm_here: Any) -> None:
    assert_nothing_differs(vllm_here, partial(Side, window=True))


def test_nor_does_it_where_layers_have_a_state(vllm_here: Any) -> None:
    """Requests come and go, are preempted, take rows of others, and have rows of padding beside them."""
    with both(vllm_here, partial(Side, recurrent=True)) as sides:
        walks = walk(sides, PLAIN + BEST, examples=10)
        tail, inputs = sides.both[1].runner.tail_graphs, sides.both[1].runner.step_inputs._step_counts.outcomes()
    assert min(inputs["served"], tail._drafting.outcomes()["served"], tail._sampling.outcomes()["served"]) > walks


class Rotated(engines.Model):
    """A target with M-RoPE, whose prompts begin with what counts as an image: later positions are behind the tokens."""

    supports_mrope = True

    def get_mrope_input_positions(self, tokens: list[int], *_: Any) -> tuple[torch.Tensor, int]:
        behind = 1 + tokens[0] % 3
        positions = (torch.arange(len(tokens)) - behind).clamp(min=0).repeat(3, 1)
        positions[1, :1] += 1
        return positions, -behind

    def forward(self, *arguments: Any, positions: torch.Tensor, **named: Any) -> Any:
        if positions.dim() == 2:
            positions = (positions * torch.tensor([[1.0], [0.3], [0.1]])).sum(0)
        return super().forward(*arguments, positions=positions, **named)


def test_nor_does_it_where_positions_are_not_those_of_tokens(vllm_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_mrope(*arguments: Any, **choices: Any) -> Any:
        config = config_of(*arguments, **choices)
        config.model_config.uses_mrope, config.model_config.mrope_num_dims = True, 3
        return config

    monkeypatch.setattr(engines, "config_of", with_mrope)
    monkeypatch.setattr(engines, "Model", Rotated)
    assert_nothing_differs(vllm_here, Side)


class Standalone(engines.Model):
    """A draft that gets nothing of the target's."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **given: Any) -> Any:
        if not self._draft:
            return super().forward(input_ids, positions, **given)
        return super().forward(input_ids, positions, torch.zeros(len(input_ids), engines.HIDDEN))[0]


def test_nor_does_it_where_a_model_of_its_own_drafts(vllm_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if Versions("<0.31").covers(vllm_here.version):
        pytest.skip("Model Runner V2 has no such drafter")

    def standalone(*arguments: Any, **choices: Any) -> Any:
        config = config_of(*arguments, **choices)
        config.speculative_config.method = "draft_model"
        for name, answer in (("use_eagle", False), ("use_eagle_block_drop", False), ("uses_draft_model", True)):
            setattr(config.speculative_config, name, lambda answer=answer: answer)
        config.speculative_config.kv_cache_dtype = None
        config.num_lookahead_tokens += 1
        return config

    monkeypatch.setattr(engines, "config_of", standalone)
    monkeypatch.setattr(engines, "Model", Standalone)
    # Padding writes nothing.
    assert_nothing_differs(vllm_here, Whole)


class OwnWords(engines.Model):
    """A draft with its own vocabulary, in which two words have equal logits; with vLLM's methods of Eagle3's head."""

    compute_logits = Eagle3LlamaForCausalLM.compute_logits
    get_top_tokens = LocalArgmaxMixin.get_top_tokens
    targets = torch.arange(0, VOCAB, 2)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        words = len(self.targets)
        self.config = SimpleNamespace(draft_vocab_size=words, vocab_size=VOCAB)
        self.draft_id_to_target_id = torch.nn.Parameter(self.targets - torch.arange(words), requires_grad=False)
        weight = self.head.T[:words].repeat_interleave(2, 0)[:words]
        self.lm_head: Any = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
        torch.nn.Module.__init__(self.lm_head)
        # After the words comes padding, whose logits are the largest.
        self.lm_head.weight = torch.nn.Parameter(torch.cat((weight, 9 * weight)), requires_grad=False)
        self.lm_head.quant_method = SimpleNamespace(apply=lambda head, hidden, bias: hidden @ head.weight.T)
        self.lm_head.tp_size, self.lm_head.org_vocab_size, self.lm_head.num_embeddings = 1, words, words
        sizes = (0, 2 * words, 2 * words, 2 * words, 0, words, words, words)
        self.lm_head.shard_indices = VocabParallelEmbeddingShardIndices(*sizes)
        current = SimpleNamespace(model_config=None)
        with mock.patch.object(logits_processor, "get_current_vllm_config", return_value=current):
            self.logits_processor = logits_processor.LogitsProcessor(words)
        self.times = 0
        self.logits_processor.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.times += 1


class Unordered(OwnWords):
    targets = torch.arange(0, VOCAB, 2).flip(0)


@pytest.mark.parametrize(
    ("draft", "decision"),
    [
        (OwnWords, "over the drafter's own vocabulary"),
        (Unordered, "the drafter's vocabulary is not in the target's order"),
    ],
)
def test_nor_does_it_where_the_draft_has_its_own_words(
    vllm_here: Any, draft: type[OwnWords], decision: str, notes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if Versions("<0.26").covers(vllm_here.version):
        pytest.skip("vLLM makes logits of all words there")
    # 0.26 asks for the ranks of tensor parallelism also where there is one.
    monkeypatch.setattr(logits_processor, "tensor_model_parallel_all_gather", lambda logits: logits)
    monkeypatch.setattr(logits_processor, "get_tensor_model_parallel_world_size", lambda: 1, raising=False)
    target = engines.Model
    monkeypatch.setattr(engines, "Model", lambda name, *more: (draft if name == "draft" else target)(name, *more))
    with both(vllm_here) as sides:
        wander(sides, PLAIN + BEST, walks=4)
        tail, (stock, graphs) = sides.both[1].runner.tail_graphs, (side.models[1].times for side in sides.both)
    assert tail._drafting.outcomes()["served"] > 10
    assert notes["draft argmax"] == decision
    # Logits of all words are made neither for a graph nor by vLLM.
    assert stock > 0
    assert (graphs == 0) == (draft is OwnWords)


@pytest.mark.parametrize("half", ["sampling", "drafting"])
def test_one_half_is_in_graphs_without_the_other(vllm_here: Any, half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if half == "drafting" and Versions("<0.31").covers(vllm_here.version):
        pytest.skip("Model Runner V2 has no logits processors of others")
    # As if vLLM's own speculator, or logits processors, were another's.
    monkeypatch.setattr(obstacles, {"sampling": "SPECULATORS", "drafting": "_LOGITS_PROCESSORS"}[half], ())
    with both(vllm_here) as sides:
        runner, checked = sides.both[1].runner, list[Any]()
        runner.nwor = SimpleNamespace(check=checked.append)
        walks = walk(sides, PLAIN + BEST + MORE, examples=5)
    tail, inputs = runner.tail_graphs, runner.step_inputs._step_counts.outcomes()
    counts = {"sampling": tail._sampling.outcomes(), "drafting": tail._drafting.outcomes()}
    # nwor may compare the KV cache after each replay of sampling, which holds its restore.
    assert len(checked) == counts["sampling"].get("served", 0)
    assert counts.pop(half)["served"] > 2 * walks
    (other,) = counts.values()
    assert "not_captured" in other
    assert "served" not in other
    assert "served" in inputs


def test_vllms_estimate_is_of_graphs_alone(vllm_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with both(vllm_here) as sides:
        runner, done = sides.both[1].runner, list[str]()
        capture_begin = torch.cuda.CUDAGraph.capture_begin
        monkeypatch.setattr(
            torch.cuda.CUDAGraph,
            "capture_begin",
            lambda *given, **named: (done.append("captures"), capture_begin(*given, **named)),
        )
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: done.append("gives memory back"))
        runner.cudagraph_manager._max_full_descs_to_capture = 2
        runner.tail_graphs.capture()
    assert "captures" in done
    assert done[-1] == "gives memory back"


class FlashInfer(Side):
    """Without a drafter, where FlashInfer samples. Of the tokens it takes the worst, which nothing else does."""

    def __init__(self, modules: ReleasedModules) -> None:
        vars(modules("sample.sampler")).update(
            flashinfer_sampler_supported=lambda: True, flashinfer_sample=lambda logits, *_: logits.argmin(-1)
        )
        super().__init__(modules, drafts=0)


@pytest.mark.parametrize("by_flashinfer", [False, True])
def test_nothing_differs_without_a_drafter(
    vllm_here: Any, by_flashinfer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The seeds of requests that bring none.
    monkeypatch.setattr(np.random, "randint", lambda *_: 21)
    unseeded = [{name: value for name, value in kind.items() if name != "seed"} for kind in BEST]
    kinds = PLAIN + 2 * unseeded if by_flashinfer else 2 * (PLAIN + BEST) + MORE + ALTERED
    with both(vllm_here, FlashInfer if by_flashinfer else partial(Side, drafts=0)) as sides:
        walks = walk(sides, kinds, examples=8)
        tail, inputs = sides.both[1].runner.tail_graphs, sides.both[1].runner.step_inputs._step_counts.outcomes()
    sampling = tail._sampling.outcomes()
    assert min(sampling["served"], inputs["served"]) > walks
    # Whatever a request asks the sampler for, a graph makes inputs.
    asked = {"sampling_parameters"} if by_flashinfer else {"sampling_parameters", "structured_output"}
    assert sampling.keys() >= asked
    # Also beside a prompt, and where the target has no graph.
    assert sampling.keys() <= asked | {"served"}
    assert inputs.keys() <= {"served", "prompt", "no_full_graph"}
    assert not tail._drafting.outcomes()


def test_slots_are_there_where_vllm_looks_up_experts(vllm_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0.28 to 0.30 an engine that returns experts ended at its first step of decodes."""
    found: list[set[bool]] = []
    with both(vllm_here, partial(Side, drafts=0)) as sides:
        runner = sides.both[1].runner
        inputs = runner.step_inputs.attention_inputs

        def watched(batch: Any) -> Any:
            made = inputs(batch)
            if made is not None:
                found[-1].add(len(made[1]) > 0)
            return made

        monkeypatch.setattr(runner.step_inputs, "attention_inputs", watched)
        for capturer in (None, SimpleNamespace(get_routed_experts=lambda slots, num_tokens: None)):
            runner.routed_experts_capturer = capturer
            found.append(set())
            sides.add(prompt=[1, 2], max_tokens=6, temperature=0.0)
            sides.finish()
    assert found == [{False}, {True}]


def test_there_are_no_graphs_without_a_drafter_if_they_are_off(vllm_here: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLAIN_DECODE, "0")
    with both(vllm_here, partial(Side, drafts=0)) as sides:
        sides.add(prompt=[1, 2], max_tokens=6, temperature=0.0)
        sides.finish()
        runner = sides.both[1].runner
    assert runner.tail_graphs._sampling.outcomes().keys() == {"not_captured"}
    assert runner.step_inputs._step_counts.outcomes().keys() == {"not_captured"}


@pytest.mark.parametrize("recurrent", [True, "alone"])
def test_nothing_differs_at_the_corners(vllm_here: Any, recurrent: Any) -> None:
    """Each is met: a request comes at each of some steps, while others are about to end."""
    if recurrent == "alone" and Versions("<0.28").covers(vllm_here.version):
        pytest.skip("models without attention have no states on Model Runner V2")
    plain = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}, BEST[0]]
    met: Counter[str] = Counter()
    with both(vllm_here, partial(Side, recurrent=recurrent)) as sides:
        for wait in range(2, 6):
            for kind in plain:
                sides.add(prompt=[wait, 1, 2], max_tokens=9, **kind)
            for _ in range(wait):
                sides.step()
                met.update(corners_of(sides.both[1]))
            # One of a name that was there before, and then one with which all rows are taken.
            sides.come_again(wait % 3)
            sides.add(prompt=[5] * (1 + wait), max_tokens=12, temperature=0.0)
            while sides.both[0].scheduler.has_requests():
                sides.step()
                met.update(corners_of(sides.both[1]))
            sides.restart()
        assert met.keys() == {"largest graph full", "one row short", "a request outside the batch"}, met
        # The last: graphs cannot be looked up any more.
        for kind in plain:
            sides.add(prompt=[1, 2], max_tokens=12, **kind)
        for _ in range(4):
            sides.step()
        served = sides.both[1].runner.tail_graphs._sampling.outcomes()
        sides.move_weights()
        sides.finish()
        tail = sides.both[1].runner.tail_graphs
        assert tail._sampling.outcomes()["served"] == served["served"] > 0
        assert tail._sampling.outcomes()["not_captured"] > served.get("not_captured", 0)


def corners_of(side: Side) -> Iterator[str]:
    """Say where a graph that samples has had padding without a row of its own, or none."""
    runner, served = side.runner, side.runner.tail_graphs._sampling.outcomes().get("served", 0)
    before, side.served = vars(side).get("served", 0), served
    if side.executed is None or served == before:
        return
    rows = side.executed.input_batch.num_reqs
    if rows == MAX_REQS:
        yield "largest graph full"
    elif rows == MAX_REQS - 1:
        yield "one row short" if runner.req_states.free_indices else "a request outside the batch"
