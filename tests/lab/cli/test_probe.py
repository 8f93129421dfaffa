# SPDX-License-Identifier: Apache-2.0
"""The command ``probe``: with its process replaced, and on the real CPU backend."""

from __future__ import annotations

import json
from datetime import datetime
from functools import partial
from types import SimpleNamespace

import pytest

from tests.program import program
from vllm_hwplugin import __version__
from vllm_hwplugin_lab.bench import read_results
from vllm_hwplugin_lab.cli import probe as command
from vllm_hwplugin_lab.probe import probe as run_probe

HOST = {"event": "host", "device": "cpu", "name": "x86_64", "torch": "2.13.0", "vllm": "0.32.0"}
SINKS = {"backend": "B", "capability": "sinks", "value": "yes"}


def answer(**changes):
    return {
        "event": "result",
        **SINKS,
        "declared": "yes",
        "behaviour": "works",
        "cases": 5,
        "shape": "heads [2]",
        "detail": "no",
        "ratio": 0.5,
        **changes,
    }


@pytest.fixture
def replaced(monkeypatch):
    """``replaced(result, ...)``: run the command on a process that says so; gives its result and its job."""

    def run(arguments, *results, left_out=None, error=None):
        jobs = []

        def run_child(module, job, environment, *, timeout, patience, on_event):
            assert (module, patience) == ("vllm_hwplugin_lab.probe._child", 120)
            jobs.append(json.loads(job))
            if error is None:
                on_event(HOST)
                on_event({"event": "backend", "name": "B", "path": "a.B", "own": False, "left_out": left_out})
                for result in results:
                    on_event({"event": "trial", **SINKS})
                    on_event(result)
            return SimpleNamespace(error=error, log_tail="the end of the log")

        monkeypatch.setattr(command, "run_probe", partial(run_probe, run=run_child))
        return program("probe", *arguments), jobs

    return run


def test_status_1_and_the_shape_where_something_differs(replaced, tmp_path, monkeypatch):
    monkeypatch.setenv("HWPLUGIN_BENCH_COMMIT", "0123abcd")
    file = tmp_path / "r.json"
    result, _ = replaced(["--json", str(file)], answer(behaviour="refuses", detail="ValueError: no [sinks]"))
    assert result.exit_code == 1
    assert "refused-though-declared" in result.output
    assert "ValueError: no [sinks]" in result.output
    assert "heads [2]" in result.output
    written = read_results(file.read_text())
    assert written["ok"] is False
    assert (written["commit"], written["plugin"]) == ("0123abcd", __version__)
    assert datetime.fromisoformat(written["date"]).tzinfo is not None


@pytest.fixture
def real(tmp_path):
    """``real(arguments)``: the command as it is; gives its result and {(backend, capability, value): result}."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("these tests expect vLLM's CPU backend")

    def run(*arguments):
        file = tmp_path / "r.json"
        result = program("probe", "--cases", "2", *arguments, "--json", str(file))
        assert file.exists(), result.output
        data = read_results(file.read_text())
        return result, {(one["backend"], one["capability"], one["value"]): one for one in data["results"]}

    return run


@pytest.mark.engine
def test_vllms_cpu_backend_does_what_it_declares(real):
    """Without the float8 caches: those depend on the processor, and on vLLM's rounding."""
    names = ("head_size", "dtype", "block_size", "non_causal", "sliding_window", "sinks", "softcap", "alibi", "group")
    # In bfloat16 vLLM's kernels for processors without AVX-512 round to a little more than twice SDPA's error.
    result, found = real("--factor", "4", *[word for name in names for word in ("--capability", name)])
    assert result.exit_code == 0, result.output
    assert {backend for backend, *_ in found} == {"CPU_ATTN"}
    holds = {key[1:] for key, one in found.items() if one["verdict"] == "holds"}
    assert {("plain", "causal"), ("non_causal", "yes"), ("sliding_window", "yes"), ("softcap", "yes")} <= holds
    assert {("head_size", "256"), ("head_size", "512"), ("dtype", "float32"), ("block_size", "32")} <= holds
    # Also outside of what is declared there are clear answers: kernels that refuse, and sinks that work.
    assert found["CPU_ATTN", "head_size", "320"]["verdict"] == "refused"
    assert found["CPU_ATTN", "sinks", "yes"]["verdict"] == "works-undeclared"
    assert all(0 < one["ratio"] < 4 for one in found.values() if one["behaviour"] == "works")
