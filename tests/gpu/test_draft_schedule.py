# SPDX-License-Identifier: Apache-2.0
"""FlashAttention 3 on a windowed DFlash draft in a CUDA graph, by the installed vLLM, stock and patched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from vllm_hwplugin.patching._installed import find_installed

pytestmark = pytest.mark.gpu


def difference(choice: str) -> float:
    """From plain torch; infinite where the kernel ends by an error of CUDA, such as an illegal access, or never."""
    command = [sys.executable, "-m", "tests.gpu.draft_schedule_child", choice]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return float("inf")
    print(done.stderr)
    if "CUDA error" in done.stderr:
        return float("inf")
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", autouse=True)
def _has_the_fault() -> None:
    import torch

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashAttention 3 is for compute capability 9.0")
    version = Version(find_installed().version)
    if not Version("0.25.0") <= version < Version("0.30.0"):
        pytest.skip(f"vLLM {version} has no such drafts, or makes no schedule for them")


def test_a_patched_draft_attends_to_its_window() -> None:
    assert difference("auto") < 0.02


def test_a_stock_draft_does_not() -> None:
    assert difference("off") > 0.1
