# SPDX-License-Identifier: Apache-2.0
"""What a recording leaves of vLLM's sampler, by that sampler, and what padding leaves of a draft's candidates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

from vllm.sampling_params import SamplingParams

from vllm_hwplugin.spec_decode.v2.recording import WALKS, SamplerParts, mask_block, recorded_with, sampling_as
from vllm_hwplugin.spec_decode.v2.tail_buffers import Padding
from vllm_hwplugin.versions import SUPPORTED

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


@pytest.mark.parametrize("version", [version for version in SUPPORTED if Version(version) >= Version("0.28.0")])
def test_a_draft_that_walks_through_candidates_is_known_by_what_it_has(vllm_tree: Any, version: str) -> None:
    folder = "vllm/v1/worker/gpu/spec_decode"
    plain, walks = (vllm_tree(version).read(f"{folder}/{name}/speculator.py") for name in ("dflash", "dflash2"))
    assert [sum(f"self.{name} = " in text for name in WALKS) for text in (plain, walks)] == [0, 1]
