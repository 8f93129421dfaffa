# SPDX-License-Identifier: Apache-2.0
"""The probe on the plugin's backend for CUDA, on a stand-in for CUDA's kernels and for its graphs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin_lab.probe import Job, judge

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[3]
OWN = "vllm_hwplugin.attention.cuda.CudaFlashAttentionBackend"
CAPABILITIES = ("captured", "padded_batch", "non_causal_window", "sinks", "alibi")
STOCK = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
FAKES = "tests.lab.probe.cuda_fakes"
WRONG = ("BakesLengths", "BakesTable", "MissesField", "WithoutSinks")

Probed = tuple[dict[tuple[str, str, str], Any], list[Any]]


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Probed]:
    """What became of the jobs, by name."""
    if torch.cuda.is_available():
        pytest.skip("this stand-in is for hosts without CUDA")
    wrong = tuple(f"{FAKES}.{name}" for name in WRONG)
    jobs = {
        "own": Job(backends=(OWN,), capabilities=CAPABILITIES, seed=3, cases=1),
        "wrong": Job(backends=wrong, capabilities=("captured", "sinks"), seed=3, cases=1),
        "all": Job(backends=(), capabilities=("plain",), seed=3, cases=1),
        "named": Job(backends=("FLASH_ATTN",), capabilities=("plain",), seed=3, cases=1),
    }
    folder = tmp_path_factory.mktemp("probed")
    files = [(folder / f"{name}.json", folder / f"{name}.jsonl") for name in jobs]
    for job, (asked, _) in zip(jobs.values(), files, strict=True):
        asked.write_text(job.to_json())
    command = [sys.executable, "-m", "tests.lab.probe.cuda_standin", *(str(one) for pair in files for one in pair)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = {}
    for name, (_, answer) in zip(jobs, files, strict=True):
        events = [json.loads(line) for line in answer.read_text().splitlines()]
        assert events[-1]["event"] == "done"
        results = {(one["backend"], one["capability"], one["value"]): one for one in events if one["event"] == "result"}
        found[name] = (results, [one for one in events if one["event"] == "backend"])
    return found


def fails(one: dict[str, Any]) -> bool:
    return judge(one["declared"], one["behaviour"], strict=True)[1]


def test_every_trial_of_the_plugins_backend_runs_and_holds(probed: dict[str, Probed]) -> None:
    results, backends = probed["own"]
    assert [one["path"] for one in backends] == [OWN]
    assert not [one for one in results.values() if fails(one)]
    worked = {key[1:] for key, one in results.items() if (one["declared"], one["behaviour"]) == ("yes", "works")}
    for batch in ("decode", "verify", "mixed"):
        assert {("captured", batch), ("captured", f"{batch}, head size 512")} <= worked
    assert ("captured", "non-causal verify, head size 512") in worked
    assert {("non_causal_window", "yes"), ("sinks", "head size 512"), ("padded_batch", "head size 512")} <= worked
    assert results[OWN, "alibi", "head size 512"]["behaviour"] == "refuses"


def test_graphs_that_keep_what_they_should_read_are_wrong(probed: dict[str, Probed]) -> None:
    results, _ = probed["wrong"]

    def told(name: str, capability: str, value: str) -> Any:
        return results[f"{FAKES}.{name}", capability, value]

    for name in ("BakesLengths", "BakesTable"):
        assert told(name, "plain", "causal")["behaviour"] == "works"
        for value in ("verify", "decode, head size 512"):
            assert told(name, "captured", value)["behaviour"] == "wrong"
    # A name that the metadata lacks is a fault of the probe or of the backend, and no refusal.
    missing = told("MissesField", "plain", "causal")
    assert missing["behaviour"] == "error"
    assert "(cuda_fakes.py:" in missing["detail"]
    assert told("WithoutSinks", "plain", "causal")["behaviour"] == "works"
    assert told("WithoutSinks", "sinks", "yes")["detail"] == "WithoutSinksImpl takes no sinks"


def test_both_flash_attentions_of_a_cuda_host_are_probed(probed: dict[str, Probed]) -> None:
    for name in ("all", "named"):
        _, backends = probed[name]
        paths = {one["name"]: one["path"] for one in backends if one["left_out"] is None}
        assert (paths["FLASH_ATTN"], paths[OWN]) == (STOCK, OWN)
        assert len(paths) == 2 or name == "all"
        # Of vLLM's classes for ROCm some look for that device when they are asked, and must not end the probe.
        left_out = [one["left_out"] for one in backends if one["left_out"] is not None]
        assert any("cannot be asked on this host" in reason for reason in left_out) is (name == "all")
