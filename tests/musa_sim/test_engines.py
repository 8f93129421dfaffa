# SPDX-License-Identifier: Apache-2.0
"""The real vLLM on a simulated Moore Threads GPU: engine cores of their own and in the caller's process, eager and in
graphs, with drafters, on two GPUs. Texts have to be those of vLLM on the CPU.

It shows control flow, names, shapes and types. It cannot show numerics, speed, what ``mcc`` and Triton for MUSA
compile, or work that is still under way when the host goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin_lab import bench

from ..conftest import cannot_run
from . import loads, simulated

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

SMALL = simulated.HERE.parent / "assets" / "small"
PROMPTS, TOKENS = 4, 12
# Drafts of a step for each method, and the sizes of graphs that PROMPTS requests need with them.
DRAFTS = {"eagle3": 3, "dflash": 7}

COMMON: dict[str, Any] = {
    "model": str(SMALL / "target"),
    # mate takes no float32.
    "dtype": "float16",
    "max_model_len": 192,
    "max_num_seqs": PROMPTS,
    "max_num_batched_tokens": 192,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "seed": 0,
}
_MUSA: dict[str, Any] = {
    **COMMON,
    # A capture saves what it writes to, and Triton's interpreter is slow in large tensors.
    "num_gpu_blocks_override": 64,
    # It looks into compiled kernels, which the interpreter has not.
    "kernel_config": {"enable_jit_warmup": False},
}


def options(
    *, method: str | None = None, graphs: str | None = None, mode: int = 0, sizes: tuple[int, ...] = (), **more: Any
) -> dict[str, Any]:
    made = {**_MUSA, **more}
    width = 1
    if method is not None:
        width += DRAFTS[method]
        made["speculative_config"] = {
            "method": method,
            "model": str(SMALL / method),
            "num_speculative_tokens": DRAFTS[method],
        }
    if graphs is None:
        return {**made, "enforce_eager": True}
    # Inductor generates no code for MUSA in torch's own build.
    made["compilation_config"] = {
        "cudagraph_mode": graphs,
        "mode": mode,
        "backend": "eager",
        "cudagraph_capture_sizes": [*(width * requests for requests in (1, 2, PROMPTS)), *sizes],
    }
    return made


#: On a vLLM without compiled kernels, as one for MUSA is.
ENGINES = {
    "eager": options(),
    "FULL_DECODE_ONLY": options(graphs="FULL_DECODE_ONLY"),
    "FULL_AND_PIECEWISE": options(graphs="FULL_AND_PIECEWISE", mode=3, sizes=(COMMON["max_num_batched_tokens"],)),
    "Eagle3": options(method="eagle3", graphs="FULL"),
    "DFlash": options(method="dflash", graphs="FULL"),
    "two GPUs": options(graphs="FULL_DECODE_ONLY", tensor_parallel_size=2),
}

#: Where the engine's core is a process of its own, which has to import all of vLLM once more.
OWN_PROCESS = ("FULL_AND_PIECEWISE", "DFlash", "two GPUs")

#: A version for which a torch for MUSA exists, and what is tried with it.
OLDEST, ON_OLDEST = "0.20.2", ("FULL_DECODE_ONLY", "Eagle3", "DFlash")


def prompts() -> list[list[int]]:
    return [prompt[:64] for prompt in json.loads((SMALL / "prompts.json").read_text())["prompt_ids"][:PROMPTS]]


def run(engines: dict[str, Any], environment: dict[str, str], folder: Path, tokens: int = TOKENS) -> dict[str, Any]:
    # These first: afterwards there is a device in this process, and vLLM no longer looks at its variables.
    names = sorted(engines, key=lambda name: name not in OWN_PROCESS)
    jobs = {
        name: {"options": engines[name], "prompts": prompts(), "tokens": tokens, "own_process": name in OWN_PROCESS}
        for name in names
    }
    (folder / "jobs.json").write_text(json.dumps(jobs))
    answers = folder / "answers.json"
    # Not by its path: mate lies beside it, and is not on every host.
    command = [sys.executable, "-m", "tests.musa_sim.engine_child", str(folder / "jobs.json"), str(answers)]
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Functions are sent to the workers.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        # Its key names an attribute of AMD's GPUs where torch.version.cuda is None; torch for MUSA is patched there.
        "VLLM_USE_AOT_COMPILE": "0",
    }
    log = folder / "log"
    with log.open("wb") as output:
        subprocess.run(command, env={**environment, **variables}, stdout=output, stderr=subprocess.STDOUT, timeout=1700)
    text = log.read_text(errors="replace")
    assert answers.exists(), text[-6000:]
    found = json.loads(answers.read_text())
    for name, answer in found.items():
        assert "error" not in answer, f"{name}: {answer['error'][-500:]}\n{errors_of(text)}"
    return found


def errors_of(log: str) -> str:
    """The last lines of an engine core or worker that say what went wrong there."""
    return "\n".join([line for line in log.splitlines() if "ERROR" in line][-60:])


@pytest.fixture(scope="module")
def on_cpu(cpu_host: bench.Host, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The texts of vLLM on the CPU, without speculation and without the plugin."""
    engines = {"cpu": {**COMMON, "enforce_eager": True}}
    return run(engines, loads.cpu(), tmp_path_factory.mktemp("cpu"))["cpu"]["texts"]


