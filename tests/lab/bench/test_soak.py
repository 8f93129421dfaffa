from __future__ import annotations

import copy
import dataclasses
import re

import pytest

from vllm_hwplugin_lab.bench import find_checkpoints, soak
from vllm_hwplugin_lab.bench._soak_engine import gaps
from vllm_hwplugin_lab.bench.soak import SoakJob, SoakSettings, Text, failures, judged, judging_job, load_job

POOL = ((1, 2, 3), (4, 5, 6))


@pytest.fixture
def asked():
    return SoakSettings(
        method="dflash",
        k=7,
        steps=10_000,
        max_num_seqs=32,
        seed=0,
        cudagraph_mode="FULL",
        under=(),
        vllm_environment={"ALL": "1"},
        patched_environment={"ONE": "2"},
        sides=("stock", "patched"),
    )


def entry(**changes):
    return {
        "error": None,
        "steps": 10_003,
        "requests": 5,
        "batch_sizes": {"1": 40, "32": 60},
        "drafts": 160_000,
        "accepted_per_position": [128_000, 80_000],
        "draft_phases_in_graphs": 9_000,
        "texts": {"count": 5, "worst_gap": 0.125, "not_first_choice": 0.001},
        **changes,
    }


def test_the_load_is_the_same_for_both_sides(asked, gpu_host):
    stock, patched = (load_job(side, asked, gpu_host, find_checkpoints(None), POOL) for side in ("stock", "patched"))
    assert stock.options == patched.options
    assert (stock.steps, stock.seed, stock.pool) == (patched.steps, patched.seed, patched.pool) == (10_000, 0, POOL)
    differing = {k for k in patched.environment if patched.environment[k] != stock.environment.get(k)}
    assert differing == {"VLLM_HWPLUGIN", "ONE"}
    # One process, which a memory checker can follow. Room for 32 x 8 drafts twice over, as vLLM keeps the draft's slots
    # out of the budget, and little enough that a few prompts at once are prefilled in pieces.
    assert patched.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert 2 * 32 * 8 < patched.options["max_num_batched_tokens"] < 4 * 192
    assert patched.options["compilation_config"] == {"cudagraph_mode": "FULL"}
    assert patched.options["speculative_config"]["num_speculative_tokens"] == 7


def test_texts_are_read_by_stock_vllm_without_speculation(asked, gpu_host):
    job = judging_job(asked, gpu_host, find_checkpoints(None))
    assert "speculative_config" not in job.options
    assert job.environment["VLLM_HWPLUGIN"] == "0"
    assert job.options["max_model_len"] == 1 + soak.MAX_MODEL_LEN
    assert job.steps == 0


def test_a_job_survives_its_json(asked, gpu_host):
    for job in (
        load_job("mrv2-patched", asked, gpu_host, find_checkpoints(None), POOL, until=5.0),
        judging_job(asked, gpu_host, find_checkpoints(None)),
    ):
        assert SoakJob.from_json(job.to_json()) == job


def test_what_holds_has_no_failures(asked):
    assert failures({"stock": entry(draft_phases_in_graphs=0), "patched": entry()}, asked, "cuda") == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"error": "exit code 99"}, "patched: exit code 99"),
        ({"steps": 9_999}, "patched: 9999 steps of 10000"),
        ({"batch_sizes": {"1": 9, "31": 1}}, r"patched: no step had 32 requests; seen: \[1, 31\]"),
        ({"batch_sizes": {"7": 9}}, r"patched: no step had 1 or 32 requests"),
        ({"drafts": 0, "accepted_per_position": []}, "patched: nothing was drafted"),
        ({"draft_phases_in_graphs": 0}, "patched: no draft phase replayed a CUDA graph"),
        ({"requests": 6}, "patched: 5 texts of 6 requests"),
        ({"texts": {"count": 5, "worst_gap": 0.51}}, "patched: a token is 0.5100 nats below .* 0.5 allowed"),
        ({"texts": {"count": 5, "worst_gap": None}}, "patched: its texts were not judged"),
        (
            {"accepted_per_position": [128_000, 78_000]},
            "patched: acceptance at position 1: stock 0.5000, patched 0.4875; 0.01 less allowed",
        ),
    ],
)
def test_each_fault_is_named(asked, changes, message):
    (found,) = failures({"stock": entry(), "patched": entry(**changes)}, asked, "cuda")
    assert re.match(message, found), found


def test_a_cpu_has_no_graphs_and_no_near_ties(asked):
    fine = entry(draft_phases_in_graphs=0, texts={"count": 5, "worst_gap": 0.0})
    assert failures({"patched": fine}, asked, "cpu") == []
    near = {**fine, "texts": {"count": 5, "worst_gap": 0.01}}
    assert "0.0100 nats" in failures({"patched": near}, asked, "cpu")[0]


def test_acceptance_may_rise_and_is_not_judged_on_few_drafts(asked):
    stock, better = entry(), entry(accepted_per_position=[140_000, 90_000])
    assert failures({"stock": stock, "patched": better}, asked, "cuda") == []
    few = [entry(drafts=9_999, accepted_per_position=[n, n]) for n in (5_000, 4_000)]
    assert failures(dict(zip(("stock", "patched"), few, strict=True)), asked, "cuda") == []
    enough = [entry(drafts=10_000, accepted_per_position=[n, n]) for n in (5_000, 4_000)]
    assert len(failures(dict(zip(("stock", "patched"), enough, strict=True)), asked, "cuda")) == 2


def test_one_side_alone_is_held_to_its_texts(asked):
    assert failures({"patched": entry()}, dataclasses.replace(asked, steps=60), "cuda") == []


def test_the_judgement_of_a_sides_texts():
    one, two = Text((1,), (2, 3)), Text((4,), (5, 6))
    found = judged([one, two, one], {one: [0.0, 0.0], two: [0.25, 0.0]})
    assert found == {"count": 3, "worst_gap": 0.25, "not_first_choice": 1 / 6}
    assert judged([one, two], {one: [0.0, 0.0]})["worst_gap"] is None
    assert judged([], {})["worst_gap"] == 0.0


def test_the_gap_of_a_token_is_to_the_likeliest_at_its_position():
    class Logprob:
        def __init__(self, logprob):
            self.logprob = logprob

    positions = [None, {7: Logprob(-9.0)}, {8: Logprob(-0.5)}, {9: Logprob(-3.0), 4: Logprob(-0.25)}]
    assert gaps(positions, [8, 9]) == [0.0, 2.75]
    # An answer of the prompt's whole length would need the choice for its first token, which there is none of.
    assert gaps(positions, [7, 8, 9]) == [0.0, 0.0, 2.75]


def test_texts_come_out_of_the_event_as_they_went_in():
    event = {"texts": [[0, [1, 2], [3]], [1, [4], [5, 6]]]}
    assert soak.texts_of(copy.deepcopy(event)) == [Text((1, 2), (3,)), Text((4,), (5, 6))]
