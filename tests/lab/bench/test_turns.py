"""Engines in turn, with small scripts in the engines' places that follow the same commands."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from datetime import datetime, timezone
from types import SimpleNamespace

import pytest

from tests.cpu_seconds import wait_until
from vllm_hwplugin.base import run_records
from vllm_hwplugin_lab.bench import Job, TimeLimit, Workload, _launch, measure_in_turn, of_workloads
from vllm_hwplugin_lab.bench.results import processes_entry
from vllm_hwplugin_lab.bench.turns import turn

#: Seconds that no answer takes, on any host.
LONG = 1200
WORKLOADS = tuple(
    Workload(f"batch {batch}", ((1,),), max_tokens=8, batch=batch, rounds=3, warmup_tokens=4, profile_tokens=tokens)
    for batch, tokens in ((1, 4), (2, 0))
)
ANSWERS = """
import json, os, sys, time
job, answer = json.load(open(sys.argv[-2])), open(sys.argv[-1], "a")
shared = os.environ["SHARED"]

def say(**facts):
    answer.write(json.dumps(facts) + "\\n"); answer.flush()

def note(what):
    with open(shared, "a") as file:
        file.write(f"{job['label']} {what}\\n")

note("starts")
while open(shared).read().count(" starts") < int(os.environ["TOGETHER"]):
    time.sleep(0.01)
time.sleep(float(os.environ["START"]))
note("ready")
say(event="ready", seconds=1.0, pid=os.getpid(), side=job["label"])
for line in sys.stdin:
    command = json.loads(line)
    note(" ".join([command["do"], command.get("workload", ""), str(command.get("round", ""))]).strip())
    if command["do"] == os.environ["DIES_OF"] and command.get("round") == 1:
        print("the reason", flush=True)
        os._exit(7)
    if os.environ["HANGS_AT"] in (command["do"], f"{command['do']} {command.get('round')}"):
        time.sleep(300)
    if command["do"] == "end":
        time.sleep(float(os.environ["ENDS"]))
        say(event="done")
        break
    if command["do"] == "profile":
        say(event="collected", workload=command["workload"])
        time.sleep(float(os.environ["LOOKS"]))
    name = {"warm-up": "warm", "trial": "tried", "round": "measured", "profile": "profiled"}[command["do"]]
    more = {"round": command.get("round"), "requests": command.get("requests"), "seconds": float(os.environ["TAKES"])}
    say(event=name, workload=command["workload"], **more)
