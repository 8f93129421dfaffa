"""The command ``bench`` with the engines replaced."""

from __future__ import annotations

import dataclasses

import pytest

from tests.program import program
from vllm_hwplugin_lab.bench import Host, Outcome, read_results
from vllm_hwplugin_lab.cli import _sides
from vllm_hwplugin_lab.cli import bench as command

GPU = Host("cuda", "NVIDIA H200", "580", "0.26.0", "2.11.0", "3.12.3", 16)
CPU = Host("cpu", "Some CPU", None, "0.32.0", "2.13.0", "3.11.7", 2)
ALL = ["stock", "patched", "mrv2", "mrv2-patched"]


def answer(job, rounds):
    events = [{"event": "ready", "seconds": 1.0, "graph_modes": {}}]
    for workload in job.workloads:
        for number in range(rounds):
            events.append(
                {
                    "event": "measured",
                    "workload": workload.name,
                    "round": number,
                    "host_us": 500.0,
                    "seconds": 1.0 if job.patched else 1.5,
                    "tokens": 250,
                    "steps": 100,
                    "drafts": 10,
                    "accepted_per_position": [9, 6],
                }
            )
    return Outcome(job, tuple(events), 2.0)


def crash(job):
    return Outcome(job, (), 1.0, "killed by SIGSEGV", "last words [of it]")


@pytest.fixture
def run(monkeypatch, tmp_path):
    file = tmp_path / "r.json"

    def call(arguments, outcome=answer, host=GPU):
        asked = []

        def in_turn(jobs, measurements, *, rounds, at_once, timeout, limit, rest, lock, module, on_event, keep):
            asked.append((jobs, [one.name for one in measurements], rounds, at_once))
            # Worker processes, which look for work on the cores of the next engine, are a CPU's.
            assert (rest > 1) == (host is CPU)
            found = {side: outcome(job, rounds) for side, job in jobs.items()}
            for one in found.values():
                for event in one.events:
                    on_event(event)
            keep(found)
            return found

        monkeypatch.setattr(_sides, "measure_in_turn", in_turn)
        monkeypatch.setattr(command, "detect_host", lambda: host)
        monkeypatch.setenv("COLUMNS", "200")
        result = program("bench", "--json", str(file), *arguments)
        return result, read_results(file.read_text()) if file.exists() else None, asked

    call.file = file
    return call


def test_the_sides_of_a_case_are_measured_together_case_by_case(run):
    result, found, asked = run(["--shape", "0.6b", "--shape", "tiny", "--k", "2", "--k", "3", *["--batch", "4"] * 2])
    assert result.exit_code == 0, result.output
    assert found["settings"]["batches"] == [4]
    assert [list(jobs) for jobs, *_ in asked] == [ALL] * 4
    assert [jobs["mrv2"].label for jobs, *_ in asked] == [
        f"{shape} eagle3 k={k} mrv2" for shape in ("0.6b", "tiny") for k in (2, 3)
    ]
    assert [(c["shape"], c["k"]) for c in found["cases"]] == [("0.6b", 2), ("0.6b", 3), ("tiny", 2), ("tiny", 3)]
    assert found["format"] == 3
    assert found["cases"][0]["sides"]["patched"]["batches"]["4"]["step_ms"]["best"] == 10.0
    assert "1.50" in result.output


@pytest.mark.parametrize(
    ("method", "host", "sides"),
    [
        ("eagle3", GPU, ALL),
        ("dflash", dataclasses.replace(GPU, vllm="0.20.2"), ALL[:2]),
        ("dspark --shape 0.6b", GPU, ALL[2:]),
        ("eagle3", CPU, ALL[:2]),
    ],
)
def test_all_sides_that_the_host_can_run(run, method, host, sides):
    _, found, asked = run(["--method", *method.split()], host=host)
    assert [list(jobs) for jobs, *_ in asked] == [sides]
    # Engines on a CPU get a core each when they start.
    assert [at_once for *_, at_once in asked] == [host is not CPU]
    assert found["settings"]["sides"] == sides


def test_vllms_engine_arguments_take_the_place_of_what_the_command_chooses(run):
    asked = {"kv_cache_dtype": "fp8", "max_num_seqs": 64, "compilation_config": {"mode": 0}}
    words = ("kv-cache-dtype=fp8", "max_num_seqs=64", 'compilation_config={"mode": 0}')
    command = ["--shape", "0.6b", *(part for word in words for part in ("--vllm-arg", word))]
    _, found, ((jobs, *_),) = run(command)
    _, _, ((plain, *_),) = run(["--shape", "0.6b"])
    for side, job in jobs.items():
        before, after = plain[side].options, job.options
        assert (after["kv_cache_dtype"], after["max_num_seqs"]) == ("fp8", 64)
        assert after["compilation_config"] == {"cudagraph_mode": "FULL_AND_PIECEWISE", "mode": 0}
        assert after["speculative_config"] == before["speculative_config"] | after["speculative_config"]
        assert after["kv_cache_memory_bytes"] > before["kv_cache_memory_bytes"]
    assert found["settings"]["vllm_arguments"] == asked


@pytest.mark.parametrize(
    ("failed", "code"),
    [
        ({"patched"}, 1),
        ({"mrv2-patched"}, 1),
        ({"stock"}, 2),
        ({"mrv2", "mrv2-patched"}, 2),
        ({"stock", "mrv2-patched"}, 1),
    ],
)
def test_a_crash_is_in_the_results_and_counts_by_its_own_runner(run, failed, code):
    def outcome(job, rounds):
        return crash(job) if job.label.rpartition(" ")[2] in failed else answer(job, rounds)

    result, found, asked = run(["--shape", "0.6b", "--shape", "8b"], outcome)
    assert result.exit_code == code
    assert len(asked) == 2
    assert "killed by SIGSEGV" in result.output
    assert "last words [of it]" in result.output
    errors = {side for side, entry in found["cases"][1]["sides"].items() if entry["error"]}
    assert errors == failed


def test_a_run_that_is_stopped_leaves_what_it_has_and_begins_no_other_case(run):
    def outcome(job, rounds):
        return dataclasses.replace(answer(job, 1), stopped="the time limit of 60 s")

    result, found, asked = run(["--shape", "0.6b", "--shape", "8b", "--time-limit", "60"], outcome)
    assert result.exit_code == 2
    assert len(asked) == 1
    (case,) = found["cases"]
    assert case["stopped"] == "the time limit of 60 s"
    assert case["sides"]["patched"]["batches"]["8"]["rounds"] == 1
    assert "Not everything was measured: the time limit of 60 s." in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vllm-env", "A"], "is not KEY=VAL"),
        (["--side", "mrv3"], "choose from stock, patched, mrv2, mrv2-patched"),
        (["--batch", "97"], "holds 96 prompts, expected 97"),
    ],
)
def test_bad_options_start_nothing(run, arguments, message):
    result, found, asked = run(arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert (found, asked) == (None, [])
