# SPDX-License-Identifier: Apache-2.0
"""Which batches the tail graphs serve. That the graphs compute what vLLM does is shown on the simulated device."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.spec_decode.decode_batch import MAX_NUM_REQS, uniform_shape
from vllm_hwplugin.spec_decode.step_counts import Reason
from vllm_hwplugin.spec_decode.v2.recording import (
    SamplerParts,
    decode_query_len,
    row_shapes,
    rungs,
    scheduled_query_lens,
)
from vllm_hwplugin.spec_decode.v2.tail_buffers import LogitsRows, TailBuffers

from ...conftest import versions
from ...released import text_of

sampling_params = pytest.importorskip("vllm.sampling_params")
SamplingParams = sampling_params.SamplingParams
SINCE_24 = SUPPORTED[SUPPORTED.index("0.24.0") :]


#: Of requests that graphs sample for.
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
]


class Decisions:
    """What the `SamplingStates` of a released vLLM decide on the host for a batch."""

    def __init__(self, module: Any, monkeypatch: pytest.MonkeyPatch):
        self.states = module.SamplingStates(1 + len(PARAMS), 100)
        self._temperature: list[bool] = []
        self._narrowed: list[tuple[bool, ...]] = []

        def apply_top_k_top_p(logits: Any, k: Any, p: Any, **more: bool) -> Any:
            self._narrowed.append((k is not None, p is not None, *more.values()))
            return logits

        monkeypatch.setattr(module, "apply_top_k_top_p", apply_top_k_top_p)
        monkeypatch.setattr(module, "apply_temperature", lambda *_: self._temperature.append(True))
        # From 0.28 on it says whether the sampler has anything to do.
        self._processed = [self.states.add_request(row, SamplingParams(**params)) for row, params in enumerate(PARAMS)]
        self._processed.append(None)

    def of(self, rows: np.ndarray) -> tuple[Any, ...]:
        """For a batch of these rows: top-k, top-p, more of them, whether there is anything at all, and temperature."""
        self._temperature.clear()
        self._narrowed.clear()
        logits, expanded = torch.zeros(len(rows), 100), torch.from_numpy(rows)
        self.states.apply_temperature(logits, expanded, rows)
        self.states.apply_top_k_top_p(logits, expanded, rows)
        processed = any(self._processed[row] for row in rows)
        # It changes nothing of a temperature of 0 or 1.
        return *self._narrowed, processed, bool(self._temperature or self._narrowed)

    def recorded(self, needed: SamplerParts) -> tuple[Any, ...]:
        """By the row that a graph is recorded with."""
        row = len(PARAMS)
        self._processed[row] = self.states.add_request(row, SamplingParams(**needed.example()))
        return self.of(np.array([row]))


@pytest.mark.parametrize("version", versions("vllm/v1/worker/gpu/", "vllm/v1/sample/", among=SINCE_24))
def test_a_graph_holds_what_vllm_launches_for_the_batch(
    version: str, vllm_tree: Callable[..., Any], modules: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that vLLM leaves out, or adds, by what it finds on the host would be left out or added for ever."""
    decisions = Decisions(modules(version)("sample.states"), monkeypatch)
    (apply,) = (
        one
        for one in ast.walk(ast.parse(text_of(vllm_tree(version), "vllm/v1/sample/ops/topk_topp_sampler.py")))
        if isinstance(one, ast.FunctionDef) and one.name == "apply_top_k_top_p"
    )
    # By which the running one is asked.
    apart = "has_topp_only_rows" in {argument.arg for argument in apply.args.args}
    left = []
    for pair in itertools.combinations_with_replacement(range(len(PARAMS)), 2):
        rows = np.array(pair)
        needed = SamplerParts.of(decisions.states, rows, top_p_apart=apart)
        if needed is None:
            left.append(pair)
        else:
            assert decisions.of(rows) == decisions.recorded(needed), [PARAMS[row] for row in pair]
    # A request with top-p beside one with top-k.
    assert apart == (version >= "0.30")
    assert left == ([(4, 5), (5, 6)] if apart else [])


def test_shapes_are_those_in_which_the_target_decodes_in_one_graph() -> None:
    # One request less a token, a mixed batch, and one that is too large.
    most = MAX_NUM_REQS
    graphs = [(1, 4), (2, 4), (2, 3), (8, None), (None, None), (most, 4), (most + 8, 4)]
    assert rungs(graphs, [4] * most) == [uniform_shape(4, most), uniform_shape(4, 2), uniform_shape(4, 1)]


