# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM's samplers, stock and patched, as Triton compiles them for the device: on NaN logits, and with
top-k and top-p.

The reads behind a buffer stay within memory of the test, so stock vLLM's fault is seen and does not stop the process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.backports.samplers import TOP_K_TOP_P, sample, texts_of
from vllm_hwplugin.patching._installed import find_installed

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sides = texts_of(find_installed())
    if sides["stock"] == sides["patched"]:
        pytest.skip("this vLLM needs neither backport")
    return sample(sides, Path(tmp_path_factory.mktemp("samplers")), "cuda")


def test_patched_samplers_sample_tokens_of_the_vocabulary(answers: dict[str, Any]) -> None:
    patched = answers["patched"]
    assert all(patched["nan"])
    assert patched["good"] == answers["stock"]["good"] == [2, 8, 0]
    assert patched["logits nan"] == patched["logits 0.0"] == [True, True]


def test_stock_samplers_do_not(answers: dict[str, Any]) -> None:
    stock = answers["stock"]
    assert not all([*stock["nan"], *stock["logits nan"]])


def test_fewer_kernels_of_top_k_and_top_p_leave_the_same_logits(tmp_path: Path) -> None:
    found = sample(texts_of(find_installed(), TOP_K_TOP_P), tmp_path, "cuda", "top_k_top_p_child")
    for name, stock in found["stock"].items():
        assert found["patched"][name]["left"] == stock["left"], name
        assert found["patched"][name]["split"] <= stock["split"]
