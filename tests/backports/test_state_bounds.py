# SPDX-License-Identifier: Apache-2.0
"""Which recurrent states vLLM's released kernels read, unpatched and patched, in Triton's interpreter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.spec_decode.released import text_of

from ..conftest import versions
from .samplers import sample

OFF = {"VLLM_HWPLUGIN_BACKPORT_STATE_BOUNDS": "off"}
OPS = "vllm/model_executor/layers"
FOLDERS = (f"{OPS}/fla/ops/", f"{OPS}/mamba/ops/", "vllm/third_party/flash_linear_attention/ops/", "vllm/models/")
FILES = ("fused_recurrent.py", "fused_sigmoid_gating.py", "mamba_ssm.py", "causal_conv1d.py")
#: Mamba's kernel bounds a count of zero itself.
WITH_A_CHECK = "_selective_scan_update_kernel"


#: By what a version has of these kernels, what they do: most versions have the same text.
ANSWERS: dict[str, Any] = {}


@pytest.mark.parametrize("version", versions(*FOLDERS, f"{OPS}/mamba/ops/causal_conv1d.py"))
def test_a_request_goes_on_from_its_own_state(version: str, vllm_tree: Callable[[str], Any], tmp_path: Path) -> None:
    tree = vllm_tree(version)
    paths = [path for path in tree.paths(*FOLDERS) if path.endswith(FILES) and "/cpu/" not in path]
    sides = {
        side: {path.removesuffix(".py").replace("/", "."): text_of(tree, path, **choices) for path in paths}
        for side, choices in (("vLLM", OFF), ("patched", {}))
    }
    key = json.dumps(sides)
    if key not in ANSWERS:
        ANSWERS[key] = sample(sides, tmp_path, "cpu", "state_bounds_child")
    answers = ANSWERS[key]
    kernels = [name for name in answers["vLLM"] if not name.endswith(WITH_A_CHECK)]
    assert len(kernels) >= 3
    for name in answers["vLLM"]:
        foreign = {"1": False, "4": False, "0": name in kernels, "5": True}
        assert answers["vLLM"][name] == foreign, name
        assert answers["patched"][name] == dict.fromkeys(foreign, False), name
