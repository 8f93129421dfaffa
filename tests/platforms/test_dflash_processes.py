# SPDX-License-Identifier: Apache-2.0
"""The hooks for DFlash on the real VllmConfig, and on modules that were imported too early, in fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vllm_hwplugin
from vllm_hwplugin_lab import bench

pytestmark = pytest.mark.engine

REPOSITORY = Path(vllm_hwplugin.__file__).parent.parent


def run_child(which: str, cache: Path) -> dict[str, Any]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM", "PYTHON"))}
    environment = kept | {
        "PYTHONPATH": str(REPOSITORY),
        # The plugin is loaded where the test says so, not by its entry point.
        "VLLM_PLUGINS": "",
        "VLLM_HWPLUGIN_CACHE_DIR": str(cache),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    checkpoints = REPOSITORY / "tests" / "assets" / "small"
    command = [sys.executable, str(Path(__file__).parent / "dflash_child.py"), which, str(checkpoints)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def configurations(cpu_host: bench.Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_child("configurations", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def processes(cpu_host: bench.Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_child("processes", tmp_path_factory.mktemp("cache"))


def test_a_real_configuration_gets_whole_blocks(configurations: dict[str, Any]) -> None:
    plain, many = configurations["plain"], configurations["many requests"]
    # vLLM's own hold 32 requests.
    assert plain["sizes"] == [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
    assert (plain["largest"], plain["mode"], plain["extra"]) == (512, "FULL_DECODE_ONLY", [])
    assert (many["sizes"][: len(plain["sizes"])], many["largest"], many["own"]) == (plain["sizes"], 2048, 512)
    assert len(many["sizes"]) == len(plain["sizes"]) + 16


def test_real_configurations_made_from_it_are_the_same(configurations: dict[str, Any]) -> None:
    many = configurations["many requests"]
    assert many == configurations["replaced"] == configurations["pickled"]
    assert configurations["same key"]


def test_vllms_own_rounding_for_speculation_leaves_the_larger_sizes(configurations: dict[str, Any]) -> None:
    assert configurations["adjusted"]["sizes"] == configurations["many requests"]["sizes"][3:]


def test_a_real_users_sizes_are_left_alone(configurations: dict[str, Any]) -> None:
    assert configurations["given"]["sizes"] == [1, 8, 20, 64]
    assert configurations["bounded"]["largest"] == 48
    assert configurations["given"]["own"] is configurations["bounded"]["own"] is None


def test_real_configurations_that_are_left_to_vllm(configurations: dict[str, Any]) -> None:
    assert configurations["piecewise"]["note"] == "left to vLLM: cudagraph_mode is PIECEWISE"
    assert configurations["eager"]["sizes"] == []
    assert configurations["no speculation"]["sizes"][:4] == [1, 2, 4, 8]


def test_more_tokens_than_the_drafts_block_end_a_real_configuration_only_where_the_feature_is_required(
    configurations: dict[str, Any],
) -> None:
    """Stock vLLM serves it. pydantic wraps the error, and the message is in it."""
    said = "num_speculative_tokens=8 does not fit the DFlash draft"
    # Blocks of nine tokens: the last accepted one and the eight asked for.
    assert 9 in configurations["block"]["sizes"]
    assert said in configurations["block said"]
    assert configurations["block, required"].startswith("ValidationError")
    assert said in configurations["block, required"]


TARGETS = [
    "vllm.model_executor.models.qwen3_dflash",
    "vllm.v1.spec_decode.dflash",
    "vllm.v1.worker.gpu_model_runner",
]


@pytest.mark.parametrize(
    "where",
    ["parent, past the finder", "forked, past the finder", "spawned, past the finder", "forked, before the plugin"],
)
def test_modules_that_were_imported_too_early_are_swapped(processes: dict[str, Any], where: str) -> None:
    found = processes[where]
    assert found["error"] is None
    assert found["stock before"]
    assert found["patched"] == TARGETS
    assert not found["refused"]
    assert not found["warnings"]
    assert found["role"] == ("parent" if where.startswith("parent") else "child")


def test_the_drafters_graphs_are_swapped_too(processes: dict[str, Any]) -> None:
    found = processes["everything on"]
    assert found["patched"] == TARGETS
    assert "dflash-full-graph" in found["live"]


def test_a_drafter_that_cannot_be_swapped_runs_stock_with_the_reason(processes: dict[str, Any]) -> None:
    found = processes["drafter"]
    assert found["error"] is None
    assert found["refused"]["dflash-full-graph"].startswith("vllm.v1.spec_decode.dflash was imported")
    assert "draft-full-graph" in found["live"]
    assert found["patched"] == [name for name in TARGETS if name != "vllm.v1.spec_decode.dflash"]
    (line,) = found["warnings"]
    assert "dflash-full-graph" in line
    assert "vLLM runs stock there" in line


@pytest.mark.parametrize(
    ("case", "cause"),
    [("drafter, strict", "VLLM_HWPLUGIN_STRICT=1"), ("drafter, on", "VLLM_HWPLUGIN_DFLASH_FULL_GRAPH=on")],
)
def test_a_drafter_that_must_be_patched_is_an_error(processes: dict[str, Any], case: str, cause: str) -> None:
    error = processes[case]["error"]
    assert error.startswith("InstallError: dflash-")
    assert cause in error


def test_a_runner_that_cannot_be_swapped_is_an_error(processes: dict[str, Any]) -> None:
    found = processes["runner"]
    assert found["error"].startswith("InstallError: ")
    assert "only a part of it runs patched" in found["error"]
    assert "vllm.v1.worker.gpu_model_runner was imported" in found["error"]
    assert "VLLM_HWPLUGIN_DRAFT_FULL_GRAPH=off" in found["error"]
    assert not found["patched"]
