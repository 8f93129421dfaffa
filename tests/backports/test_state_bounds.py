# SPDX-License-Identifier: Apache-2.0
"""Which recurrent states vLLM's released kernels read, unpatched and patched, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.released import text_of

from ..conftest import versions
from .samplers import sample

OFF = {"VLLM_HWPLUGIN_BACKPORT_STATE_BOUNDS": "off"}
OPS = "vllm/model_executor/layers"
FOLDERS = (f"{OPS}/fla/ops/", f"{OPS}/mamba/ops/", "vllm/third_party/flash_linear_attention/ops/", "vllm/models/")
FILES = ("fused_recurrent.py", "fused_sigmoid_gating.py", "mamba_ssm.py", "causal_conv1d.py")
#: Mamba's kernel bounds a count of zero itself.
WITH_A_CHECK = "_selective_scan_update_kernel"


#: By a module, and its text on both sides, what its kernels read: most versions have the same text.
ANSWERS: dict[tuple[str, str, str], dict[str, Any]] = {}


@pytest.mark.parametrize("version", versions(*FOLDERS, f"{OPS}/mamba/ops/causal_conv1d.py"))
def test_a_request_goes_on_from_its_own_state(version: str, vllm_tree: Callable[[str], Any], tmp_path: Path) -> None:
    tree = vllm_tree(version)
    paths = [path for path in tree.paths(*FOLDERS) if path.endswith(FILES) and "/cpu/" not in path]
    modules = {
        (path.removesuffix(".py").replace("/", "."), text_of(tree, path, **OFF), text_of(tree, path)) for path in paths
    }
    if new := modules - ANSWERS.keys():
        sides = {"vLLM": {name: text for name, text, _ in new}, "patched": {name: text for name, _, text in new}}
        found = sample(sides, tmp_path, "cpu", "state_bounds_child")
        for module in new:
            ANSWERS[module] = {
                side: {name: read for name, read in found[side].items() if name.startswith(f"{module[0]} ")}
                for side in sides
            }
    answers = {
        side: {name: read for module in modules for name, read in ANSWERS[module][side].items()}
        for side in ("vLLM", "patched")
    }
    kernels = [name for name in answers["vLLM"] if not name.endswith(WITH_A_CHECK)]
    assert len(kernels) >= 3
    for name in answers["vLLM"]:
        foreign = {"1": False, "4": False, "0": name in kernels, "5": True}
        assert answers["vLLM"][name] == foreign, name
        assert answers["patched"][name] == dict.fromkeys(foreign, False), name
