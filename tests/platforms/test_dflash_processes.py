# SPDX-License-Identifier: Apache-2.0
"""The hooks for DFlash on the real VllmConfig, in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vllm_hwplugin
from tests.cpu_seconds import patience
from vllm_hwplugin_lab import bench

pytestmark = pytest.mark.engine

REPOSITORY = Path(vllm_hwplugin.__file__).parent.parent


@pytest.fixture(scope="module")
def configurations(cpu_host: bench.Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM", "PYTHON"))}
    environment = kept | {
        "PYTHONPATH": str(REPOSITORY),
        # The plugin is loaded by the hook, not by its entry point.
        "VLLM_PLUGINS": "",
        "VLLM_HWPLUGIN_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [sys.executable, str(Path(__file__).with_name("dflash_child.py")), str(REPOSITORY / "tests/assets/small")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience(600))
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


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
