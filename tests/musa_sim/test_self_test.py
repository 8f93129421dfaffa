# SPDX-License-Identifier: Apache-2.0
"""The self-test of the GPU: each fault is found, and refuses what needs it and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu_seconds import patience
from vllm_hwplugin.musa import self_test
from vllm_hwplugin.musa.self_test import Result

from . import loads, simulated

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

GRAPHS = ["graphs", "graphs, draft model"]
DRAFTS = ["eager, draft model", "eager, draft model, async", "pieces, draft model", "graphs, draft model"]
DOTS = ["MusaFp8BlockKernel", "MusaInt8Kernel", "experts"]
SCALED = [f"_scaled_mm to {bits} bits, widths {no}divisible by 32" for bits in (16, 32) for no in ("", "not ")]
ATTENTION = ["graph: attention, 1 token", "graph: attention, 4 tokens"]
#: By fault, the checks that find it, and what they refuse.
EXPECTED = {
    "none": ([], []),
    # Nothing of the plugin's needs it.
    "mm": (["mm of float16 in float32"], []),
    "mask": (["Triton: sum of a mask"], ["top-k"]),
    "mask in int32": (["Triton: sum of a mask in int32"], DRAFTS),
    "alias": (["Triton: in place, behind a None"], ["eager, hybrid"]),
    "1 stage": (["Triton: dot, 1 stage"], DOTS),
    "3 stages": (["Triton: dot, 3 stages"], DOTS),
    "1 row": (SCALED, ["dequantized"]),
    "17 rows": (SCALED, ["dequantized"]),
    "32 bits": (SCALED[2:], []),
    "no _scaled_mm": (SCALED, ["dequantized"]),
    "e4m3": (["e4m3: overflow"], []),
    "event": (["event between two streams"], ["eager, draft model, async"]),
    "graph": (["graph: replay", *ATTENTION], ["pieces, draft model", *GRAPHS]),
    "attention 1": (ATTENTION[:1], GRAPHS),
    "attention 4": (ATTENTION[1:], GRAPHS[1:]),
}


def ask(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    host = folder / f"host {len(list(folder.iterdir()))}"
    environment = {
        **simulated.environment(host, mate=True),
        "VLLM_HWPLUGIN_CACHE_DIR": str(folder / "cache"),
        **variables,
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience(300))


def test_each_fault_is_found_and_refuses_what_needs_it(musa_host: None, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = ask(tmp_path, "-m", "tests.musa_sim.self_test_child", str(file))
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(file.read_text())
    # A check that cannot run refuses nothing.
    assert found.pop("cannot run") == [{"event between two streams": "error"}, []]
    expected = {fault: [dict.fromkeys(checks, "wrong"), refused] for fault, (checks, refused) in EXPECTED.items()}
    assert found == expected


START = f"""
from vllm import LLM

small = {str(loads.SMALL)!r}
speculation = dict(method="eagle3", model=small + "/eagle3", num_speculative_tokens=3)
LLM(model=small + "/target", dtype="float16", max_model_len=64, enforce_eager=True, speculative_config=speculation)
"""


def test_a_result_that_is_kept_refuses_an_engine_and_doctor_says_it(
    musa_host: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cache = tmp_path / "gpu.json", tmp_path / "cache"
    done = ask(tmp_path, "-m", "vllm_hwplugin.cli", "probe", "musa", "--json", str(file))
    assert done.returncode == 0, done.stderr[-4000:]
    probed = json.loads(file.read_text())
    (gpu,) = probed["gpus"]
    assert probed["ok"]
    assert {check["state"] for check in gpu["checks"]} == {"right"}
    assert sum(check["seconds"] for check in gpu["checks"]) < patience(2)

    wrong = "Triton: sum of a mask in int32"
    results = [Result(**check) for check in gpu["checks"]]
    results = [one._replace(state="wrong", detail="found 1") if one.name == wrong else one for one in results]
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(cache))
    assert self_test.keep_results(gpu["host"], lambda: results) == results
    assert self_test.keep_results(gpu["host"], list) == results
    assert self_test.keep_results({**gpu["host"], "triton": "3.2.0"}, list) == []

    doctor = json.loads(ask(tmp_path, "-m", "vllm_hwplugin.cli", "doctor", "--json", "-").stdout)
    line = f"{wrong}: wrong: found 1; refused: speculation with a draft model"
    assert [line in warning for warning in doctor["warnings"] if "self-test" in warning] == [True]
    started = ask(tmp_path, "-c", START, **loads.VARIABLES)
    assert started.returncode == 1
    assert f"this GPU's self-test finds wrong: {wrong}: found 1" in started.stderr
    assert "run without --speculative-config" in started.stderr
