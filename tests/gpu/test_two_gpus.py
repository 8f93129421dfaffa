# SPDX-License-Identifier: Apache-2.0
"""Two GPUs: tensor and data parallelism, stock vLLM and the plugin next to each other.

With tensor parallelism each worker is a process of its own, which has to find the same graphs by itself. With data
parallelism the ranks of a dense model are engines of their own; where vLLM couples them, the drafter stays as in stock
and the run record of each worker's process says why. Texts are compared as in test_gemma_shape: in float16, up to where
they part, and there the choice of the one must be as good as a tie to the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin_lab.bench import engine_environment, find_checkpoints, load_prompts
from vllm_hwplugin_lab.bench._entry_points import provide
from vllm_hwplugin_lab.bench._launch import child_environment, records_of

from .engines import PROFILED_ENGINE, SMALL_ENGINE, needs
from .test_drafter_graphs import ACCEPTANCE_TOLERANCE
from .test_gemma_shape import agree

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

SMALL = find_checkpoints(None)
SIDES = ("stock", "patched")


def speculation(method: str, k: int) -> dict[str, Any]:
    return {"method": method, "model": str(SMALL.drafter(method)), "num_speculative_tokens": k}


FULL = {"compilation_config": {"cudagraph_mode": "FULL"}}
TP = {"tensor_parallel_size": 2, **FULL}
#: vLLM measures memory and makes its own sizes, and the plugin larger ones.
WHOLE = {**PROFILED_ENGINE, "max_num_seqs": 256, "max_num_batched_tokens": 8192, "num_gpu_blocks_override": 512}
WHOLE["kv_cache_memory_bytes"] = None
CASES: dict[str, dict[str, Any]] = {
    "tp eagle3": {"speculative_config": speculation("eagle3", 3), **TP},
    "tp dflash": {"speculative_config": speculation("dflash", 7), **TP},
    "tp eagle3 v2": {"speculative_config": speculation("eagle3", 3), "tensor_parallel_size": 2},
    "tp dflash v2": {"speculative_config": speculation("dflash", 7), "tensor_parallel_size": 2},
    "dp eagle3": {"speculative_config": speculation("eagle3", 3), "data_parallel_size": 2, **FULL},
    "tp asleep": {"speculative_config": speculation("eagle3", 3), "enable_sleep_mode": True, **TP},
    "tp asleep v2": {
        "speculative_config": speculation("eagle3", 3),
        "enable_sleep_mode": True,
        "tensor_parallel_size": 2,
    },
    "tp profiled": {"speculative_config": speculation("eagle3", 3), **TP, **WHOLE},
    "tp broken": {"speculative_config": speculation("eagle3", 3), "tensor_parallel_size": 2, **WHOLE},
    "tp broken v2": {"speculative_config": speculation("eagle3", 3), "tensor_parallel_size": 2, **WHOLE},
}


#: On the second rank no graph can hold them.
BROKEN = {
    "tp broken": "vllm_hwplugin.spec_decode.v1.draft_phase_graphs:PhaseRecorder._draft",
    "tp broken v2": "vllm_hwplugin.spec_decode.v2.tail_capture:TailRecorder._draft",
}


def on_v2(name: str) -> bool:
    return name.endswith(" v2")


def job_of(name: str) -> dict[str, Any]:
    options = {**SMALL_ENGINE, "dtype": "float16", "model": str(SMALL.target), **CASES[name]}
    if name in BROKEN:
        options["worker_extension_cls"] = "failing_rank.FailingRank"
    dice = random.Random(0)
    prompts = [list(prompt[: dice.randrange(8, 96)]) for prompt in load_prompts(SMALL, 40)]
    # Steps with log probabilities are not replayed on Model Runner V2, so its texts have to be the same throughout.
    return {
        "choices": not on_v2(name),
        "sleeps": "asleep" in name,
        "options": options,
        "prompts": prompts,
        "tokens": [dice.randrange(16, 120) for _ in prompts],
    }


def run(folder: Path, job: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """An engine's answer, with the decisions that its processes recorded, or `{"error": the end of its log}`."""
    (folder / "job.json").write_text(json.dumps(job))
    since = datetime.now(timezone.utc) - timedelta(milliseconds=1)
    with (folder / "log").open("wb") as stream:
        child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("two_gpus_child.py")), "job.json", "answer.json"],
            cwd=folder,
            env=child_environment(environment, provide(folder / "metadata")),
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(timeout=300)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # What a crashed engine leaves behind keeps the GPU's memory.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if code != 0:
        return {"error": f"exit code {code}\n" + (folder / "log").read_text(errors="replace")}
    answer: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    answer["records"] = records_of({child.pid}, since)
    return answer