@pytest.fixture(scope="module")
def on_musa(musa_host: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("musa")
    return run(ENGINES, simulated.environment(folder, devices=2, mate=True), folder)


def run_oldest(names: Iterable[str], folder: Path) -> dict[str, Any]:
    """The Python of vLLM 0.20.2, which is for torch 2.11, on the torch that is installed here."""
    try:
        vllm = (OLDEST, simulated.released_vllm(OLDEST))
    except subprocess.CalledProcessError as error:
        cannot_run(f"vLLM {OLDEST} cannot be had: {error}")
    # It has no warm-up of kernels to switch off.
    engines = {
        name: {option: value for option, value in ENGINES[name].items() if option != "kernel_config"} for name in names
    }
    return run(engines, simulated.environment(folder, mate=True, vllm=vllm), folder)


@pytest.fixture(scope="module")
def oldest_on_musa(musa_host: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_oldest(ON_OLDEST, tmp_path_factory.mktemp("oldest"))


@pytest.mark.parametrize("name", ENGINES)
def test_texts_are_those_of_the_cpu(name: str, on_musa: dict[str, Any], on_cpu: list[list[int]]) -> None:
    assert on_musa[name]["texts"] == on_cpu


@pytest.mark.parametrize("name", ENGINES)
def test_vllm_chooses_the_plugins_classes(name: str, on_musa: dict[str, Any]) -> None:
    workers = on_musa[name]["workers"]
    assert len(workers) == (2 if name == "two GPUs" else 1)
    for index, worker in enumerate(workers):
        assert (worker["process"] != on_musa[name]["process"]) == (name in OWN_PROCESS)
        assert (worker["platform"], worker["runner"]) == ("MusaPlatform", "V1")
        assert worker["device"] == f"musa:{index}"
        assert worker["attention"] == ["MusaFlashAttentionBackend"]


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "eager"])
def test_decodes_are_replayed_graphs(name: str, on_musa: dict[str, Any]) -> None:
    for worker in on_musa[name]["workers"]:
        # Prompts are read in the first steps, two of which are for new requests.
        assert worker["graph_replays"]["target"] >= worker["steps"] - 3 > 0


def test_prompts_are_replayed_piece_by_piece(on_musa: dict[str, Any]) -> None:
    (worker,) = on_musa["FULL_AND_PIECEWISE"]["workers"]
    assert worker["graph_replays"]["target"] > worker["steps"]


def test_eager_replays_nothing(on_musa: dict[str, Any]) -> None:
    (worker,) = on_musa["eager"]["workers"]
    assert set(worker["graph_replays"].values()) == {0}


@pytest.mark.parametrize(("name", "feature"), [("Eagle3", "draft-full-graph"), ("DFlash", "dflash-full-graph")])
def test_drafters_run_in_graphs(name: str, feature: str, on_musa: dict[str, Any]) -> None:
    (worker,) = on_musa[name]["workers"]
    assert feature in worker["used"]
    assert on_musa[name]["drafts"] > 0
    assert sum(on_musa[name]["accepted"]) > 0
    assert worker["draft_phases_in_graphs"] == worker["draft_phases"] > 0


@pytest.mark.smoke
@pytest.mark.network
def test_the_oldest_vllm_without_graphs(musa_host: None, on_cpu: list[list[int]], tmp_path: Path) -> None:
    answer = run_oldest(["eager"], tmp_path)["eager"]
    (worker,) = answer["workers"]
    assert answer["texts"] == on_cpu
    assert (worker["platform"], worker["attention"]) == ("MusaPlatform", ["MusaFlashAttentionBackend"])


@pytest.mark.network
@pytest.mark.parametrize("name", ON_OLDEST)
def test_the_oldest_vllm(name: str, oldest_on_musa: dict[str, Any], on_cpu: list[list[int]]) -> None:
    answer = oldest_on_musa[name]
    (worker,) = answer["workers"]
    assert answer["texts"] == on_cpu
    assert (worker["platform"], worker["attention"]) == ("MusaPlatform", ["MusaFlashAttentionBackend"])
    assert worker["graph_replays"]["target"] >= worker["steps"] - 3 > 0
    if name != "FULL_DECODE_ONLY":
        assert worker["draft_phases_in_graphs"] == worker["draft_phases"] > 0


def test_two_gpus_communicate_by_mccl(on_musa: dict[str, Any]) -> None:
    assert {worker["communicator"] for worker in on_musa["two GPUs"]["workers"]} == {"MusaCommunicator"}


def test_triton_attention_without_mate(
    musa_host: None, on_cpu: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """And with the compiled kernels that this vLLM has, whose operations the device takes to the CPU's."""
    folder = tmp_path_factory.mktemp("triton")
    environment = {**simulated.environment(folder), "MUSA_SIM_VLLM_KERNELS": "1"}
    answer = run({"eager": ENGINES["eager"]}, environment, folder, tokens=2)["eager"]
    assert answer["texts"] == [text[:2] for text in on_cpu]
    assert answer["workers"][0]["attention"] == ["TritonAttentionBackend"]
