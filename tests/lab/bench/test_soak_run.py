"""The engines of a soak, with small scripts in their places."""

from __future__ import annotations

import json

import pytest

from vllm_hwplugin_lab.bench.soak import SoakJob, Text, run_soak

ENGINE = """
import json, os, sys, time
job, answer = json.load(open(sys.argv[-2])), open(sys.argv[-1], "a")

def say(**facts):
    answer.write(json.dumps(facts) + "\\n"); answer.flush()

def note(what):
    with open(os.environ["SHARED"], "a") as file:
        file.write(f"{job['label']} {what}\\n")

note("starts")
until = time.monotonic() + 10
while open(os.environ["SHARED"]).read().count("starts") < int(os.environ["BESIDE"]) and time.monotonic() < until:
    time.sleep(0.02)
say(event="ready", seconds=1.0)
if job["steps"]:
    note("soaks")
    if job["label"] == os.environ["DIES"]:
        sys.exit("the reason")
    own = {"stock": 6, "patched": 6, "mrv2": 7}[job["label"]]
    say(event="soaked", texts=[[0, [1], [2, 3]], [1, [4], [5, own]]])
else:
    texts = json.loads(sys.stdin.readline())["texts"]
    note(f"reads {json.dumps(texts)}")
    say(event="judged", gaps=[[0.0] * len(tokens) for _, tokens in texts])
say(event="done")
"""


@pytest.fixture
def soaked(instead_of_engines, tmp_path):
    """`soaked(sides, ...)`: what came of it, and what the engines did, in its order in time."""
    instead_of_engines(ENGINE)
    shared = tmp_path / "shared"

    def run(*sides, at_once=True, dies="", beside=1, **settings):
        variables = {"SHARED": str(shared), "DIES": dies, "BESIDE": str(beside)}
        jobs = {side: SoakJob(side, {}, variables, 4, steps=60) for side in sides}
        judge = SoakJob("judge", {}, variables, 4)
        return run_soak(jobs, judge, at_once=at_once, timeout=30, **settings), shared.read_text().splitlines()

    return run


TEXTS = [[[1], [2, 3]], [[4], [5, 6]], [[4], [5, 7]]]


def test_all_engines_start_at_the_same_time_and_each_different_text_is_read_once(soaked):
    said = []
    found, done = soaked("stock", "patched", "mrv2", beside=4, on_event=lambda name, event: said.append(name))
    assert sorted(done[:4]) == ["judge starts", "mrv2 starts", "patched starts", "stock starts"]
    assert done[-1] == f"judge reads {json.dumps(TEXTS)}"
    assert {side: one.error for side, one in found.ended.items()} == dict.fromkeys(("stock", "patched", "mrv2"))
    assert found.texts["mrv2"] == [Text((1,), (2, 3)), Text((4,), (5, 7))]
    assert found.judge.error is None
    assert found.gaps == {Text(tuple(one), tuple(other)): [0.0, 0.0] for one, other in TEXTS}
    assert set(said) == {"stock", "patched", "mrv2", "judge"}


def test_or_one_after_the_other(soaked):
    _, done = soaked("stock", "patched", at_once=False)
    assert done[:-1] == ["stock starts", "stock soaks", "patched starts", "patched soaks", "judge starts"]


def test_a_memory_checker_runs_the_load_and_not_the_judge(soaked, tmp_path):
    checker = tmp_path / "checker"
    checker.write_text(f'#!/bin/sh\necho "$1 checks" >> "{tmp_path / "shared"}"\nshift\nexec "$@"\n')
    checker.chmod(0o755)
    _, done = soaked("patched", under=(str(checker), "memory"))
    assert done.count("memory checks") == 1


def test_a_side_that_dies_has_its_log_and_the_other_is_judged(soaked):
    found, done = soaked("stock", "patched", dies="patched")
    assert (found.ended["patched"].error, found.ended["patched"].log_tail) == ("exit code 1", "the reason")
    assert list(found.texts) == ["stock"]
    assert found.judge.error is None
    found, done = soaked("patched", dies="patched")
    assert (found.judge, found.gaps) == (None, {})
    assert "judge reads" not in done[-1]
