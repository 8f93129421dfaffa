"""What a soak asks of engines, with small scripts in their places, and what it is held to."""

from __future__ import annotations

import json
import re
from itertools import islice
from types import SimpleNamespace as Bag

import pytest

from tests.cpu_seconds import patience
from vllm_hwplugin_lab.bench import Job
from vllm_hwplugin_lab.bench._soak_engine import gaps, requests
from vllm_hwplugin_lab.bench.soak import SoakSettings, Text, failures, run_soak

ENGINE = """
import json, os, sys, time
job, answer = json.load(open(sys.argv[-2])), open(sys.argv[-1], "a")

def say(**facts):
    answer.write(json.dumps(facts) + "\\n"); answer.flush()

def note(what):
    with open(os.environ["SHARED"], "a") as file:
        file.write(f"{job['label']} {what}\\n")

note("starts")
while open(os.environ["SHARED"]).read().count("starts") < int(os.environ["BESIDE"]):
    time.sleep(0.02)
say(event="ready", seconds=1.0)
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "soak":
        note(f"soaks {command['steps']}")
        if job["label"] == os.environ["DIES"]:
            sys.exit("the reason")
        own = {"stock": 6, "patched": 6, "mrv2": 7}[job["label"]]
        say(event="soaked", texts=[[0, [1], [2, 3]], [1, [4], [5, own]]])
    elif command["do"] == "judge":
        note(f"reads {json.dumps(command['texts'])}")
        say(event="judged", gaps=[[0.0] * len(tokens) for _, tokens in command["texts"]])
    else:
        say(event="done")
        break
"""
TEXTS = [[[1], [2, 3]], [[4], [5, 6]], [[4], [5, 7]]]
POOL = tuple(tuple(range(start, start + 96)) for start in (0, 1000, 2000))
SETTINGS = SoakSettings(
    method="dflash",
    k=7,
    steps=10_000,
    max_num_seqs=32,
    seed=0,
    cudagraph_mode="FULL",
    vllm_environment={"ALL": "1"},
    patched_environment={"ONE": "2"},
)


@pytest.fixture
def soaked(instead_of_engines, tmp_path):
    """`soaked(sides, ...)`: what came of it, and what the engines did, in its order in time."""
    instead_of_engines(ENGINE)
    shared = tmp_path / "shared"

    def run(*sides, at_once=True, dies="", beside=1, **more):
        shared.unlink(missing_ok=True)
        variables = {"SHARED": str(shared), "DIES": dies, "BESIDE": str(beside)}
        jobs = {side: Job(side, False, {}, variables, ()) for side in sides}
        judge = Job("judge", False, {}, variables, ())
        found = run_soak(jobs, judge, SETTINGS.load(), at_once=at_once, timeout=patience(30), **more)
        return found, shared.read_text().splitlines()

    return run


def test_all_engines_start_at_the_same_time_and_each_different_text_is_read_once(soaked):
    said = []
    found, done = soaked("stock", "patched", "mrv2", beside=4, on_event=lambda name, event: said.append(name))
    assert sorted(done[:4]) == ["judge starts", "mrv2 starts", "patched starts", "stock starts"]
    assert done[-1] == f"judge reads {json.dumps(TEXTS)}"
    assert {side: one.error for side, one in found.ended.items()} == dict.fromkeys(
        ["stock", "patched", "mrv2", "judge"]
    )
    assert found.texts["mrv2"] == [Text((1,), (2, 3)), Text((4,), (5, 7))]
    assert found.gaps == {Text(tuple(one), tuple(other)): [0.0, 0.0] for one, other in TEXTS}
    assert set(said) == {"stock", "patched", "mrv2", "judge"}


def test_a_memory_checker_runs_one_load_after_the_other_and_not_the_judge(soaked, tmp_path):
    checker = tmp_path / "checker"
    checker.write_text(f'#!/bin/sh\necho "$1 checks" >> "{tmp_path / "shared"}"\nshift\nexec "$@"\n')
    checker.chmod(0o755)
    _, done = soaked("stock", "patched", at_once=False, under=(str(checker), "memory"))
    loads = [
        line for side in ("stock", "patched") for line in ("memory checks", f"{side} starts", f"{side} soaks 10000")
    ]
    assert done[:-1] == [*loads, "judge starts"]


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        # The target accepts nothing that it would not have said.
        ({"accepted_per_position": [140_000, 90_000]}, None),
        ({"accepted_per_position": [128_000, 78_000]}, "acceptance at position 1: unpatched 0.5000, patched 0.4875"),
        # Chance alone.
        ({"drafts": 9_999, "accepted_per_position": [6_000, 4_000]}, None),
        ({"error": "exit code 99"}, "exit code 99"),
        ({"steps": 9_999}, "9999 steps, expected 10000"),
        ({"batch_sizes": {"7": 9}}, "no step had 1 or 32 requests"),
        ({"drafts": 0, "accepted_per_position": []}, "nothing was drafted"),
        ({"draft_phases_in_graphs": 0}, "no draft phase replayed a CUDA graph"),
        ({"requests": 6}, "5 texts, expected 6"),
        ({"texts": {"count": 5, "worst_gap": 0.51}}, "a token is 0.5100 nats below .* at most 0.5"),
        ({"texts": {"count": 5, "worst_gap": None}}, "its texts were not judged"),
    ],
)
def test_each_fault_is_named(changes, message):
    found = failures({"stock": entry(draft_phases_in_graphs=0), "patched": entry(**changes)}, SETTINGS, "cuda")
    assert len(found) == (message is not None)
    assert not found or re.match(f"patched: {message}", found[0]), found


def test_the_gap_of_a_token_is_to_the_likeliest_at_its_position():
    positions = [None, {7: -9.0}, {8: -0.5}, {9: -3.0, 4: -0.25}]
    positions = [one and {token: Bag(logprob=value) for token, value in one.items()} for one in positions]
    assert gaps(positions, [8, 9]) == [0.0, 2.75]
    # An answer of the prompt's whole length would need the choice for its first token, which there is none of.
    assert gaps(positions, [7, 8, 9]) == [0.0, 0.0, 2.75]


def test_requests_differ_fit_the_model_and_are_the_seeds_alone():
    asked = list(islice(requests(POOL, 0, 512), 2000))
    assert asked == list(islice(requests(POOL, 0, 512), 2000)) != list(islice(requests(POOL, 1, 512), 2000))
    assert all(1 <= len(r.prompt) <= 192 and r.max_tokens >= 1 for r in asked)
    # All places within a block of 16 and the border itself, and prompts of less than a block.
    assert {len(r.prompt) % 16 for r in asked} == set(range(16))
    assert min(len(r.prompt) for r in asked) < 16
    assert {r.max_tokens for r in asked} > set(range(1, 161))
    whole = [len(r.prompt) + r.max_tokens for r in asked]
    assert max(whole) == 512
    assert 60 < whole.count(512) < 250
    for r in asked:
        assert r.prompt[0] in (0, 1000, 2000)
        assert list(r.prompt[:96]) == list(range(r.prompt[0], r.prompt[0] + min(96, len(r.prompt))))
