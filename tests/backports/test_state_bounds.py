# SPDX-License-Identifier: Apache-2.0
"""Which recurrent states vLLM's released kernels read, unpatched and patched, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.spec_decode.released import text_of

from ..conftest import versions

OFF = {"VLLM_HWPLUGIN_BACKPORT_STATE_BOUNDS": "off"}
OPS = "vllm/model_executor/layers"
FOLDERS = (f"{OPS}/fla/ops/", f"{OPS}/mamba/ops/", "vllm/third_party/flash_linear_attention/ops/", "vllm/models/")
FILES = ("fused_recurrent.py", "fused_sigmoid_gating.py", "mamba_ssm.py", "causal_conv1d.py")
#: Mamba's kernel bounds a count of zero itself.
WITH_A_CHECK = "_selective_scan_update_kernel"


@pytest.mark.parametrize("version", versions(*FOLDERS, f"{OPS}/mamba/ops/causal_conv1d.py"))
def test_a_request_goes_on_from_its_own_state(version: str, vllm_tree: Callable[[str], Any], tmp_path: Path) -> None:
    tree = vllm_tree(version)
    paths = [path for path in tree.paths(*FOLDERS) if path.endswith(FILES) and "/cpu/" not in path]
    sides = {
        side: {path.removesuffix(".py").replace("/", "."): text_of(tree, path, **choices) for path in paths}
        for side, choices in (("vLLM", OFF), ("patched", {}))
    }
    file = tmp_path / "texts.json"
    file.write_text(json.dumps(sides))
    command = [sys.executable, "-m", "tests.backports.state_bounds_child", str(file)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    kernels = [name for name in answers["vLLM"] if not name.endswith(WITH_A_CHECK)]
    assert len(kernels) >= 3
    for name in answers["vLLM"]:
        foreign = {"1": False, "4": False, "0": name in kernels, "5": True}
        assert answers["vLLM"][name] == foreign, name
        assert answers["patched"][name] == dict.fromkeys(foreign, False), name
