# SPDX-License-Identifier: Apache-2.0
"""Backports in the rejection samplers: vLLM's released kernels, stock and patched, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from vllm_hwplugin.base.versions import SUPPORTED

from .samplers import sample, texts_of

#: Triton compiles these kernels, or interprets them.
pytestmark = pytest.mark.slow

BEFORE_24 = SUPPORTED[: SUPPORTED.index("0.24.0")]
BEFORE_28 = SUPPORTED[: SUPPORTED.index("0.28.0")]


@pytest.fixture(scope="module")
def answers(vllm_tree: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the samplers do, by version and `stock` or `patched`."""
    sides = {}
    for version in BEFORE_28:
        for side, texts in texts_of(vllm_tree(version)).items():
            sides[f"{version} {side}"] = texts
    return sample(sides, tmp_path_factory.mktemp("samplers"), "cpu")


class Hopper:
    """Triton's driver of a GPU that is not there."""

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


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
