from __future__ import annotations

import json
import subprocess

from vllm_hwplugin_lab.bench import Job, Outcome, Workload
from vllm_hwplugin_lab.bench import results as files
from vllm_hwplugin_lab.bench.plan import Case


def outcome(label, error=None):
    workload = Workload("batch 1", ((1,),), max_tokens=4, batch=1)
    event = {"event": "measured", "workload": "batch 1", "seconds": 1.0, "tokens": 4}
    event |= {"steps": 2, "drafts": 2, "accepted_per_position": [1, 1], "host_us": 500.0}
    ready = {"event": "ready", "seconds": 7.0, "graph_modes": {"drafter": "FULL"}}
    job = Job(label, True, {}, {}, (workload,))
    return Outcome(job, () if error else (ready, event), 9.0, error, "last words" if error else "")


def test_results_survive_the_file_and_a_case_grows_side_by_side(gpu_host, settings):
    results = files.new_results(files.FORMAT, gpu_host, settings)
    case = Case("0.6b", "eagle3", 3)
    files.add_case(results, case, settings, {"stock": outcome("s")})
    files.add_case(results, case, settings, {"stock": outcome("s"), "patched": outcome("p", "exit code 1")})
    back = files.read_results(files.results_text(results))
    assert back == results
    (entry,) = back["cases"]
    assert entry["synthetic_acceptance_length"] == 2.5
    assert entry["sides"]["stock"]["batches"]["1"]["acceptance_length"] == 2.0
    assert entry["sides"]["patched"]["error"] == "exit code 1"
    assert entry["sides"]["patched"]["log_tail"] == "last words"
    assert entry["sides"]["patched"]["batches"] == {"1": None}


def test_lines_are_filled_and_say_the_same():
    value = {"numbers": list(range(100)), "cells": [{"kernel": "x", "seconds": number / 8} for number in range(9)]}
    text = files.results_text(value)
    assert files.read_results(text) == value
    assert max(map(len, text.splitlines())) <= 120
    assert len(text.splitlines()) <= 11
    assert json.loads(files.results_text(value, tables=False)) == value


def test_a_number_has_the_digits_that_were_measured_and_what_an_object_lacks_is_null():
    assert files.read_results(files.results_text({"x": [1 / 3]})) == {"x": [0.33333333333]}
    cells = [{"status": "measured", "seconds": 1.0}] * 8 + [{"status": "failed"}]
    found = files.read_results(files.results_text({"cells": cells}))["cells"]
    assert found == [*cells[:8], {"status": "failed", "seconds": None}]


def test_what_several_processes_say_stands_there_once():
    record = {"role": "parent", "fingerprint": "f00d", "error": None, "notes": ["n"], "decisions": {"a": "first"}}
    states = {"one": "live", "two": "refused", "three": "not-needed", "four": "off"}
    record["features"] = {name: {"state": state, "reason": state} for name, state in states.items()}
    record["uses"] = {}
    core = {**record, "role": "engine-core", "decisions": {"a": "then", "b": "too"}}
    core["uses"] = {"one": {"used": True, "reason": "r"}, "two": {"used": False, "reason": "no"}}
    assert files.processes_entry([record, core]) == {
        "roles": ["parent", "engine-core"],
        "fingerprints": ["f00d"],
        "live": ["one"],
        "refused": {"two": "refused"},
        "used": {"one": "r"},
        "decisions": {"a": "then", "b": "too"},
        "notes": ["n"],
    }
    assert files.processes_entry([]) == {}


def test_a_tree_with_local_changes_is_told_from_its_commit(monkeypatch, tmp_path):
    def git(*arguments):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y.z", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(files, "__file__", str(tmp_path / "p" / "bench" / "results.py"))
    monkeypatch.delenv("HWPLUGIN_BENCH_COMMIT", raising=False)
    git("init", "-q")
    assert files.commit() is None
    (tmp_path / "measured").write_text("as it was")
    git("add", ".")
    git("commit", "-qm", "x")
    (tmp_path / "left over").touch()
    head = git("rev-parse", "--short=12", "HEAD")
    assert files.commit() == head
    (tmp_path / "measured").write_text("changed")
    assert files.commit() == f"{head}+"
    monkeypatch.setenv("HWPLUGIN_BENCH_COMMIT", "abc")
    assert files.commit() == "abc"
