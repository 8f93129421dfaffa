"""`vllm-hwplugin bench attention` and `bench ops`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.program import program
from vllm_hwplugin_lab import bench
from vllm_hwplugin_lab.bench import Host, read_results
from vllm_hwplugin_lab.bench.micro import _supervise as cells
from vllm_hwplugin_lab.bench.micro import op_cases
from vllm_hwplugin_lab.cli import _bench_kernels

GPU = Host("cuda", "NVIDIA H200", "580.1", "0.26.0", "2.11.0", "3.12.3", 16)
READY = {"error": None, "log_tail": "", "copy_bandwidth": 4e12, "packages": {"torch": "2.11.0"}}


def measured(cell, **facts):
    facts = {"seconds": 1e-4, "copy_seconds": 1e-5, "error_ratio": 1.0, "mismatch": None, **facts}
    return {**cells.outcome(cell, cells.MEASURED, None, **facts), "process": 0}


@pytest.fixture
def run(monkeypatch, tmp_path):
    def call(*arguments, outcome=measured, processes=(READY,), host=GPU):
        asked = []

        def supervise(job, todo, *, seconds, limit, on_event, keep):
            asked.append((job, list(todo), seconds))
            outcomes = [outcome(cell) for cell in todo]
            on_event({"event": "begin", "kernel": "[k]", "case": "c"})
            on_event({"event": "cell", "outcome": {}})
            keep(outcomes[:1], list(processes))
            return outcomes, list(processes)

        file = tmp_path / "kernels.json"
        monkeypatch.setattr(_bench_kernels, "supervise", supervise)
        monkeypatch.setattr(bench, "detect_host", lambda device=host.device: replace(host, device=device))
        monkeypatch.setenv("COLUMNS", "200")
        command, *options = arguments
        result = program("bench", command, "--json", str(file), *options)
        return result, read_results(file.read_text()) if file.exists() else None, asked

    return call


def test_ops_measures_both_sides_of_what_is_chosen(run):
    result, found, ((job, todo, _),) = run("ops", "--op", "topk_softmax")
    assert result.exit_code == 0, result.output
    assert {(kernel, case.split()[0]) for kernel, case in todo} == {
        ("hwplugin", "topk_softmax"),
        ("vllm", "topk_softmax"),
    }
    assert len(found["cells"]) == len(todo)
    _, _, ((job, todo, _),) = run("ops")
    assert (job["kind"], todo) == ("ops", list(op_cases.plan()))


def test_the_table_at_the_end_says_what_is_faster_and_what_is_wrong(run):
    def outcome(cell):
        kernel, case = cell
        wrong = (kernel, case) == ("hwplugin", "topk_softmax 8 of 128 t8")
        return measured(cell, seconds=1e-4 if kernel == "hwplugin" else 2e-4, mismatch="weights" if wrong else None)

    result, _, _ = run("ops", outcome=outcome)
    for words in ("2.00 (2.00–2.00), 6", "14 of 15", "hwplugin topk_softmax 8 of 128 t8: weights"):
        assert words in result.output


def test_operations_are_measured_on_the_device_that_is_named(run):
    result, found, ((job, _, _),) = run("ops", "--device", "musa", "--op", "topk_softmax")
    assert result.exit_code == 0, result.output
    assert (job["device"], found["host"]["device"]) == ("musa", "musa")
    assert found["settings"]["only"] == {"op": ["topk_softmax"], "device": ["musa"]}
    _, _, ((job, _, _),) = run("ops")
    assert job["device"] == "cuda"
    for arguments, host in ((["ops", "--device", "xpu"], GPU), (["attention"], replace(GPU, device="musa"))):
        result, _, asked = run(*arguments, host=host)
        assert (result.exit_code, asked) == (2, []), result.output


@pytest.mark.parametrize(
    ("command", "kernel", "change", "code"),
    [
        ("attention", "hwplugin", {"error_ratio": 2.01}, 1),
        ("attention", "SDPA", {"error_ratio": 9.0}, 0),
        ("attention", "hwplugin", cells.FAILED, 1),
        ("attention", "hwplugin", cells.NOT_RUN, 2),
        ("attention", "FLASH_ATTN 4", cells.FAILED, 0),
        ("ops", "hwplugin", {"mismatch": "wrong"}, 1),
    ],
)
def test_the_exit_code_is_about_our_own_kernels(run, command, kernel, change, code):
    def outcome(cell):
        if cell[0] != kernel:
            return measured(cell)
        if isinstance(change, dict):
            return measured(cell, **change)
        return {**cells.outcome(cell, change, "no"), "process": 0}

    result, _, _ = run(command, outcome=outcome)
    assert result.exit_code == code, result.output
