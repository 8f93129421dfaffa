# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against float64, in Triton's interpreter. What a GPU makes of them is in tests/gpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import vllm_hwplugin
from tests.cpu_seconds import patience

pytest.importorskip("torch")
pytest.importorskip("triton")

# Twice SDPA's error, as for every backend: the interpreter's numbers are numpy's, and no worse.
LIMIT = 2.0
ROOT = Path(vllm_hwplugin.__file__).parent.parent


@pytest.mark.slow
def test_every_setting_of_a_layer_is_right() -> None:
    seed = int(time.time())
    ended = subprocess.run(
        [sys.executable, "-m", "tests.attention.paged.interpreted_child", str(seed)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=patience(300),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    wrong = [f"{one['case']}: {one['ratio']:.3g}" for one in found if not one["ratio"] <= LIMIT]
    assert not wrong, f"seed {seed}: {wrong}"
    assert len(found) == 10 + 3
