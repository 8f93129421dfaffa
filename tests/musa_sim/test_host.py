# SPDX-License-Identifier: Apache-2.0
"""What the commands and vLLM's configuration say on a simulated Moore Threads host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cpu_seconds import patience

from . import simulated

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

# Of a target with 48 layers, which has 49 pieces: by drafter, and for sizes that are named.
DEEP = f"""
import json
from vllm.engine.arg_utils import EngineArgs

small = {str(simulated.HERE.parent / "assets" / "small")!r}

def sizes(speculation=None, **compilation):
    made = EngineArgs(
        model=small + "/target", dtype="float16", max_model_len=64, max_num_seqs=256,
        hf_overrides=dict(num_hidden_layers=48, layer_types=["full_attention"] * 48), speculative_config=speculation,
        compilation_config=dict(cudagraph_mode="FULL_AND_PIECEWISE", mode=3, backend="eager", **compilation),
    ).create_engine_config().compilation_config
    return [len(made.cudagraph_capture_sizes), made.max_cudagraph_capture_size]

eagle3 = dict(method="eagle3", model=small + "/eagle3", num_speculative_tokens=3)
ngram = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)
named = list(range(8, 513, 8))
print(json.dumps([sizes(), sizes(eagle3), sizes(ngram), sizes(cudagraph_capture_sizes=named)]))
"""


def ask(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **simulated.environment(folder, devices=2, mate=True),
        "VLLM_HWPLUGIN_CACHE_DIR": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    command, limit = [sys.executable, *arguments], patience(300)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)


def test_doctor(musa_host: None, tmp_path: Path) -> None:
    done = ask(tmp_path, "-m", "vllm_hwplugin.cli", "doctor", "--json", "-")
    found: dict[str, Any] = json.loads(done.stdout)
    # There are no device files here: the driver's library has answered, as it answers the platform class.
    assert found["platform"]["kind"] == "musa"
    assert [device["name"] for device in found["platform"]["devices"]] == ["MTT S5000"] * 2
    assert any("mcc" in kernel["detail"] for kernel in found["kernels"])
    assert found["platform_class"]["class"] == "vllm_hwplugin.musa.platform.MusaPlatform"
    assert found["vllm"]["dist"] == "vllm"
    assert {state["state"] for state in found["features"] if state["choice"] == "auto"} <= {"live", "not-needed"}
    troubles = {line["package"]: line for line in found["musa"] if line["trouble"]}
    # This host has a later torch, as the warning says.
    assert "requires torch 2.11" in troubles.pop("torch_musa")["trouble"]
    # It has numpy 2 and the public package of a name.
    assert troubles.keys() <= {"apache-tvm-ffi", "numpy", "torchvision"}
    stops = [package for package, line in troubles.items() if line["stops"]]
    assert stops in ([], ["torchvision"])
    assert done.returncode == (1 if stops else 0)


def test_as_many_sizes_are_captured_as_a_process_can_hold(musa_host: None, tmp_path: Path) -> None:
    done = ask(tmp_path, "-c", DEEP)
    assert done.returncode == 0, done.stderr[-2000:]
    plain, eagle3, ngram, named = json.loads(done.stdout.splitlines()[-1])
    assert plain == [1800 // (49 + 1), 512]
    # 28 of vLLM's with the drafter's two pieces as well, and six of the plugin's, which have none: 1,768 graphs.
    assert eagle3 == [28 + 6, 1024]
    assert ngram == [1800 // (49 + 10), 512]
    assert named == [64, 512]
    assert "64 capture sizes would have some 3200 graphs" in done.stdout + done.stderr
