# SPDX-License-Identifier: Apache-2.0
"""What vLLM leaves to platforms outside its tree: experts, and layers of quantized checkpoints. Texts are the CPU's."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cpu_seconds import patience
from vllm_hwplugin_lab import bench

from .. import releases
from . import checkpoints, forks, loads, simulated
from .loads import Engine, Load, Process, Run
from .test_engines import V1, requests, texts

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]


_PLAIN, _EAGLE3 = Engine(None, graphs_of=(1,)), Engine("eagle3", "FULL", graphs_of=(1, 2))
ENGINES = {"experts": _EAGLE3, "FP8 blocks": _PLAIN, "W4A16": _PLAIN}


def _models(folder: Path) -> dict[str, tuple[Path, Path]]:
    """By kind: the checkpoint, and the twin that the CPU serves."""
    mixture = checkpoints.mixture()
    experts = checkpoints.write(folder / "experts", mixture, **checkpoints.MIXTURE)
    blocks, of_blocks = checkpoints.quantized(mixture, checkpoints.fp8_blocks)
    bits, of_bits = checkpoints.quantized(checkpoints.dense(), checkpoints.four_bits)
    return {
        "experts": (experts, experts),
        "FP8 blocks": (
            checkpoints.write(folder / "blocks", blocks, **checkpoints.MIXTURE, **checkpoints.FP8_BLOCKS),
            checkpoints.write(folder / "of blocks", of_blocks, **checkpoints.MIXTURE),
        ),
        "W4A16": (
            checkpoints.write(folder / "bits", bits, **checkpoints.W4A16),
            checkpoints.write(folder / "of bits", of_bits),
        ),
    }


#: By kind, the texts on MUSA and those on the CPU.
Texts = dict[str, tuple[list[list[int]], list[list[int]]]]


@pytest.fixture(scope="module")
def runs(
    musa_host: None, cpu_host: bench.Host, newest: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Texts]:
    """The engines run once, in the test that asks first: it fails if they do."""
    return functools.cache(functools.partial(_run, newest, tmp_path_factory.mktemp("checkpoints")))


def _run(newest: tuple[str, Path], folder: Path) -> Texts:
    models, asked, eager = _models(folder / "models"), requests(tokens=8, prompts=2), Engine(None).on_cpu()
    # The interpreter takes seconds for each step of a quantized model.
    short = [replace(one, prompt=one.prompt[:16]) for one in requests(tokens=6, prompts=1)]
    few = dict.fromkeys(models, short) | {"experts": asked}
    there = {
        kind: Load({**ENGINES[kind].on_musa(), "model": str(model)}, few[kind]) for kind, (model, _) in models.items()
    }
    here = {kind: Load({**eager, "model": str(twin)}, few[kind]) for kind, (_, twin) in models.items()}
    cached = {"FP8 cache": Load({**_EAGLE3.on_musa(), "kv_cache_dtype": "fp8"}, asked)}
    processes = {
        "musa": Process(there, loads.musa(folder / "host", newest, **V1)),
        "newer mate": Process(cached, loads.musa(folder / "host, newer mate", newest, mate="0.2.7", **V1)),
        "cpu": Process(here | {"FP8 cache": Load(eager, asked)}, loads.cpu()),
    }
    found = loads.side_by_side(processes, folder)
    on_musa = found["musa"] | found["newer mate"]
    for run in on_musa.values():
        assert (run.platform, run.attention) == ("MusaPlatform", ["MusaFlashAttentionBackend"])
    for kind in ("experts", "FP8 cache"):
        assert_drafts_in_graphs(on_musa[kind])
    return {kind: (texts(run), texts(found["cpu"][kind])) for kind, run in on_musa.items()}


def assert_drafts_in_graphs(run: Run) -> None:
    assert run.accepted()[0] > 0
    assert run.counts["draft_phases_in_graphs"] == run.counts["draft_phases"] > 0


@pytest.mark.parametrize("kind", [*ENGINES, "FP8 cache"])
def test_texts_are_those_of_the_cpu(kind: str, runs: Callable[[], Texts]) -> None:
    found, expected = runs()[kind]
    if kind.startswith("FP8"):
        # On MUSA, activations or keys are rounded as well, and one of two near tokens may be the other.
        assert_alike(found, expected)
    else:
        assert found == expected


def assert_alike(found: list[list[int]], expected: list[list[int]]) -> None:
    """Assert that each text begins as expected, and most tokens come before the first other one."""
    same = [
        next((at for at, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0]))
        for pair in zip(found, expected, strict=True)
    ]
    assert min(same) > 0
    assert sum(same) > sum(map(len, expected)) / 2


def test_experts_on_the_version_of_musas_torch(
    released: Callable[[str], tuple[str, Path]], runs: Callable[[], Texts], tmp_path: Path
) -> None:
    model = checkpoints.write(tmp_path / "experts", checkpoints.mixture(), **checkpoints.MIXTURE)
    load = Load({**_EAGLE3.on_musa(), "model": str(model)}, requests(tokens=8, prompts=2))
    host = loads.musa(tmp_path / "host", released("0.26.0"), **V1)
    run = Process({"experts": load}, host).run(tmp_path / "engine")["experts"]
    assert texts(run) == runs()["experts"][1]
    assert_drafts_in_graphs(run)


def test_two_gpus_share_experts_and_communicate_by_mccl(runs: Callable[[], Texts], tmp_path: Path) -> None:
    """The engine's core and its workers are processes of their own. Nothing chooses their model runner."""
    model = checkpoints.write(tmp_path / "experts", checkpoints.mixture(), **checkpoints.MIXTURE)
    options = {**_EAGLE3.on_musa(), "model": str(model), "tensor_parallel_size": 2}
    more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    environment = simulated.environment(tmp_path / "host", devices=2, mate=True) | loads.VARIABLES | more
    job = {
        "options": options,
        "prompts": [one.prompt for one in requests(prompts=2)],
        "tokens": [8, 8],
        "choices": False,
    }
    asked, answer = tmp_path / "job.json", tmp_path / "answer.json"
    asked.write_text(json.dumps(job))
    command = [sys.executable, str(simulated.HERE.parent / "gpu" / "two_gpus_child.py"), str(asked), str(answer)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience(600))
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(answer.read_text())
    assert found["texts"] == runs()["experts"][1]
    assert len({found["process"], *(worker["process"] for worker in found["workers"])}) == 3
    for index, worker in enumerate(found["workers"]):
        assert (worker["device"], worker["runner"], worker["communicator"]) == (
            f"musa:{index}",
            "V1",
            "MusaCommunicator",
        )
        assert worker["graph_replays"]["target"] > worker["steps"] // 2
        assert worker["draft_phases_in_graphs"] == worker["draft_phases"] > 0