def run_sides(folder: Path, starts: Mapping[str, Callable[[Path], dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The answers of engines that run at the same time, each in a folder of its own."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU; two are needed")
    for side in starts:
        (folder / side).mkdir()
    with ThreadPoolExecutor(len(starts)) as pool:
        started = {side: pool.submit(start, folder / side) for side, start in starts.items()}
        return {side: future.result() for side, future in started.items()}


def run_side(folder: Path, name: str, side: str) -> dict[str, Any]:
    # With data parallelism each rank has an engine core, which is a process.
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} if name == "dp eagle3" else {}
    if side == "patched" and "asleep" in name:
        variables["VLLM_HWPLUGIN_NWOR_MODE"] = "restore"
    if side == "patched" and name in BROKEN:
        variables["FAILING_ON_RANK_1"] = BROKEN[name]
    environment = engine_environment("cuda", patched=side == "patched", v2_runner=on_v2(name), extra=variables)
    return run(folder, job_of(name), environment)


def run_both(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    return run_sides(folder, {side: partial(run_side, name=name, side=side) for side in SIDES})


def served(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    answers = run_both(folder, name)
    for side, answer in answers.items():
        assert "error" not in answer, f"{side}: {answer['error'][-4000:]}"
    return answers["stock"], answers["patched"]


def acceptance(answer: dict[str, Any]) -> list[float]:
    return [count / answer["drafts"] for count in answer["accepted"]]


@pytest.mark.parametrize("name", ["tp eagle3", "tp dflash", "tp profiled"])
def test_tensor_parallel_workers_draft_in_graphs_as_stock_does(name: str, tmp_path: Path) -> None:
    stock, patched = served(tmp_path, name)
    agree(stock, patched)
    assert acceptance(patched) == pytest.approx(acceptance(stock), abs=ACCEPTANCE_TOLERANCE)
    assert len(patched["workers"]) == 2
    for worker in patched["workers"]:
        assert worker["runner"] == "V1"
        assert worker["platform"].startswith("vllm_hwplugin.")
        assert worker["graph_modes"]["drafter"] == "FULL", worker["decisions"]
        assert worker["draft_phases_in_graphs"] > 0.9 * worker["draft_phases"] > 0
    for worker in stock["workers"]:
        assert worker["graph_replays"]["draft"] == 0


@pytest.mark.parametrize("name", ["tp eagle3 v2", "tp dflash v2"])
def test_tensor_parallel_workers_of_model_runner_v2_replay_their_steps(name: str, tmp_path: Path) -> None:
    needs("0.24")
    stock, patched = served(tmp_path, name)
    assert patched["texts"] == stock["texts"]
    assert acceptance(patched) == pytest.approx(acceptance(stock), abs=ACCEPTANCE_TOLERANCE)
    assert len(patched["workers"]) == 2
    for worker in patched["workers"]:
        assert worker["runner"] == "V2"
        assert {"v2-tail-graph", "v2-step-inputs"} <= set(worker["used"]), worker["decisions"]


@pytest.mark.parametrize("name", ["tp asleep", "tp asleep v2"])
def test_workers_that_write_no_rejected_draft_serve_after_a_sleep(name: str, tmp_path: Path) -> None:
    stock, patched = served(tmp_path, name)
    if on_v2(name):
        assert patched["texts"] == stock["texts"]
        assert patched["awake again"]["texts"] == stock["awake again"]["texts"]
    else:
        agree(stock, patched)
        agree(stock["awake again"], patched["awake again"])
    for worker in patched["workers"]:
        assert "nwor" in worker["used"], worker["decisions"]


@pytest.mark.parametrize("name", BROKEN)
def test_a_recording_that_fails_on_one_rank_is_given_up_on_both(name: str, tmp_path: Path) -> None:
    """It fails behind an all-reduce, with vLLM's own sizes; the other graphs still read what is each rank's own."""
    stock, patched = served(tmp_path, name)
    if on_v2(name):
        assert patched["texts"] == stock["texts"]
    else:
        agree(stock, patched)
    assert acceptance(patched) == pytest.approx(acceptance(stock), abs=ACCEPTANCE_TOLERANCE)
    lost = "v2-tail-graph" if on_v2(name) else "v1-draft-phase"
    said = [worker["unused"][lost] for worker in patched["workers"]]
    assert sorted("it failed on another rank" in one for one in said) == [False, True]


def test_data_parallel_ranks_serve_as_stock_does(tmp_path: Path) -> None:
    stock, patched = served(tmp_path, "dp eagle3")
    agree(stock, patched)
    said = [entry["decisions"]["draft-full-graph"] for entry in patched["records"] if entry["uses"]]
    assert len(said) == 2
    for text in said:
        assert "FULL drafter graphs" in text or "with data parallelism" in text
