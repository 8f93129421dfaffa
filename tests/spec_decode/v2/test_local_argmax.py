# SPDX-License-Identifier: Apache-2.0
"""vLLM's local argmax: which tokens it picks, and which drafters are left with logits of all words."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

import torch

from vllm_hwplugin.base.versions import SUPPORTED, Versions
from vllm_hwplugin.spec_decode.v2 import local_argmax

from ...conftest import versions
from .test_order_of_calls import OwnWords, Unordered

WORDS = len(OwnWords.targets)


class EagleSpeculator(SimpleNamespace):
    """What is read of vLLM's, with a draft whose own words are few."""

    def __init__(self, draft: type[OwnWords] = OwnWords) -> None:
        super().__init__(
            model=draft("draft", SimpleNamespace()),  # type: ignore[arg-type]
            speculative_config=SimpleNamespace(draft_sample_method="greedy"),
            use_local_argmax_reduction=False,
        )


class DFlash2Speculator(EagleSpeculator):
    pass


class OtherLogits(OwnWords):
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return -super().compute_logits(hidden_states)


class OtherTokens(OwnWords):
    def get_top_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return -super().get_top_tokens(hidden_states)


class NoTopTokens(OwnWords):
    get_top_tokens = None


def changed(path: str, value: object) -> Any:
    *owners, name = path.split(".")
    speculator = owner = EagleSpeculator()
    for part in owners:
        owner = getattr(owner, part)
    setattr(owner, name, value)
    return speculator


def per_rank() -> Any:
    speculator = changed("model.lm_head.tp_size", 2)
    speculator.model.draft_id_to_target_id = None
    return speculator


TAKEN = {"over the drafter's own vocabulary": EagleSpeculator, "per rank": per_rank}


@pytest.mark.parametrize(
    ("make", "decision"),
    [
        *((make, decision) for decision, make in TAKEN.items()),
        (lambda: changed("speculative_config.draft_sample_method", "probabilistic"), "drafts are sampled"),
        (lambda: changed("enable_adaptive_verification", True), "acceptance is estimated"),
        (lambda: changed("use_acceptance_estimator", True), "acceptance is estimated"),
        (lambda: changed("draft_watermarker", object()), "drafts have a watermark"),
        (DFlash2Speculator, "DFlash2Speculator drafts in another way"),
        (lambda: EagleSpeculator(OtherLogits), "OtherLogits has other logits"),
        (lambda: EagleSpeculator(OtherTokens), "OtherTokens has other logits"),
        (lambda: EagleSpeculator(NoTopTokens), "NoTopTokens has no local argmax"),
        (lambda: changed("model.logits_processor.scale", -1.0), "turns the order"),
        (lambda: changed("model.logits_processor.logits_as_input", True), "does not multiply by the head"),
        (lambda: changed("model.logits_processor", torch.nn.Identity()), "does not multiply by the head"),
        (lambda: changed("model.lm_head.num_embeddings", WORDS + 1), "added words"),
        (lambda: changed("model.lm_head.org_vocab_size", WORDS - 1), "added words"),
        (lambda: EagleSpeculator(Unordered), "not in the target's order"),
        (lambda: changed("speculative_config", SimpleNamespace()), "cannot be read: AttributeError"),
    ],
)
def test_which_drafters_pick_among_fewer(make: Callable[[], Any], decision: str, notes: dict[str, str]) -> None:
    speculator = make()
    local_argmax.take_local_argmax(speculator)
    assert decision in notes["draft argmax"]
    assert speculator.use_local_argmax_reduction == (decision in TAKEN)


@pytest.mark.parametrize(
    "speculator",
    [
        None,
        # As that of n-grams.
        SimpleNamespace(),
        # A user's choice, or that of `v2-draft-head`.
        SimpleNamespace(use_local_argmax_reduction=True),
        # Nothing is saved.
        SimpleNamespace(use_local_argmax_reduction=False, model=SimpleNamespace(lm_head=SimpleNamespace(tp_size=1))),
    ],
)
def test_there_is_nothing_to_decide(speculator: Any, notes: dict[str, str]) -> None:
    before = None if speculator is None else dict(vars(speculator))
    local_argmax.take_local_argmax(speculator)
    assert not notes
    assert before is None or vars(speculator) == before


#: The bodies of `compute_logits` whose argmax `LocalArgmaxMixin.get_top_tokens` has.
_LOGITS = "logits = self.logits_processor(self.lm_head, hidden_states)"
_SCATTERED = f"""{_LOGITS}
if self.draft_id_to_target_id is None:
    return logits
base = torch.arange(self.config.draft_vocab_size, device=logits.device)
targets = base + self.draft_id_to_target_id
logits_new = logits.new_full((logits.shape[0], self.config.vocab_size), float('-inf'))
logits_new[:, targets] = logits
return logits_new"""
BODIES = {f"{_LOGITS}\nreturn logits", f"return {_LOGITS.removeprefix('logits = ')}", _SCATTERED}


@pytest.mark.parametrize(
    "version",
    versions("vllm/model_executor/models/", among=[one for one in SUPPORTED if Versions(">=0.26").covers(one)]),
)
def test_released_drafts_have_the_logits_of_their_head(version: str, vllm_tree: Any) -> None:
    tree = vllm_tree(version)
    declared = {
        name: (bases, text)
        for text in map(tree.read, tree.paths("vllm/model_executor/models/"))
        for name, bases in re.findall(r"^class (\w+)\(([^)]*)\)", text, re.MULTILINE)
    }
    # `_EagleLlamaForCausalLMBase` is another name of `LlamaForCausalLM`.
    bases = {
        name: {re.sub("^_Eagle3?|Base$", "", base.strip()) for base in named.split(",")}
        for name, (named, _) in declared.items()
    }
    known = {"LocalArgmaxMixin"}
    while more := {name for name, found in bases.items() if found & known} - known:
        known |= more
    assert known >= {"Eagle3LlamaForCausalLM", "Eagle3DeepseekV2ForCausalLM", "DFlashQwen3ForCausalLM", "Qwen3_5MTP"}
    for name in known & declared.keys():
        (cls,) = (node for node in ast.parse(declared[name][1]).body if getattr(node, "name", "") == name)
        for method in cls.body:
            if isinstance(method, ast.FunctionDef) and method.name == "compute_logits":
                assert without_assertions(method) in BODIES, name


def without_assertions(function: ast.FunctionDef) -> str:
    class Without(ast.NodeTransformer):
        def visit_Assert(self, node: ast.Assert) -> None:
            return None

    return "\n".join(ast.unparse(Without().visit(statement)) for statement in function.body)