def test_a_number_of_drafts_has_graphs_of_the_batches_that_it_is_for() -> None:
    """And no number has one of 0 drafts: vLLM has another sampler then."""
    runner = SimpleNamespace(max_num_reqs=MAX_NUM_REQS + 16, decode_query_len=5, speculative_config=SimpleNamespace())
    assert scheduled_query_lens(runner) == [5] * MAX_NUM_REQS
    runner.speculative_config.num_speculative_tokens = 4
    runner.speculative_config.num_speculative_tokens_per_batch_size = [[1, 2, 9], [3, 4, 2], [6, 7, 1], [8, 8, 0]]
    lens = scheduled_query_lens(runner)
    assert lens == [5, 5, 3, 3, 3, 2, 2] + [0] * (MAX_NUM_REQS - 7)
    graphs = [(size, width) for width in (1, 2, 3, 5) for size in (1, 2, 4, 6, 8, 16)]
    assert rungs(graphs, lens) == [uniform_shape(*one) for one in ((3, 6), (2, 8), (2, 6), (3, 4), (5, 2), (5, 1))]


def test_an_engine_without_drafts_has_graphs_of_one_token_a_request() -> None:
    runner = SimpleNamespace(max_num_reqs=3, decode_query_len=1, speculative_config=None)
    lens = scheduled_query_lens(runner)
    assert rungs([(1, 1), (2, 1), (4, 1), (8, 1), (4, None)], lens) == [uniform_shape(1, one) for one in (4, 2, 1)]


def test_only_batches_of_decodes_with_equally_many_drafts_are_served() -> None:
    def found(*tokens: int, prompt: bool = False) -> int | Reason:
        batch = SimpleNamespace(
            num_reqs=len(tokens),
            num_tokens=sum(tokens),
            num_draft_tokens=sum(tokens) - len(tokens),
            num_scheduled_tokens=np.array(tokens),
            is_prefilling_np=np.array([prompt]),
        )
        return decode_query_len(batch, {4, 3})

    assert (found(4, 4), found(3, 3), found(2, 2)) == (4, 3, Reason.FEWER_DRAFTS)
    # As many tokens as two requests with two drafts each.
    assert found(4, 2) is Reason.FEWER_DRAFTS
    assert found(4, 4, prompt=True) is Reason.PROMPT


def test_where_the_device_has_the_counts_of_drafts_a_graph_holds_rows_of_any_request() -> None:
    def found(most_reqs: int, query_len: int, vocab_size: int) -> list[tuple[int, int]]:
        sampler = SimpleNamespace(sampling_states=SimpleNamespace(vocab_size=vocab_size))
        runner = SimpleNamespace(max_num_reqs=most_reqs, decode_query_len=query_len, sampler=sampler)
        return [(shape.num_tokens, shape.num_reqs) for shape in row_shapes(runner)]

    # The last one has no drafts. A batch with a draft has more rows than requests.
    assert found(6, 4, 1000) == [(24, 6), (16, 6), (8, 6), (6, 6)]
    # As many as are sampled at a time.
    several = [(size, size - less) for size in (256, 128, 64, 32, 16, 8) for less in (0, 1)]
    assert found(300, 8, 151_936) == [(512, 256), (384, 256), *several]


@pytest.mark.parametrize("gathered", [False, True])
def test_their_rows_are_copied_on_the_device(gathered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    moving = SimpleNamespace(np=np.array([1, 2, 3], dtype=np.int32), gpu=torch.zeros(3, dtype=torch.int32))
    states = SimpleNamespace(**dict.fromkeys(("temperature", "top_k", "top_p", "seeds"), moving))
    runner = SimpleNamespace(
        device="cpu",
        sampler=SimpleNamespace(sampling_states=states),
        req_states=SimpleNamespace(prefill_len=moving),
    )
    buffers = TailBuffers(runner, 3, 4, torch.int32, 16)
    batch = SimpleNamespace(
        cu_num_logits=torch.tensor([0, 3, 5]),
        expanded_idx_mapping=torch.tensor([7, 7, 7, 2, 2]),
        expanded_local_pos=torch.tensor([0, 1, 2, 0, 1]),
        logits_indices=torch.tensor([4, 5, 6, 0, 1]),
    )
    buffers.write(np.array([7, 2]), 9, 2, LogitsRows(batch, gathered, num_logits=None))
    # Padding has no rows, and the others belong to no request.
    assert buffers.cu_num_logits.tolist() == [0, 3, 5, 5]
    assert buffers.idx_mapping_alive(3).tolist() == [7, 2, -1]
    assert buffers.expanded_idx_mapping.tolist() == [7, 7, 7, 2, 2, *[9] * 7]
    assert buffers.local_pos[:6].tolist() == [0, 1, 2, 0, 1, 0]
    assert buffers.logits_indices[:6].tolist() == [4, 5, 6, 0, 1, 0]
    assert buffers.hidden_rows[:6].tolist() == ([0, 1, 2, 3, 4, 0] if gathered else [4, 5, 6, 0, 1, 0])
