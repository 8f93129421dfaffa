# SPDX-License-Identifier: Apache-2.0
"""The backport for top-k and top-p: vLLM's released kernels, stock and patched; fewer of them leave the same tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
from triton import knobs
from triton.runtime import JITFunction, driver

from vllm_hwplugin.base.versions import SUPPORTED

from ..conftest import versions
from ..released import take, text_of
from .samplers import TOP_K_TOP_P, sample, texts_of
from .test_sampled_tokens import Hopper
from .top_k_top_p_child import VOCABULARY, OnCuda, modules_of

#: The interpreter takes seconds for a kernel.
pytestmark = pytest.mark.slow

BEFORE_32 = SUPPORTED[: SUPPORTED.index("0.32.0")]
SPLITTING = SUPPORTED[SUPPORTED.index("0.30.0") : SUPPORTED.index("0.33.0")]


@pytest.mark.parametrize("version", versions("vllm/v1/sample/ops/topk_topp_triton.py", among=BEFORE_32))
def test_no_kernel_is_compiled_anew_because_16_divides_a_number(
    version: str, vllm_tree: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: defaultdict[str, set[str]] = defaultdict(set)

    def compile_nothing(*, key: str, fn: Any, **_: Any) -> bool:
        asked[fn.jit_function.__name__].add(key)
        return True

    launch = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *args, **options: launch(*args, **{**options, "warmup": True}))
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", compile_nothing)
    monkeypatch.setattr(driver, "_active", Hopper())
    splits = version in SPLITTING
    compiled = {}
    for side, texts in texts_of(vllm_tree(version), TOP_K_TOP_P).items():
        apply = modules_of(texts)(TOP_K_TOP_P[0]).apply_top_k_top_p_triton
        asked.clear()
        # Before there are kernels that split rows, vLLM sorts fewer than 8.
        for rows in (*((33, 48) if splits else (8, 16)), 72, 80, 100, 256):
            logits = torch.zeros(rows, 100)
            k, p = torch.full((rows,), 20, dtype=torch.int32), torch.full((rows,), 0.9)
            for given in ((k, None), (None, p), (k, p)):
                apply(logits.as_subclass(OnCuda) if splits else logits, *given)
        compiled[side] = [len(asked[name]) for name in ("_topk_topp_kernel", "_topp_sb_step_kernel")]
    # From 0.30 on that for both is another one up to 64 rows, and top-p has five steps, each with its number.
    assert compiled == ({"stock": [8, 6], "patched": [4, 4]} if splits else {"stock": [6, 0], "patched": [3, 0]})


@pytest.fixture(scope="module")
def left(vllm_tree: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What top-k and top-p leave, by version and side."""
    sides = {
        f"{version} {side}": texts
        for version in SPLITTING
        for side, texts in texts_of(vllm_tree(version), TOP_K_TOP_P).items()
    }
    return sample(sides, tmp_path_factory.mktemp("top-k and top-p"), "cpu", "top_k_top_p_child")


@pytest.mark.parametrize("version", SPLITTING)
def test_kernels_that_split_rows_are_launched_where_a_row_needs_them(version: str, left: dict[str, Any]) -> None:
    stock, patched = left[f"{version} stock"], left[f"{version} patched"]
    for name, found in patched.items():
        alone = name.startswith("top-p alone")
        assert (stock[name]["split"], found["split"]) == ((0, 0) if name == "top-k alone" else (7, 7 if alone else 0))
        assert {**found, "split": 0} == {**stock[name], "split": 0}, name
    assert patched["both"]["kept"] == [13, 1, 40, 1]
    assert patched["top-p alone beside top-k"]["kept"][1:3] == [2, VOCABULARY]


@pytest.mark.parametrize("version", SPLITTING)
def test_a_step_without_drafts_says_it_too(version: str, vllm_tree: Callable[[str], Any]) -> None:
    said = []

    def apply_top_k_top_p(logits: Any, k: Any, p: Any, has_topp_only_rows: bool = True) -> Any:
        said.append(has_topp_only_rows)
        return logits

    tree = vllm_tree(version)
    text = text_of(tree, "vllm/v1/worker/gpu/sample/states.py")
    states = take(text, "SamplingStates", ("has_topp_only_rows",), given={"np": np})
    given = {"apply_top_k_top_p": apply_top_k_top_p, "gumbel_sample": lambda *_, **__: None}
    sample = take(text_of(tree, "vllm/v1/worker/gpu/sample/sampler.py"), "Sampler", ("_sample_random",), given=given)
    own = SimpleNamespace(
        top_k=SimpleNamespace(np=np.array([20, 100])),
        top_p=SimpleNamespace(np=np.array([0.9, 0.9])),
        temperature=SimpleNamespace(gpu=None),
        seeds=SimpleNamespace(gpu=None),
    )
    own.has_topp_only_rows = states.has_topp_only_rows.__get__(own)
    sampler = SimpleNamespace(sampling_states=own, use_fp64_gumbel=False)
    # Kernels take a top-k of all that a row has, or more, for none.
    for rows, width in (([0], 100), ([1], 100), ([0, 1], 100), ([0], 20)):
        sample._sample_random(sampler, torch.zeros(len(rows), width), None, np.array(rows), None, None, None, False)
    assert said == [False, True, True, True]
