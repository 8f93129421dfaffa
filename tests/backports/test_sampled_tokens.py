# SPDX-License-Identifier: Apache-2.0
"""Backports in the rejection samplers: vLLM's released kernels, stock and patched, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

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


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels that were compiled for a GPU where they would have been launched."""
    names: set[str] = set()
    launch = JITFunction.run

    def run(self: Any, *args: Any, **options: Any) -> Any:
        kernel = launch(self, *args, **{**options, "warmup": True})
        assert kernel.asm["cubin"]
        names.add(self.__name__)
        return kernel

    monkeypatch.setattr(JITFunction, "run", run)
    # Its own way back asks for a GPU's driver.
    monkeypatch.setattr(driver, "_active", Hopper())
    return names


def test_the_samplers_compile_for_a_gpu(vllm_tree: Callable[[str], Any], compiled: set[str]) -> None:
    """As `tests/gpu/test_sampled_tokens.py` runs them; the interpreter takes names and types that no compiler does."""
    from . import samplers_child

    seen = []
    for version in BEFORE_28:
        texts = texts_of(vllm_tree(version))["patched"]
        if texts in seen:
            continue
        seen.append(texts)
        modules = samplers_child.modules_of(texts)
        compiled.clear()
        samplers_child.recovered(modules, [float("nan")] * 5)
        assert compiled == {"sample_recovered_tokens_kernel"}, version
        for sampler in (name for name in texts if name.endswith("rejection_sampler_utils")):
            compiled.clear()
            samplers_child.in_vocabulary(modules, sampler, [0, 1], float("nan"))
            assert len(compiled) == 4, version


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
