# SPDX-License-Identifier: Apache-2.0
"""What vLLM leaves to platforms outside its tree: experts, and layers of quantized checkpoints. Texts are the CPU's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin_lab import bench

from . import checkpoints, loads, simulated
from .test_engines import COMMON, OLDEST, options, run

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]


def _models(folder: Path) -> dict[str, tuple[Path, Path]]:
    """By kind: the checkpoint, and the twin that the CPU serves."""
    mixture = checkpoints.mixture()
    experts = checkpoints.write(folder / "experts", mixture, **checkpoints.MIXTURE)
    blocks, of_blocks = checkpoints.in_fp8_blocks(mixture)
    bits, of_bits = checkpoints.in_four_bits(checkpoints.dense())
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


#: With experts in the first two.
KINDS: dict[str, dict[str, Any]] = {
    "experts": {"graphs": "FULL_DECODE_ONLY"},
    "FP8 blocks": {"graphs": "FULL_DECODE_ONLY"},
    "W4A16": {"graphs": "FULL_DECODE_ONLY"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    return _models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def on_cpu(
    cpu_host: bench.Host, models: dict[str, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    engines = {kind: {**COMMON, "model": str(twin), "enforce_eager": True} for kind, (_, twin) in models.items()}
    return run(engines, loads.cpu(), tmp_path_factory.mktemp("cpu"))


@pytest.fixture(scope="module")
def on_musa(
    musa_host: None, models: dict[str, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("musa")
    engines = {kind: options(**KINDS[kind], model=str(model)) for kind, (model, _) in models.items()}
    return run(engines, simulated.environment(folder, mate=True), folder)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_the_cpu(kind: str, on_musa: dict[str, Any], on_cpu: dict[str, Any]) -> None:
    found, expected = on_musa[kind]["texts"], on_cpu[kind]["texts"]
    if kind == "FP8 blocks":
        # On MUSA, activations are rounded as well, and one of two near tokens may be the other.
        same = [
            next((at for at, (a, b) in enumerate(zip(*texts, strict=True)) if a != b), len(texts[0]))
            for texts in zip(found, expected, strict=True)
        ]
        assert min(same) > 0
        assert sum(same) > sum(map(len, expected)) / 2
    else:
        assert found == expected
    assert on_musa[kind]["workers"][0]["platform"] == "MusaPlatform"


#: The kernel, and how far its outputs may be from float32's, by the largest of them. FP8 has 3 bits behind the point.
LAYERS = {
    "FP8, tensor": ("MusaFp8TensorKernel", 0.06),
    "FP8, channel": ("MusaFp8ChannelKernel", 0.06),
    "FP8, block": ("MusaFp8BlockKernel", 0.06),
    "INT8": ("MusaInt8Kernel", 0.015),
    "W4A16": ("MusaW4A16Kernel", 0.001),
}


@pytest.mark.network
@pytest.mark.parametrize("version", [None, OLDEST])
def test_quantized_layers_compute_what_their_weights_stand_for(
    version: str | None, musa_host: None, tmp_path: Path
) -> None:
    file = tmp_path / "errors.json"
    command = [sys.executable, "-m", "tests.musa_sim.layers_child", str(file)]
    vllm = None if version is None else (version, simulated.released_vllm(version))
    environment = {**simulated.environment(tmp_path, vllm=vllm), "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(file.read_text())
    assert {kind: kernel for kind, (kernel, _) in found.items()} == {kind: one for kind, (one, _) in LAYERS.items()}
    too_far = {kind: error for kind, (_, error) in found.items() if not error < LAYERS[kind][1]}
    assert not too_far
