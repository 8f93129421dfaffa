# SPDX-License-Identifier: Apache-2.0
"""What a recording leaves of vLLM's sampler, by that sampler, and what padding leaves of a draft's candidates.

And how many tokens later draft passes have, if ranks share the draft's experts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

from vllm.config.compilation import CUDAGraphMode
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_hwplugin.spec_decode.v2 import recording
from vllm_hwplugin.spec_decode.v2.recording import (
    WALKS,
    SamplerParts,
    later_tokens,
    mask_block,
    metadata_of_steps,
    recorded_with,
    sampling_as,
)
from vllm_hwplugin.spec_decode.v2.tail_buffers import Padding

from .samplers import sampler


def test_requests_without_a_seed_are_given_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are drawn one after the other, from numbers that the engine's seed begins."""

    def first(record: bool) -> int:
        np.random.seed(0)
        made = sampler(monkeypatch)
        for needed in SamplerParts if record else ():
            with sampling_as(made, needed):
                assert SamplerParts.of(made.sampling_states, np.array([0])) is needed
        made.add_request(1, SamplingParams(temperature=1.0))
        return int(made.sampling_states.seeds.np[1])

    assert first(record=True) == first(record=False)


@pytest.mark.parametrize(("folder", "kept"), [("dflash", [5, 5, 9, 9]), ("dflash2", [5, 5, -1, -1])])
def test_padding_has_no_candidates_to_keep(folder: str, kept: list[int]) -> None:
    """A draft that walks through candidates passes over rows below 0. Else all of padding would write to one row."""
    module = pytest.importorskip(f"vllm.v1.worker.gpu.spec_decode.{folder}.speculator", exc_type=ImportError)
    cls = {"dflash": "DFlashSpeculator", "dflash2": "DFlash2Speculator"}[folder]
    speculator = object.__new__(getattr(module, cls))
    tokens = 2 * 3
    vars(speculator).update(
        num_speculative_steps=2,
        num_query_per_req=3,
        sample_idx_mapping=torch.tensor([5, 5, 9, 9]),
        input_buffers=SimpleNamespace(query_start_loc=torch.zeros(3), seq_lens=torch.ones(2)),
        block_tables=SimpleNamespace(slot_mappings=torch.zeros(1, tokens, dtype=torch.int64)),
        **({WALKS[-1]: object()} if folder == "dflash2" else {}),
    )
    alive, starts = torch.tensor([1, 0]), torch.tensor([0, 3, 3])
    dead = torch.arange(tokens) >= 3
    with recorded_with(Padding(alive, starts, starts, dead)):
        mask_block(speculator, torch.zeros(1, tokens, dtype=torch.int64))
    assert speculator.sample_idx_mapping.tolist() == kept


def test_a_block_of_all_drafts_is_masked_where_fewer_are_verified() -> None:
    speculator = SimpleNamespace(
        num_query_per_req=3,
        input_buffers=SimpleNamespace(query_start_loc=torch.zeros(3), seq_lens=torch.ones(2)),
        block_tables=SimpleNamespace(slot_mappings=torch.zeros(1, 8, dtype=torch.int64)),
    )
    verified = torch.zeros(1, 8, dtype=torch.int64)
    dead = torch.tensor([False, False, True, True])
    with recorded_with(Padding(torch.tensor([1, 0]), torch.tensor([0, 1, 1]), torch.tensor([0, 2, 2]), dead)):
        mask_block(speculator, verified)
    assert verified.tolist() == [[0, 0, -1, -1, 0, 0, 0, 0]]
    assert speculator.block_tables.slot_mappings.tolist() == [[0, 0, 0, -1, -1, -1, 0, 0]]
    assert speculator.input_buffers.query_start_loc.tolist() == [0, 3, 3]
    assert speculator.input_buffers.seq_lens.tolist() == [1, 0]


@pytest.mark.parametrize("name", ["_build_uniform_attn_metadata", "_build_draft_attn_metadata"])
def test_a_recording_updates_the_metadata_of_the_run_before_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    table = object()

    class Group(SimpleNamespace):
        def map_to_kernel_block_table(self, found: object) -> None:
            assert found is table
            calls.append("mapped")

        def update_draft_decode_metadata(self, metadata: str) -> None:
            calls.append(f"{metadata} updated")

    class Speculator(SimpleNamespace):
        def draft(self) -> str:
            return getattr(self, name)(step=1)

    setattr(Speculator, name, lambda self, step: calls.append("built") or f"metadata {calls.count('built')}")
    speculator = Speculator(
        attn_groups=[[Group(kv_cache_group_id=1)]], block_tables=SimpleNamespace(input_block_tables=[None, table])
    )
    recording = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    for shape in (1, 2):
        with metadata_of_steps(speculator):
            recording = False
            assert speculator.draft() == f"metadata {shape}"
            recording = True
            assert speculator.draft() == f"metadata {shape}"
    # Behind it vLLM builds as before.
    assert speculator.draft() == "metadata 3"
    assert calls == [*("built", "mapped", "metadata 1 updated"), *("built", "mapped", "metadata 2 updated"), "built"]


def graphs_of(*sizes: int) -> Any:
    """vLLM's `CudaGraphManager` with FULL graphs of so many tokens."""

    def dispatch(num_reqs: int, num_tokens: int, uniform: int, num_loras: int) -> BatchExecutionDescriptor:
        size = min((size for size in sizes if size >= num_tokens), default=None)
        if size is None:
            return BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens, num_reqs)
        return BatchExecutionDescriptor(CUDAGraphMode.FULL, size, size // uniform, uniform)

    planned = [BatchExecutionDescriptor(CUDAGraphMode.FULL, 3 * size, size, 3) for size in sizes]
    return SimpleNamespace(dispatch=dispatch, _capture_descs={CUDAGraphMode.FULL: planned})


@pytest.mark.parametrize(
    ("target", "first", "later", "steps", "tokens"),
    [
        ((2, 4), (6, 12), (2, 4), 2, 4),
        ((2, 4), (6, 12), (2, 8), 2, 8),
        # The most requests are three or four, and vLLM pads these to different sizes.
        ((2, 4), (6, 12), (3, 4), 2, 0),
        ((1, 4), (3, 12), (2, 4), 2, 0),
        # vLLM drafts without graphs.
        ((3, 4), (9, 12), (3,), 2, 0),
        ((2, 4), (6,), (2, 4), 2, 0),
        # vLLM pads the first pass further than the target.
        ((2, 4), (6, 15), (2, 4), 2, 0),
        # There is no later pass.
        ((2, 4), (6, 12), (), 1, 4),
    ],
)
def test_the_tokens_of_later_passes_follow_from_the_targets_graph(
    target: tuple[int, ...],
    first: tuple[int, ...],
    later: tuple[int, ...],
    steps: int,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording, "shares_experts", lambda runner: True)
    runner = SimpleNamespace(
        cudagraph_manager=graphs_of(*target),
        speculator=SimpleNamespace(
            prefill_cudagraph_manager=graphs_of(*first),
            decode_cudagraph_manager=graphs_of(*later),
            num_speculative_steps=steps,
        ),
    )
    assert later_tokens(runner, 4, 3) == tokens
