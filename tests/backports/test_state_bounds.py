# SPDX-License-Identifier: Apache-2.0
"""Which recurrent states vLLM's released kernels read, unpatched and patched, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
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


@pytest.fixture(scope="module")
def answers(request: Any, vllm_tree: Callable[[str], Any], tmp_path_factory: Any) -> dict[tuple[str, str], Any]:
    """By version and side, what its kernels read. One process tries each text once: most versions have the same."""
    texts: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for version in [item.callspec.params["version"] for item in request.session.items if item.parent is request.node]:
        tree = vllm_tree(version)
        paths = [path for path in tree.paths(*FOLDERS) if path.endswith(FILES) and "/cpu/" not in path]
        for side, choices in (("vLLM", OFF), ("patched", {})):
            texts[version, side] = [
                (path.removesuffix(".py").replace("/", "."), text_of(tree, path, **choices)) for path in paths
            ]
    each_text = dict.fromkeys(chain.from_iterable(texts.values()))
    known = {each: f"{number} {each[0]}" for number, each in enumerate(each_text)}
    sides = {named: {name: text} for (name, text), named in known.items()}
    found = sample(sides, tmp_path_factory.mktemp("states"), "cpu", "state_bounds_child")
    return {
        side: {kernel: read for each in modules for kernel, read in found[known[each]].items()}
        for side, modules in texts.items()
    }


@pytest.mark.parametrize("version", versions(*FOLDERS, f"{OPS}/mamba/ops/causal_conv1d.py"))
def test_a_request_goes_on_from_its_own_state(version: str, answers: dict[tuple[str, str], Any]) -> None:
    unpatched, patched = answers[version, "vLLM"], answers[version, "patched"]
    kernels = [name for name in unpatched if not name.endswith(WITH_A_CHECK)]
    assert len(kernels) >= 3
    assert patched.keys() == unpatched.keys()
    for name in unpatched:
        foreign = {"1": False, "4": False, "0": name in kernels, "5": True}
        assert unpatched[name] == foreign, name
        assert patched[name] == dict.fromkeys(foreign, False), name
