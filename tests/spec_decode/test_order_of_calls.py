# SPDX-License-Identifier: Apache-2.0
"""Graphs of a step's inputs and draft phase, beside vLLM without them, over the scheduler's own order of calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("vllm.v1.worker.gpu_model_runner", exc_type=ImportError)

from vllm.config.compilation import CUDAGraphMode

from vllm_hwplugin.base.features import gate_of
from vllm_hwplugin.base.versions import Versions
from vllm_hwplugin.spec_decode.capture_sizes import full_mixed_sizes
from vllm_hwplugin.spec_decode.step_counts import Reason
from vllm_hwplugin.spec_decode.v1 import draft_phase_graphs, mixed_graphs, mixed_sizes

from .engines import DRAFTS
from .scheduled_runner import Side, modules_of, read_by_the_plugin
from .walks import BEST, MORE, PLAIN, UNPATCHED, Sides, host_of_graphs, walk

pytestmark = pytest.mark.each_vllm("v1-step-inputs")
#: Else, up to 0.26, a batch without requests writes into blocks that requests have left.
VACATED = {gate_of("backport-vacated-row"): "auto"}
#: Without seeds: after a piece of a seeded request's prompt vLLM winds its generator back, which the host's cannot be.
KINDS = [{name: value for name, value in kind.items() if name != "seed"} for kind in 4 * PLAIN + BEST + MORE]


#: A drafter's graphs without one of the whole phase: with a graph of all steps behind the first pass, and without it.
CHAIN = {gate_of("v1-draft-phase"): "off"}
PASSES = CHAIN | {gate_of("draft-loop-graph"): "off"}


@contextmanager
def both(tree: Any, choices: Mapping[str, str] = {}, **how: Any) -> Iterator[Sides]:
    """Yield unpatched vLLM, and vLLM with `choices` of the features; `how` are settings of both engines."""
    with host_of_graphs() as monkeypatch:
        stock, patched = (modules_of(tree, monkeypatch, **one) for one in (UNPATCHED | VACATED, choices))
        read_by_the_plugin(patched, monkeypatch)
        # The largest graphs verify their requests in two parts.
        monkeypatch.setattr(draft_phase_graphs, "TOKENS_AT_ONCE", 2 * (1 + DRAFTS))
        yield Sides(Side(stock, **how), Side(patched, **how))


@pytest.mark.parametrize(
    "how",
    [{}, {"asynchronous": False}, {"drawn": True}, {"recurrent": True}],
    ids=["asynchronous", "synchronous", "drawn drafts", "layers with a state"],
)
def test_nothing_differs_whatever_happens_to_requests(vllm_here: Any, how: dict[str, bool]) -> None:
    with both(vllm_here, **how) as sides:
        runner, restored = sides.both[1].runner, list[Any]()
        runner.nwor = SimpleNamespace(restore=restored.append)
        walks = walk(sides, KINDS, examples=10)
    # The walks lead there: inputs, sampling and drafting are graphs beside the target's.
    assert sum(graphs - stock == 3 for stock, graphs in sides.replays) > 2 * walks
    phase, inputs = runner.draft_phase, runner.step_inputs._step_counts.outcomes()
    sampling, drafting = phase._sampling.outcomes(), phase._drafting.outcomes()
    assert sampling.keys() >= {"prompt", "sampling_parameters"}
    # vLLM 0.21.0 gives each batch its output tokens, also where no request asks for what needs them.
    assert "served" in sampling or Versions("==0.21.0").covers(vllm_here.version)
    assert not (drafting.keys() | inputs.keys()) & {"sampling_parameters", "structured_output"}
    assert inputs.keys() >= {"served", "prompt"}
    # A graph that samples leaves the KV cache to nwor, as vLLM's sampler does.
    assert len(restored) == sampling.get("served", 0)


@pytest.mark.parametrize(
    ("choices", "how"),
    [
        (CHAIN, {"drafts": 3}),
        (PASSES, {"mode": CUDAGraphMode.FULL}),
        (PASSES, {"blocks": True}),
        ({}, {"blocks": True, "drafts": 1}),
    ],
    ids=["chain", "passes", "passes of DFlash", "DFlash"],
)
def test_nor_does_it_where_only_a_drafters_passes_have_graphs(
    vllm_here: Any, choices: dict[str, str], how: dict[str, Any]
) -> None:
    if "blocks" in how and Versions("<0.24").covers(vllm_here.version):
        pytest.skip("TRITON_ATTN, with which the engines here run, has no non-causal metadata")
    with both(vllm_here, choices, **how) as sides:
        walks = walk(sides, KINDS, examples=6)
        # As many tokens as two requests with all their drafts.
        for token in range(4):
            for length in (2, 2 * sides.both[0].drafts):
                sides.add(prompt=[token + 2 * place for place in range(length)], max_tokens=4, temperature=0.0)
            sides.finish()
        drafter = sides.both[1].runner.drafter
    passes = drafter.draft_graphs._step_counts.outcomes()
    assert passes["served"] > 2 * walks
    # DFlash's pass over blocks, and graphs of mixed batches, take prompts.
    assert ("prompt" in passes) == (choices is CHAIN)
    if choices is CHAIN:
        assert drafter.draft_loop._step_counts.outcomes()["served"] > 2 * walks


@pytest.mark.parametrize("how", [{}, {"blocks": True}], ids=["Eagle", "DFlash"])
def test_nor_does_it_where_batches_with_prompts_have_graphs(
    vllm_here: Any, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "blocks" in how and Versions("<0.24").covers(vllm_here.version):
        pytest.skip("TRITON_ATTN, with which the engines here run, has no non-causal metadata")
    # The graphs here have 6 and 12 tokens, as graphs of decode batches do.
    monkeypatch.setattr(mixed_graphs, "_SMALLEST", 1)
    # Fewer requests than the engines here have.
    for module in (mixed_graphs, mixed_sizes):
        monkeypatch.setattr(module, "MAX_NUM_REQS", 3)
    with both(vllm_here, **how) as sides:
        runner = sides.both[1].runner
        assert full_mixed_sizes(runner.compilation_config) == (6, 12)
        dispatcher, held = runner.cudagraph_dispatcher, list[int]()
        dispatch = dispatcher.dispatch

        def dispatched(*asked: Any, **given: Any) -> Any:
            mode, desc = dispatch(*asked, **given)
            if mode == CUDAGraphMode.FULL and not desc.uniform:
                held.append(desc.num_reqs)
            return mode, desc

        dispatcher.dispatch = dispatched
        walks = walk(sides, KINDS, examples=20)
    assert len(held) > walks // 4
    assert set(held) == {3}
    # Behind a decode batch's graph of the same size.
    assert runner.draft_phase._drafting.outcomes()["served"] > walks


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "synchronous"])
def test_a_prompt_that_is_aborted_in_its_middle_leaves_no_mark(vllm_here: Any, asynchronous: bool) -> None:
    """Its row, whose tokens vLLM throws away, goes to a request that decodes."""
    with both(vllm_here, asynchronous=asynchronous) as sides:
        inputs = sides.both[1].runner.step_inputs._step_counts
        for number in range(2):
            sides.add(prompt=[1, number], max_tokens=30, temperature=0.0)
        for _ in range(4):
            sides.step()
        # A batch of one request, whose inputs vLLM must have made once.
        sides.abort(0)
        sides.step()
        sides.add(prompt=[1, 3], max_tokens=30, temperature=0.0)
        for _ in range(4):
            sides.step()
        # The long prompt takes the row of the first.
        sides.abort(0)
        sides.add(prompt=list(range(12)) * 3, max_tokens=2, temperature=0.0)
        sides.step()
        mask = sides.both[1].runner.discard_request_mask
        assert mask.np[:2].tolist() == mask.gpu[:2].tolist() == [True, False]
        sides.abort(1)
        before = inputs.outcomes()["served"]
        sides.step()
        assert inputs.outcomes()["served"] == before + 1
        assert not mask.np[0]
        assert not mask.gpu[0]
        sides.finish()


def test_a_step_is_left_to_vllm_where_one_thing_is_not_as_before(vllm_here: Any) -> None:
    """Each by itself, between steps that graphs prepare."""
    answers: list[Any] = []
    with both(vllm_here) as sides:
        runner = sides.both[1].runner
        step_for = runner.step_inputs._step_for

        def asked(scheduled: Any) -> Any:
            found = step_for(scheduled)
            request = type(next(iter(runner.requests.values())))
            for owner, name, value in (
                (scheduled, "scheduled_new_reqs", ["new"]),
                (scheduled.scheduled_cached_reqs, "resumed_req_ids", {"one"}),
                # vLLM throws away what is sampled for it.
                (request, "num_tokens", 1000),
                (runner.input_batch, "prev_req_id_to_index", {}),
                (runner, "valid_sampled_token_count_gpu", None),
                (runner, "_draft_token_ids", [[1, 2]]),
            ):
                with mock.patch.object(owner, name, value):
                    answers.append(step_for(scheduled) if isinstance(found, tuple) else ())
            return found

        runner.step_inputs._step_for = asked
        sides.add(prompt=[1, 2], max_tokens=9, temperature=0.0)
        sides.finish()
    expected = [*2 * [Reason.REQUESTS_CHANGED], Reason.PROMPT, Reason.REQUESTS_CHANGED, *2 * [Reason.STEP_BEFORE]]
    served = [answer for answer in answers if answer != ()]
    assert served
    assert served == expected * (len(served) // len(expected))
