# SPDX-License-Identifier: Apache-2.0
"""Structured output after reasoning that ends in the middle of a step, with vLLM's released schedulers and managers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from vllm_hwplugin.base.versions import SUPPORTED

from ..conftest import versions
from .schedulers import make_request, make_scheduler

OFF = {"VLLM_HWPLUGIN_BACKPORT_REASONING_END": "off"}
K, VOCABULARY = 4, 64
THOUGHT, END, OPEN, VALUE, CLOSE, WRONG = 3, 5, 10, 11, 12, 40
FILES = ("vllm/v1/core/", "vllm/v1/structured_output/", "vllm/v1/request.py")
AFFECTED = SUPPORTED[: SUPPORTED.index("0.27.0")]
UNCONSTRAINED = list(range(VOCABULARY))


class Reasoner:
    """vLLM's `ReasoningParser`, for a marker of one token.

    Args:
        whole: whether it looks for the marker in all tokens, as those do that say nothing of streaming.
    """

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole

    def is_reasoning_end(self, tokens: Sequence[int]) -> bool:
        return END in tokens

    def is_reasoning_end_streaming(self, tokens: Sequence[int], delta: Iterable[int]) -> bool:
        return END in (tokens if self.whole else delta)


class Grammar:
    """vLLM's `StructuredOutputGrammar` that knows one sentence."""

    sentence = (OPEN, VALUE, CLOSE)

    def __init__(self) -> None:
        self.state = 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        if tuple(tokens) != self.sentence[self.state : self.state + len(tokens)]:
            return False
        self.state += len(tokens)
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return [one for one, other in zip(tokens, self.sentence[self.state :], strict=False) if one == other]

    def rollback(self, count: int) -> None:
        self.state -= count

    def reset(self) -> None:
        self.state = 0

    def is_terminated(self) -> bool:
        return self.state == len(self.sentence)

    def fill_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        bitmask[index] = 0
        bitmask[index, self.sentence[self.state] // 32] = 1 << self.sentence[self.state] % 32


def make_manager(modules: Any, whole: bool = False) -> Any:
    """vLLM's `StructuredOutputManager`, without a tokenizer."""
    module = modules("vllm.v1.structured_output")
    manager = object.__new__(module.StructuredOutputManager)
    manager.backend = SimpleNamespace(
        allocate_token_bitmask=lambda rows: torch.full((rows, VOCABULARY // 32), -1, dtype=torch.int32)
    )
    manager.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=2),
        speculative_config=SimpleNamespace(num_speculative_tokens=K),
        num_speculative_tokens=K,
        model_config=SimpleNamespace(is_diffusion=False),
    )
    manager._grammar_bitmask, manager._full_mask = None, torch.tensor(-1, dtype=torch.int32)
    manager.fill_bitmask_parallel_threshold, manager.enable_in_reasoning = 128, False
    # 0.20.0 has one for all requests.
    manager.reasoner = Reasoner(whole)
    manager._get_reasoner = lambda request: manager.reasoner
    return manager


def constrained(modules: Any, kind: dict[str, Any], whole: bool = False) -> tuple[Any, Any, Grammar]:
    """A scheduler, and a running request in it that still reasons."""
    params = SamplingParams(max_tokens=32, ignore_eos=True, structured_outputs=StructuredOutputsParams(**kind))
    scheduler = make_scheduler(modules, "eagle3", K)
    scheduler.structured_output_manager = make_manager(modules, whole)
    request = make_request(modules, "one", [1, 2], params)
    # The scheduler looks at its class.
    base = modules("vllm.v1.structured_output.backend_types").StructuredOutputGrammar
    grammar = type("OneSentence", (Grammar, base), {})()
    request.structured_output_request.grammar = grammar
    request.structured_output_request.reasoning_ended = False
    scheduler.add_request(request)
    step(modules, scheduler, [THOUGHT])
    return scheduler, request, grammar


def step(modules: Any, scheduler: Any, sampled: list[int]) -> None:
    output = scheduler.schedule()
    made = modules("vllm.v1.outputs").ModelRunnerOutput(
        req_ids=["one"], req_id_to_index={"one": 0}, sampled_token_ids=[sampled]
    )
    scheduler.update_from_output(output, made)


JSON = {"json": "{}"}
TAG = {"structural_tag": "{}"}


@pytest.mark.parametrize("version", versions(*FILES, among=AFFECTED))
@pytest.mark.parametrize("kind", [JSON, TAG], ids=["json", "tag"])
@pytest.mark.parametrize("whole", [False, True])
def test_the_grammar_is_fed_what_follows_the_marker(
    version: str, kind: dict[str, Any], whole: bool, modules: Callable[..., Any]
) -> None:
    def served(**choices: str) -> tuple[bool, int]:
        """Whether the request lives, and how far the grammar is, after two steps."""
        one = modules(version, **choices)
        scheduler, request, grammar = constrained(one, kind, whole)
        step(one, scheduler, [THOUGHT, END, OPEN, VALUE])
        if not request.is_finished():
            step(one, scheduler, [CLOSE])
        return not request.is_finished(), grammar.state

    if not whole:
        # The marker is looked for in the last token of the step: the rest of the text is not constrained.
        assert served(**OFF) == (True, 0)
    elif not (kind is TAG and version.startswith(("0.25", "0.26"))):
        # The grammar is fed the marker, or later what does not follow from where it is.
        assert served(**OFF) == (False, 0)
    assert served() == (True, 3)


@pytest.mark.parametrize("version", versions(*FILES, among=AFFECTED))
def test_drafts_after_the_marker_are_constrained(version: str, modules: Callable[..., Any]) -> None:
    def rows(drafts: list[int], **choices: str) -> list[list[int]]:
        """The tokens that each position of a step may have."""
        one = modules(version, **choices)
        _, request, grammar = constrained(one, JSON)
        bitmask = make_manager(one).grammar_bitmask({"one": request}, ["one"], {"one": drafts})
        assert grammar.state == 0
        return [[token for token in UNCONSTRAINED if row[token // 32] >> token % 32 & 1] for row in bitmask]

    stock = [UNCONSTRAINED] * (1 + K)
    mended = [UNCONSTRAINED, UNCONSTRAINED, [OPEN], [VALUE], [VALUE]]
    drafts = [THOUGHT, END, OPEN, WRONG]
    assert rows(drafts, **OFF) == (mended if version.startswith(("0.25", "0.26")) else stock)
    assert rows(drafts) == mended
    assert rows([THOUGHT, END, OPEN, -1])[:4] == mended[:4]
    assert rows([THOUGHT] * K) == stock