#: The kernel, and how far its outputs may be from float32's, by the largest of them. FP8 has 3 bits behind the point.
LAYERS = {
    "FP8, tensor": ("MusaFp8TensorKernel", 0.06),
    "FP8, channel": ("MusaFp8ChannelKernel", 0.06),
    "FP8, block": ("MusaFp8BlockKernel", 0.06),
    "INT8": ("MusaInt8Kernel", 0.015),
    "W4A16": ("MusaW4A16Kernel", 0.001),
    "GPTQ": ("MusaW4A16Kernel", 0.001),
    "AWQ": ("MusaW4A16Kernel", 0.001),
}
OF_SCALED_MM = ("FP8, tensor", "FP8, channel")


def layers(asked: list[str], folder: Path, vllm: tuple[str, Path] | None = None, **variables: str) -> dict[str, bool]:
    """Assert the kernel and the result of each; return whether it falls back."""
    file, log = folder / "errors.json", folder / "log"
    command = ["tests.musa_sim.layers_child", str(file), *asked]
    environment = {**simulated.environment(folder, vllm=vllm), "VLLM_LOGGING_LEVEL": "ERROR", **variables}
    assert forks.run(command, environment, log, patience(300)) == 0, log.read_text()[-6000:]
    found = json.loads(file.read_text())
    for one, (kernel, error, _) in found.items():
        expected, most = LAYERS[one.rsplit(" ", 2)[0]]
        assert (one, kernel) == (one, expected)
        assert error < most, (one, error)
    return {one: falls_back for one, (_, _, falls_back) in found.items()}


@pytest.mark.parametrize(("version", "without"), [(releases.NEWEST, ()), ("0.20.2", ("GPTQ", "AWQ"))])
def test_quantized_layers_compute_what_their_weights_stand_for(
    version: str, without: tuple[str, ...], released: Callable[[str], tuple[str, Path]], musa_host: None, tmp_path: Path
) -> None:
    asked = [f"{kind} 192 384" for kind in LAYERS if kind not in without]
    assert not any(layers(asked, tmp_path, released(version)).values())


@pytest.mark.parametrize("device", ["doubted", "zeros"])
def test_fp8_products_that_the_device_refuses_or_gets_wrong_are_dequantized(
    device: str, musa_host: None, tmp_path: Path
) -> None:
    """What torch_musa's source doubts is refused, and what is reported wrong (float32 results) is wrong."""
    asked = [f"{kind} {rows} {outputs}" for kind in OF_SCALED_MM for rows in (1, 17, 33) for outputs in (384, 40)]
    falls_back = layers(asked, tmp_path, MUSA_SIM_SCALED_MM=device)
    expected = {one: device == "doubted" or (device == "zeros" and one.startswith("FP8, channel")) for one in asked}
    assert falls_back == expected
