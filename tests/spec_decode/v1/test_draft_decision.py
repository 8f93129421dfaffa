"""What is captured for a drafter, decided on plain facts; `test_draft_graphs` has the same on proposers."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_hwplugin.spec_decode.v1.draft_decision import (
    BatchFacts,
    CaptureFacts,
    CapturePlan,
    ChainFacts,
    DrafterFacts,
    DraftKeys,
    FirstPass,
    chain_obstacle,
    decide,
    drafter_obstacle,
    plan_keys,
)

DRAFTER = DrafterFacts("EagleProposer", "FULL_AND_PIECEWISE")
BATCHES = BatchFacts((4, 8, 16), mixed=False, num_speculative_tokens=3, first=FirstPass(4, 1000), max_num_seqs=4)
AT_CAPTURE = CaptureFacts(table_rows=4)
KEYS = DraftKeys(uniform={1: (1, 2, 4), 4: (1, 2, 4)}, mixed=(), max_num_seqs=4)


def test_it_needs_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, vllm_hwplugin.spec_decode.v1.draft_decision\n"
        "heavy = {'torch', 'vllm'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


@pytest.mark.parametrize("at_capture", [None, AT_CAPTURE], ids=["before capture", "at capture"])
def test_without_an_obstacle_the_drafter_follows_the_target(at_capture: CaptureFacts | None) -> None:
    assert decide(DRAFTER, BATCHES, at_capture) == CapturePlan(KEYS)


OBSTACLES = [
    ({"proposer": "Gemma4Proposer", "covered": False}, "Gemma4Proposer has drafting code of its own"),
    ({"enforce_eager": True}, "enforce_eager"),
    ({"target_mode": "PIECEWISE", "target_has_graphs": False}, "cudagraph_mode is PIECEWISE"),
    ({"padded_batch": False}, "disable_padded_drafter_batch"),
    ({"data_parallel_size": 2}, "data parallelism"),
    ({"context_parallel_size": 2}, "context parallelism"),
    ({"lora": True}, "LoRA adapters"),
    ({"breakable_any_mode": True}, "breakable CUDA graphs"),
    ({"shares_mtp_indices": True}, "top-k indices"),
    ({"prompts_by_layer": "ExampleConnector"}, "ExampleConnector may load and save keys layer by layer"),
]


@pytest.mark.parametrize(("change", "reason"), OBSTACLES)
def test_an_obstacle_of_the_drafter_decides_whatever_else_there_is(change: dict, reason: str) -> None:
    drafter = dataclasses.replace(DRAFTER, **change)
    found = drafter_obstacle(drafter)
    assert found is not None
    assert reason in found
    others = CaptureFacts(attention="no graph may hold it", table_rows=None)
    for at_capture in (None, AT_CAPTURE, others):
        assert decide(drafter, BATCHES, at_capture) == CapturePlan(None, found)


@pytest.mark.parametrize(
    ("batches", "at_capture", "reason"),
    [
        ({}, {"attention": "no graph may hold it"}, "no graph may hold it"),
        ({"capture_sizes": ()}, {}, "no capture size holds a whole batch"),
        # Steps are left out by parallel drafting, and the first pass by its length.
        ({"parallel_drafting": True}, {"decode_threshold": 3}, "no capture size holds a whole batch"),
        ({}, {"table_rows": None}, "no attention metadata for the drafter's KV-cache group"),
        ({}, {"table_rows": 3}, "the largest graph has 4 rows, and the drafter's block table holds 3"),
        ({"capture_sizes": ()}, {"table_rows": None}, "no capture size holds a whole batch"),
        ({"capture_sizes": ()}, {"attention": "no graph may hold it"}, "no graph may hold it"),
    ],
)
def test_what_shows_at_capture_decides_anew(batches: dict, at_capture: dict, reason: str) -> None:
    facts = dataclasses.replace(BATCHES, **batches)
    found = decide(DRAFTER, facts, dataclasses.replace(AT_CAPTURE, **at_capture))
    assert found.keys is None
    assert reason in found.reason
    # Before capture nothing is known of it, and what the batches alone forbid is.
    assert (decide(DRAFTER, facts).keys is None) == (facts.capture_sizes == ())


# -- which shapes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("slots", [0, 1, 5])
def test_every_query_length_has_the_targets_rungs(mixed: bool, parallel: bool, k: int, slots: int) -> None:
    width, sizes = 1 + k + slots, tuple(rung * (1 + k) for rung in (1, 2, 4, 8))
    keys = plan_keys(BatchFacts(sizes, mixed, k, FirstPass(width, 1000), 7, parallel), None)
    uniform = {width: (1, 2, 4, 7)}
    if k > 1 and not parallel:
        uniform[1] = (1, 2, 4, 7)
    assert keys == DraftKeys(uniform=uniform, mixed=sizes if mixed else (), max_num_seqs=7)


@pytest.mark.parametrize(("threshold", "planned"), [(None, True), (4, True), (3, False), (1, False)])
def test_the_first_pass_is_left_out_above_the_decode_threshold(threshold: int | None, planned: bool) -> None:
    assert plan_keys(BATCHES, threshold).uniform == {1: (1, 2, 4)} | ({4: (1, 2, 4)} if planned else {})


def test_what_the_drafters_buffers_do_not_hold_is_left_out() -> None:
    facts = BatchFacts((8, 4, 16, 24), mixed=True, num_speculative_tokens=3, first=FirstPass(8, 16), max_num_seqs=6)
    assert plan_keys(facts, None) == DraftKeys(uniform={1: (1, 2, 4, 6), 8: (1, 2)}, mixed=(4, 8, 16), max_num_seqs=6)


def test_batches_that_are_always_uniform_have_no_mixed_graphs() -> None:
    first = FirstPass(4, max_tokens=1000, always_uniform=True)
    keys = plan_keys(dataclasses.replace(BATCHES, mixed=True, first=first, parallel_drafting=True), None)
    assert keys == DraftKeys(uniform={4: (1, 2, 4)}, mixed=(), max_num_seqs=4)


# -- the chain --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 3])
def test_steps_make_a_chain(k: int) -> None:
    assert chain_obstacle(ChainFacts(k)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_speculative_tokens": 1}, "there is no chain"),
        ({"parallel_drafting": True}, "there is no chain"),
        ({"expanded_hidden_states": True}, "wider than those it samples from"),
        ({"attention": "ZBuilder: it plans"}, "metadata has to be built between steps (ZBuilder: it plans)"),
        ({"host_side": ("uses_mrope", "eplb_state")}, "host work between steps: uses_mrope, eplb_state"),
    ],
)
def test_steps_are_launched_one_by_one(change: dict, reason: str) -> None:
    assert reason in (chain_obstacle(dataclasses.replace(ChainFacts(3), **change)) or "")