"""


@pytest.fixture
def engines(instead_of_engines, tmp_path):
    """`engines(sides)`: their jobs, and a function that reads what they did, in its order in time."""
    instead_of_engines(ANSWERS)
    shared = tmp_path / "shared"
    shared.touch()

    def make(*sides, dies_of="", hangs_at="", last_hangs_at="", start=0.0, looks=0.0, ends=0.0, together=0):
        usual = {"SHARED": str(shared), "DIES_OF": "", "HANGS_AT": "", "TAKES": "0.0", "TOGETHER": str(together)}
        usual |= {"START": str(start), "LOOKS": str(looks), "ENDS": str(ends)}
        jobs = {side: Job(side, False, {}, dict(usual), WORKLOADS) for side in sides}
        jobs[sides[-1]].environment.update(HANGS_AT=last_hangs_at)
        jobs[sides[0]].environment.update(DIES_OF=dies_of, HANGS_AT=hangs_at)
        return jobs, lambda: shared.read_text().splitlines()

    return make


def test_engines_are_alive_together_and_take_turns(engines):
    jobs, done = engines("a", "b")
    kept = []
    outcomes = measure_in_turn(
        jobs, of_workloads(jobs), rounds=2, at_once=False, timeout=LONG, keep=lambda found: kept.append(found)
    )
    rounds = [f"{side} round batch {size} {n}" for n in (0, 1) for size in (1, 2) for side in "ab"]
    warm = [f"{side} warm-up batch {size}" for size in (1, 2) for side in "ab"]
    started = ["a starts", "a ready", "b starts", "b ready"]
    assert done()[:4] == started
    # Profiled last, because that slows a process for good.
    ended = ["a profile batch 1", "b profile batch 1", "a end", "b end"]
    # What is not measured may be done at the same time.
    assert sorted(done()[:8]) == sorted([*started, *warm])
    assert done()[8:-2] == [*rounds, *ended[:2]]
    assert sorted(done()[-2:]) == ended[2:]
    assert [outcomes[side].error for side in "ab"] == [None, None]
    assert [event["event"] for event in outcomes["b"].of("measured", "batch 2")] == ["measured"] * 2
    assert [len(found["a"].of("measured")) for found in kept] == [2, 4]
    # What a file says that was left in the middle, and what it says at the end.
    assert [found["a"].stopped for found in kept] == ["the run did not come to its end"] * 2
    assert [outcomes[side].stopped for side in "ab"] == [None, None]


def test_a_round_is_as_large_as_the_quickest_sides_trial_says(engines):
    jobs, done = engines("a", "b", "c")
    for side, seconds in (("b", 2.0), ("c", 3.0)):
        jobs[side].environment["TAKES"] = str(seconds)
    jobs["a"].environment["DIES_OF"] = "trial"
    trial = {"do": "trial", "workload": "batch 1", "round": 1}
    asked = [
        dataclasses.replace(
            one, trial=trial if one.name == "batch 1" else None, sized=lambda took: {"requests": 10 / took}
        )
        for one in of_workloads(jobs)
    ]
    outcomes = measure_in_turn(jobs, asked, rounds=1, at_once=True, timeout=LONG)
    tried = [line for line in done() if "trial" in line or "round" in line]
    assert tried[:4] == ["a trial batch 1 1", "b trial batch 1 1", "c trial batch 1 1", "b round batch 1 0"]
    # The side that is no more took no time at all.
    assert [(outcomes[side].error is None) for side in "abc"] == [False, True, True]
    for side in "bc":
        assert [(one["workload"], one["requests"]) for one in outcomes[side].of("measured")] == [
            ("batch 1", 5.0),
            ("batch 2", None),
        ]


def test_a_side_that_hangs_is_ended_before_another_is_measured(engines, monkeypatch):
    jobs, done = engines("a", "b", hangs_at="round")
    pids, alive, passed = {}, [], [0.0]

    def sleep(seconds):
        # Whatever a loaded host takes until a side hangs: from then on its time is over at once.
        if not passed[0] and "a round batch 1 0" in done():
            passed[0] = 2 * LONG
        time.sleep(seconds)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0], sleep=sleep)
    monkeypatch.setattr(_launch, "time", clock)

    def on_event(event):
        if event["event"] == "ready":
            pids[event["side"]] = event["pid"]
        elif event["event"] == "measured":
            alive.append([side for side, pid in pids.items() if os.path.exists(f"/proc/{pid}")])

    outcomes = measure_in_turn(jobs, of_workloads(jobs), rounds=2, at_once=True, timeout=LONG, on_event=on_event)
    assert outcomes["a"].error == f"no answer 'measured' after {LONG} s; killed"
    assert outcomes["b"].error is None
    assert alive == [["b"]] * 4


def rounds_of(outcome):
    return [(event["workload"], event["round"]) for event in outcome.of("measured")]


def alive(events):
    return [event["pid"] for event in events if event["event"] == "ready" and os.path.exists(f"/proc/{event['pid']}")]


def test_when_the_time_is_up_what_both_sides_have_measured_is_there_and_what_the_plugin_decided(engines, monkeypatch):
    jobs, done = engines("a", "b", last_hangs_at="round 1")
    said, limit = [], TimeLimit(LONG)

    def records_of_engines_and_workers():
        """Each engine has two workers, whose parent it is."""
        now = datetime.now(timezone.utc).isoformat()
        for pid in [event["pid"] for event in said if event["event"] == "ready"]:
            for number, (own, parent) in enumerate(((pid, 1), (-pid, pid), (-2 * pid, pid))):
                one = run_records.new("0")
                one.pid, one.ppid, one.started, one.decisions = own, parent, now, {"graphs": f"by {number} of {pid}"}
                yield one

    monkeypatch.setattr(run_records, "read_all", records_of_engines_and_workers)

    def on_event(event):
        said.append(event)
        if (event["event"], event.get("round")) == ("measured", 1):
            # The next one hangs. However long a busy host took until here, the rest of the time is short.
            limit.__init__(1)

    outcomes = measure_in_turn(
        jobs, of_workloads(jobs), rounds=3, at_once=True, timeout=LONG, limit=limit, on_event=on_event
    )
    assert done()[-2:] == ["a round batch 1 1", "b round batch 1 1"]
    for side in "ab":
        # Not the round that only one of them has come through, and no side has failed.
        assert rounds_of(outcomes[side]) == [("batch 1", 0), ("batch 2", 0)]
        assert (outcomes[side].error, outcomes[side].stopped) == (None, "the time limit of 1 s")
        (pid,) = [event["pid"] for event in outcomes[side].of("ready")]
        decisions = {"graphs": " | ".join(f"by {number} of {pid}" for number in range(3))}
        assert processes_entry(outcomes[side].records)["decisions"] == decisions
    assert len([event for event in said if event["event"] == "measured"]) == 5
    assert alive(said) == []


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_leaves_what_both_sides_have_measured_and_the_failure_of_a_third(engines):
    jobs, _ = engines("a", "b", "c", dies_of="round")
    said = []

    def on_event(event):
        said.append(event)
        if (event["event"], event.get("workload"), event.get("round")) == ("measured", "batch 2", 1):
            os.kill(os.getpid(), signal.SIGINT)

    outcomes = measure_in_turn(jobs, of_workloads(jobs), rounds=3, at_once=True, timeout=LONG, on_event=on_event)
    assert (outcomes["a"].error, outcomes["a"].stopped) == ("exit code 7", "an interrupt")
    for side in "bc":
        assert rounds_of(outcomes[side]) == [("batch 1", 0), ("batch 2", 0), ("batch 1", 1)]
        assert (outcomes[side].error, outcomes[side].stopped) == (None, "an interrupt")
    assert alive(said) == []


def test_runs_with_one_lock_start_together_and_are_measured_one_after_the_other(engines, tmp_path):
    lock = tmp_path / "lock"
    jobs, done = engines("a", "b")

    def run(side):
        one = {side: jobs[side]}
        measure_in_turn(one, of_workloads(one), rounds=2, at_once=True, timeout=LONG, lock=lock)

    threads = [threading.Thread(target=run, args=(side,)) for side in "ab"]
    # Neither is measured while a third still starts.
    with turn(lock, TimeLimit(), alone=False):
        for thread in threads:
            thread.start()
        assert wait_until(lambda: sum("warm-up" in line for line in done()) == 4, LONG)
        assert not any("round" in line for line in done())
    for thread in threads:
        thread.join()
    measured = [line[0] for line in done() if "warm-up" not in line and not line.endswith(("starts", "ready"))]
    assert "".join(measured) in ("a" * 6 + "b" * 6, "b" * 6 + "a" * 6)


def test_a_run_does_not_wait_for_a_turn_beyond_its_time(engines, tmp_path):
    jobs, done = engines("a")
    with turn(lock := tmp_path / "lock", TimeLimit(), alone=True):
        limit = TimeLimit(0.3)
        outcome = measure_in_turn(
            jobs, of_workloads(jobs), rounds=1, at_once=True, timeout=LONG, limit=limit, lock=lock
        )
    assert outcome["a"].stopped.startswith("the time limit of 0.3 s")
    assert not done()
