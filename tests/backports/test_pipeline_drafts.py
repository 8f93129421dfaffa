# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism with a drafter: vLLM's released model runners, stock and with the guard."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")


from tests.released import text_of
from vllm_hwplugin.base.versions import SUPPORTED

V1, V2 = "vllm/v1/worker/gpu_model_runner.py", "vllm/v1/worker/gpu/model_runner.py"
ON_V1, ON_V2 = SUPPORTED[: SUPPORTED.index("0.31.0")], SUPPORTED[: SUPPORTED.index("0.30.0")]
BOTH = [(version, V1) for version in ON_V1] + [(version, V2) for version in ON_V2]
OFF = {"VLLM_HWPLUGIN_BACKPORT_PIPELINE_DRAFTS": "off"}


def start_of(text: str, stages: int, method: str | None) -> list[str]:
    """What a runner's `__init__` makes, from what comes before its drafter on."""
    runner = next(node for node in ast.parse(text).body if getattr(node, "name", None) == "GPUModelRunner")
    init = next(node for node in runner.body if getattr(node, "name", None) == "__init__")
    names = [ast.unparse(node) for node in init.body]
    end = next(i for i, name in enumerate(names) if "init_speculator" in name or "self.drafter" in name)
    start = next((i for i, name in enumerate(names) if "pipeline_drafts" in name), end)
    (made,) = ast.parse("def start(self): pass").body
    assert isinstance(made, ast.FunctionDef)
    made.body = init.body[start : end + 1]
    kinds = ("ngram_gpu", "dflash", "eagle", "gemma4_mtp", "step3p5_mtp")
    asked = [*(f"use_{kind}" for kind in kinds), "uses_draft_model", "uses_extract_hidden_states"]
    spec = method and SimpleNamespace(method=method, num_speculative_tokens=3, **dict.fromkeys(asked, lambda: False))
    config = SimpleNamespace(speculative_config=spec, parallel_config=SimpleNamespace(pipeline_parallel_size=stages))
    found: list[str] = []
    namespace = {
        "init_speculator": lambda *_: found.append("speculator"),
        "get_pp_group": lambda: SimpleNamespace(is_last_rank=True, world_size=stages),
    }
    exec(compile(ast.fix_missing_locations(ast.Module([made], [])), "released __init__", "exec"), namespace)
    self = SimpleNamespace(
        vllm_config=config, speculative_config=spec, is_last_pp_rank=True, use_pp=stages > 1, device="cpu"
    )
    try:
        namespace["start"](self)  # type: ignore[operator]
    except ValueError as error:
        if "pipeline_parallel_size" in str(error):
            raise
        # A method that the V1 runner does not know.
        found.append("drafter")
    return found


@pytest.mark.parametrize(("version", "path"), BOTH)
def test_such_an_engine_is_refused_before_its_drafter_is_made(
    version: str, path: str, vllm_tree: Callable[[str], Any]
) -> None:
    stock, patched = (text_of(vllm_tree(version), path, **choices) for choices in (OFF, {}))
    assert start_of(stock, 2, "unknown") == start_of(patched, 1, "unknown") != []
    assert start_of(patched, 2, None) == []
    with pytest.raises(ValueError, match=r"pipeline_parallel_size=2.*'unknown'.*BACKPORT_PIPELINE_DRAFTS=off"):
        start_of(patched, 2, "unknown")


def test_vllm_0_30_drafts_in_a_pipeline(vllm_tree: Callable[[str], Any]) -> None:
    assert start_of(text_of(vllm_tree("0.30.0"), V2), 2, "unknown") == ["speculator"]
