# SPDX-License-Identifier: Apache-2.0
"""Backports in the rejection samplers: vLLM's released kernels, stock and patched, in Triton's interpreter."""

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
from vllm_hwplugin.patching import SUPPORTED

V1 = "vllm.v1.sample.rejection_sampler"
V2 = "vllm.v1.worker.gpu.spec_decode"
# The sampler's module, and the one that it takes functions of.
V2_MODULES = (
    f"{V2}.rejection_sampler_utils",
    f"{V2}.probabilistic_rejection_sampler_utils",
    "vllm.v1.worker.gpu.sample.gumbel",
)
BEFORE_24 = SUPPORTED[: SUPPORTED.index("0.24.0")]
BEFORE_28 = SUPPORTED[: SUPPORTED.index("0.28.0")]
OFF = {"VLLM_HWPLUGIN_BACKPORT_RECOVERED_TOKEN": "off", "VLLM_HWPLUGIN_BACKPORT_NAN_LOGITS": "off"}


@pytest.fixture(scope="module")
def answers(vllm_tree: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the samplers do, by version and `stock` or `patched`."""
    texts: dict[str, dict[str, str]] = {}
    sides: dict[str, str] = {}
    for version in BEFORE_28:
        tree = vllm_tree(version)
        names = [*V2_MODULES, *([V1] if version in BEFORE_24 else [])]
        paths = {name: f"{name.replace('.', '/')}.py" for name in names}
        paths = {name: path for name, path in paths.items() if tree.read(path) is not None}
        for side, choices in (("stock", OFF), ("patched", {})):
            found = {
                name: text_of(tree, path, **choices) for name, path in paths.items() if tree.read(path) is not None
            }
            # Some versions have the same text.
            name = next((name for name, others in texts.items() if others == found), f"{version} {side}")
            texts[name] = found
            sides[f"{version} {side}"] = name
    file = tmp_path_factory.mktemp("samplers") / "texts.json"
    file.write_text(json.dumps(texts))
    child = Path(__file__).with_name("samplers_child.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, child, file], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    return {side: answers[name] for side, name in sides.items()}


@pytest.mark.parametrize("version", BEFORE_24)
def test_a_recovered_token_is_in_the_vocabulary(version: str, answers: dict[str, Any]) -> None:
    stock, patched = answers[f"{version} stock"], answers[f"{version} patched"]
    assert not all(stock["nan"])
    assert all(patched["nan"])
    assert patched["good"] == stock["good"] == [2, 8, 0]


@pytest.mark.parametrize("version", BEFORE_28)
def test_nan_logits_sample_a_token_of_the_vocabulary(version: str, answers: dict[str, Any]) -> None:
    stock, patched = answers[f"{version} stock"], answers[f"{version} patched"]
    # In place of the draft, and after it.
    assert stock["logits nan"] == [False, False]
    assert patched["logits nan"] == [True, True]
    assert patched["logits 0.0"] == [True, True]
