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


def probe(folder: Path, *jobs: Job, **variables: str) -> list[Probed]:
    """Of each job the results by (backend, capability, value), and the backends; all in one process."""
    files = [(folder / f"job{number}.json", folder / f"answer{number}.jsonl") for number in range(len(jobs))]
    for job, (asked, _) in zip(jobs, files, strict=True):
        asked.write_text(job.to_json())
    ended = python("-m", "tests.lab.probe.cuda_standin", *(str(one) for pair in files for one in pair), **variables)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = []
    for _, answer in files:
        events = [json.loads(line) for line in answer.read_text().splitlines()]
        assert events[-1]["event"] == "done"
        results = {(one["backend"], one["capability"], one["value"]): one for one in events if one["event"] == "result"}
        found.append((results, [one for one in events if one["event"] == "backend"]))
    return found


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Probed]:
    """What became of four jobs, by name."""
    jobs = {
        "own": Job(backends=(OWN,), capabilities=(*CAPABILITIES, "batch_invariance"), seed=3, cases=1),
        "wrong": Job(
            backends=tuple(f"{FAKES}.{name}" for name in WRONG), capabilities=("captured", "sinks"), seed=3, cases=1
        ),
        "all": Job(backends=(), capabilities=("plain",), seed=3, cases=1),
        "named": Job(backends=("FLASH_ATTN",), capabilities=("plain",), seed=3, cases=1),
    }
    return dict(zip(jobs, probe(tmp_path_factory.mktemp("probed"), *jobs.values()), strict=True))


@pytest.fixture(autouse=True)
def _without_cuda() -> None:
    if torch.cuda.is_available():
        pytest.skip("this stand-in is for hosts without CUDA")


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=500, check=False)


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


def test_requests_whose_bits_depend_on_the_batch_are_seen(probed: dict[str, Probed], tmp_path: Path) -> None:
    assert not [key for key in probed["own"][0] if key[1] == "batch_invariance"], "not in vLLM's mode for it"
    fake = f"{FAKES}.SeesOthers"
    job = Job(backends=(OWN, fake), capabilities=("batch_invariance",), seed=4, cases=2)
    ((results, _),) = probe(tmp_path, job, VLLM_BATCH_INVARIANT="1")
    for value in ("yes", "head size 512"):
        own = results[OWN, "batch_invariance", value]
        assert (own["declared"], own["behaviour"]) == ("yes", "works")
    seen = results[fake, "batch_invariance", "yes"]
    assert seen["behaviour"] == "wrong"
    assert "not the bits of the request alone" in seen["detail"]
    assert results[fake, "plain", "causal"]["behaviour"] == "works"


def test_both_flash_attentions_of_a_cuda_host_are_probed(probed: dict[str, Probed]) -> None:
    for name in ("all", "named"):
        _, backends = probed[name]
        paths = {one["name"]: one["path"] for one in backends if one["left_out"] is None}
        assert (paths["FLASH_ATTN"], paths[OWN]) == (STOCK, OWN)
        assert len(paths) == 2 or name == "all"
        # Of vLLM's classes for ROCm some look for that device when they are asked, and must not end the probe.
        left_out = [one["left_out"] for one in backends if one["left_out"] is not None]
        assert any("cannot be asked on this host" in reason for reason in left_out) is (name == "all")


@pytest.fixture(scope="module")
def failed() -> dict[str, str]:
    """The programs below that failed, each with its traceback; they run in one process, one after the other."""
    programs = {"announced": _ANNOUNCED, "on meta": _ON_META, "windows": _WINDOWS}
    ended = python("-c", _IN_TURN, json.dumps(programs))
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    assert set(found) == set(programs)
    return found


def test_what_the_layer_keeps_is_on_the_device_and_nothing_else_is_made_there(failed: dict[str, str]) -> None:
    """A device whose tensors hold nothing stands in for one that is not the CPU."""
    assert not failed["on meta"]


def test_a_window_may_look_back_only_where_vllms_flash_attention_does(failed: dict[str, str]) -> None:
    assert not failed["windows"]


def test_a_mixed_batch_is_captured_with_the_bound_that_the_model_runner_announces(failed: dict[str, str]) -> None:
    assert not failed["announced"]


_IN_TURN = """
import json, sys, traceback
said = {}
for name, program in json.loads(sys.argv[1]).items():
    try:
        exec(program, {})
        said[name] = ""
    except Exception:
        said[name] = traceback.format_exc()
print(json.dumps(said))
"""


_ANNOUNCED = """
from vllm_hwplugin_lab.probe import Case, Request, _step
requests = (Request(1, 5), Request(6, 9), Request(9, 3))
mixed = Case(requests, "bfloat16", "auto", 64, 4, 2, 16, graph=(1,) * 16)
verify = Case((Request(4, 5),), "bfloat16", "auto", 64, 4, 2, 16, graph=(4,) * 8)
decode = Case((Request(1, 5),), "bfloat16", "auto", 64, 4, 2, 16, graph=(1,) * 8)
for short, longest in ((False, 16), (True, 1)):
    _step.captures_short_queries = lambda config: config == "a configuration" and short
    found = [_step.announced(case, "a configuration") for case in (mixed, verify, decode)]
    assert found == [longest, 4, 1], found
"""


_WINDOWS = """
from vllm_hwplugin_lab.probe import Case, Request, _vllm
from vllm_hwplugin_lab.probe.inputs import make_inputs
from vllm_hwplugin_lab.probe.reference import reference
import dataclasses, torch
case = Case((Request(9, 20),), "float32", "auto", 16, 4, 2, 16, causal=False, sliding_window=4, seed=3)
inputs = make_inputs(case, "cpu")
right = {ahead: reference(dataclasses.replace(case, window_ahead=ahead), inputs) for ahead in (None, 0, 3)}
for version, works in (("0.23.0", {0, 3}), ("0.24.0", {3}), ("0.26.0", {3})):
    _vllm.__version__ = version
    for ahead, answer in right.items():
        found = _vllm.measured(case, inputs, answer.float(), False)
        assert (found.ratio < 2) is (ahead in works), (version, ahead, found)
        assert ("looks back only" in str(found)) is (version == "0.23.0" and ahead == 0), (version, ahead, found)
"""


_ON_META = """
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm_hwplugin_lab.probe import Case, Request, _step, _vllm
case = Case((Request(3, 20),), "bfloat16", "auto", 64, 4, 2, 32)
with _vllm.layer_of(CPUAttentionBackend, case, torch.device("meta"), num_blocks=4) as layer:
    assert layer.layer._k_scale.device.type == "meta"
    assert layer.cache.device.type == "meta"
    assert torch.empty(()).device.type == "cpu"
    common = _step.Step(layer, case, 4, "meta")._metadata(case)
    assert common.block_table_tensor.device.type == "meta"
    assert common.query_start_loc_cpu.device.type == common.seq_lens_cpu_upper_bound.device.type == "cpu"
"""
