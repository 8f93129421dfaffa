# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism with a drafter: vLLM's released model runners, stock and with the guard."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("torch")

import torch

from tests.spec_decode.released import take, text_of
from vllm_hwplugin.patching import SUPPORTED

from ..conftest import versions

V1, V2 = "vllm/v1/worker/gpu_model_runner.py", "vllm/v1/worker/gpu/model_runner.py"
ON_V1, ON_V2 = SUPPORTED[: SUPPORTED.index("0.31.0")], SUPPORTED[: SUPPORTED.index("0.30.0")]
BOTH = [(version, V1) for version in ON_V1] + [(version, V2) for version in ON_V2]
OFF = {"VLLM_HWPLUGIN_BACKPORT_PIPELINE_DRAFTS": "off"}
K, ROWS, DRAFTS = 3, [2, 0], [[11, 12, 13], [21, 22, 23]]
BASES = {
    name: type(name, (), {})
    for name in ("LoRAModelRunnerMixin", "KVConnectorModelRunnerMixin", "ECConnectorModelRunnerMixin")
}
# It drafts by another name.
OTHERS = {"VLLM_HWPLUGIN_V2_TAIL_GRAPH": "off"}


def drafts_after_a_step(text: str, *, last: bool) -> list[list[int]]:
    """What a stage's next step reads as the drafts of two requests, once `sample_tokens` has run."""
    sampled = (SimpleNamespace(sampled_token_ids=torch.tensor([[5], [6]])), torch.ones(2), torch.zeros(2))
    runner_class = take(
        text,
        "GPUModelRunner",
        {"sample_tokens"},
        given=BASES
        | {
            "torch": torch,
            "step_eplb_after": lambda: lambda method: method,
            "ModelRunnerOutput": MagicMock(),
            "AsyncOutput": MagicMock(),
            "pcp": SimpleNamespace(maybe_restore_pcp_for_sampling=lambda manager, states, batch: (states, batch)),
            "pp_receive": lambda *_, **__: (sampled[0].sampled_token_ids, *sampled[1:]),
            "pp_broadcast": lambda *_: None,
            "use_workspace_lane": lambda *_: contextlib.nullcontext(),
        },
    )
    runner = MagicMock()
    runner.is_last_pp_rank, runner.use_pp, runner.num_speculative_steps = last, True, K
    runner.speculator = SimpleNamespace(supports_mm_inputs=False, propose=lambda *_, **__: torch.tensor(DRAFTS))
    runner.speculator = runner.speculator if last else None
    runner.adaptive_verification = None
    runner.sample.return_value = sampled
    runner.req_states.draft_tokens = torch.zeros(4, K, dtype=torch.int64)
    runner.execute_model_state.input_batch.idx_mapping = torch.tensor(ROWS)
    runner_class.sample_tokens(runner, None)
    drafts: list[list[int]] = runner.req_states.draft_tokens[ROWS].tolist()
    return drafts


@pytest.mark.parametrize("version", versions(V2, among=ON_V2))
def test_the_first_stage_of_model_runner_v2_does_not_get_the_drafts(
    version: str, vllm_tree: Callable[[str], Any]
) -> None:
    text = text_of(vllm_tree(version), V2, **OFF, **OTHERS)
    assert drafts_after_a_step(text, last=True) == DRAFTS
    assert drafts_after_a_step(text, last=False) == [[0] * K, [0] * K]


@pytest.mark.parametrize("version", versions(V1, among=ON_V1))
def test_the_v1_runners_first_stage_looks_for_a_drafter(version: str, vllm_tree: Callable[[str], Any]) -> None:
    runner_class = take(
        text_of(vllm_tree(version), V1, **OFF), "GPUModelRunner", {"initialize_metadata_builders"}, given=BASES
    )
    runner = runner_class()
    runner.attn_groups, runner.calculate_reorder_batch_threshold = [], lambda: None
    runner.jit_warmup_registry = MagicMock()
    runner.speculative_config = SimpleNamespace(use_eagle=lambda: True, uses_draft_model=lambda: False)
    config = SimpleNamespace(kv_cache_groups=[])
    with pytest.raises(AttributeError, match="drafter"):
        runner.initialize_metadata_builders(config, [])


@pytest.mark.parametrize("version", versions(V1, among=ON_V1))
def test_so_does_it_when_it_makes_attention_metadata_for_any_method(
    version: str, vllm_tree: Callable[[str], Any]
) -> None:
    tree = ast.parse(text_of(vllm_tree(version), V1, **OFF))
    (method,) = (node for node in ast.walk(tree) if getattr(node, "name", None) == "_build_attention_metadata")
    of_the_drafter = [
        node
        for node in ast.walk(method)
        if isinstance(node, ast.If) and "spec_decode_common_attn_metadata is None" in ast.unparse(node.test)
    ]
    runner = SimpleNamespace(speculative_config=SimpleNamespace(method="ngram"))
    namespace = {"self": runner, "spec_decode_common_attn_metadata": None}
    module = ast.fix_missing_locations(ast.Module(of_the_drafter, []))
    with pytest.raises(AttributeError, match="drafter"):
        exec(compile(module, "released _build_attention_metadata", "exec"), namespace)
    # Without speculative decoding nothing is looked for.
    runner.speculative_config = None
    exec(compile(module, "released _build_attention_metadata", "exec"), namespace)


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
    spec = None if method is None else SimpleNamespace(method=method, num_speculative_tokens=K)
    if spec is not None:
        for kind in ("use_ngram_gpu", "uses_draft_model", "use_dflash", "use_eagle", "uses_extract_hidden_states"):
            setattr(spec, kind, lambda: False)
        for kind in ("use_gemma4_mtp", "use_step3p5_mtp"):
            setattr(spec, kind, lambda: False)
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
