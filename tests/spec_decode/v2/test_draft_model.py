# SPDX-License-Identifier: Apache-2.0
"""Drafting by a model of its own in one graph: the released speculators, recorded and stock, on the same batches."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch

from vllm_hwplugin.base.versions import Versions
from vllm_hwplugin.spec_decode.v2 import recording
from vllm_hwplugin.spec_decode.v2.tail_buffers import Padding

from ...conftest import versions
from .released_modules import Graph, ReleasedModules, by_the_host, capture
from .speculators import DEVICE, HIDDEN, LAYER, MAX_LEN, MAX_REQS, MAX_TOKENS, VOCAB, Draft, Runner, Views, config

K = 3
WIDTH = K + 1
STOCK = {"VLLM_HWPLUGIN_V2_TAIL_GRAPH": "off"}
#: Rows of the runner's state, lengths with the tokens that were verified, rejected ones. A graph has four requests.
BATCHES = [
    ([2, 0, 5], [21, 30, 41], [0, 1, 3]),
    ([5, 3, 0, 1], [39, 12, 32, 50], [0, 2, 3, 1]),
    ([6], [MAX_LEN - 1], [0]),
    ([3, 2], [MAX_LEN, 23], [0, 2]),
]
FREE_ROW = 7


class Alone(Draft):
    """A draft model that gets nothing of the target's. A pass may have several tokens of a request."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        last, _ = super().forward(input_ids, positions, torch.zeros(len(input_ids), HIDDEN))
        return last

    def attend(self, metadata: Any) -> torch.Tensor:
        starts, tokens = metadata.starts, torch.arange(metadata.slots.shape[0], dtype=torch.int32)
        request = (torch.searchsorted(starts, tokens, right=True) - 1).clamp(max=len(starts) - 2)
        # A token sees what is before it, and itself.
        seen = metadata.lengths[request] - (starts[1:][request] - 1 - tokens)
        return super().attend(types.SimpleNamespace(lengths=seen, block_table=metadata.block_table[request]))


class Starts(Views):
    """Its metadata says where each request's tokens begin, too."""

    supports_update_block_table = False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        made.starts = common_attn_metadata.query_start_loc
        return made


class Drafting:
    """A speculator, and the tensors of a batch that stay where they are."""

    def __init__(self, modules: ReleasedModules, version: str) -> None:
        kind, cls = (
            ("draft_model", "PlainDraftModelSpeculator")
            if version.startswith("0.31")
            else ("standalone_ar", "StandaloneARSpeculator")
        )
        module, self.model = modules(f"spec_decode.{kind}.speculator"), Alone()
        module.set_forward_context = self.model.in_context
        self.speculator = getattr(module, cls)(config(K), DEVICE)
        self.tables = Runner.block_tables_of(modules)
        build = self.speculator._build_attn_metadata

        def on_the_host(*given: Any, **named: Any) -> Any:
            with by_the_host():
                return build(*given, **named)

        builder = Starts()
        group = types.SimpleNamespace(
            get_metadata_builder=lambda ubatch: builder,
            # From 0.32 on.
            build_metadata=lambda common, ubatch: builder.build(0, common),
            layer_names=[LAYER],
        )
        vars(self.speculator).update(
            model=self.model,
            # Its metadata names the batch's tensors, and everything else in it is the host's.
            _build_attn_metadata=on_the_host,
            kv_cache_config=types.SimpleNamespace(kv_cache_groups=[types.SimpleNamespace(layer_names=[LAYER])]),
            attn_groups=[[group]],
            block_tables=self.tables,
            expanded_slot_mappings=torch.zeros(1, MAX_TOKENS + MAX_REQS, dtype=torch.int64),
        )
        tables = self.tables.block_tables[0].gpu
        tables.copy_(1 + torch.arange(tables.numel(), dtype=torch.int32).view_as(tables).flip(1))
        self.tables.num_blocks.np[:] = tables.shape[1]
        self.tables.num_blocks.copy_to_uva()
        self.rows = torch.zeros(MAX_REQS, dtype=torch.int64)
        self.lengths, self.rejected = (torch.zeros(MAX_REQS, dtype=torch.int32) for _ in range(2))
        self.tokens = torch.zeros(MAX_TOKENS, dtype=torch.int32)
        self.positions = torch.zeros(MAX_TOKENS, dtype=torch.int64)

    def write(self, states: list[int], lengths: list[int], rejected: list[int], size: int) -> None:
        """What a step's inputs and sampling leave of a batch; what they leave of padding is a request's that left."""
        count = len(states)
        self.rows[:count], self.rows[count:size] = torch.tensor(states), FREE_ROW
        self.lengths[:count], self.lengths[count:size] = torch.tensor(lengths), 0
        self.rejected[:count], self.rejected[count:size] = torch.tensor(rejected), K
        self.tokens.copy_(torch.arange(MAX_TOKENS) * 7 % VOCAB)
        places = [torch.arange(length - WIDTH, length) for length in [*lengths, *[9] * (size - count)]]
        self.positions[: size * WIDTH] = torch.cat(places)
        self.tables.gather_block_tables(self.rows[:size], size)

    def propose(self, size: int) -> torch.Tensor:
        starts = np.arange(size + 1, dtype=np.int32) * WIDTH
        batch = types.SimpleNamespace(
            num_reqs=size,
            num_tokens=size * WIDTH,
            seq_lens=self.lengths[:size],
            seq_lens_cpu_upper_bound=torch.full((size,), MAX_LEN, dtype=torch.int32),
            idx_mapping=self.rows[:size],
            query_start_loc=torch.from_numpy(starts),
            query_start_loc_np=starts,
            input_ids=self.tokens[: size * WIDTH],
            positions=self.positions[: size * WIDTH],
        )
        return self.speculator.propose(
            batch,
            {},
            {},
            None,
            None,
            WIDTH - self.rejected[:size],
            self.rejected[:size],
            torch.arange(MAX_REQS)[:, None] + 20,
            None,
            torch.zeros(MAX_REQS),
            torch.zeros(MAX_REQS, dtype=torch.int64),
            is_profile=True,
        )


class Padded:
    """`Padding` of a graph, which says for each batch which of its requests there are."""

    def __init__(self, size: int) -> None:
        self.size, starts = size, [torch.zeros(size + 1, dtype=torch.int32) for _ in range(2)]
        dead = torch.zeros(size * WIDTH, dtype=torch.bool)
        self.given = Padding(torch.ones(size, dtype=torch.int32), *starts, dead)
        self.write(size)

    def write(self, count: int) -> None:
        begin = torch.arange(self.size + 1).clamp(max=count)
        self.given.alive.copy_(torch.arange(self.size) < count)
        self.given.query_start_loc.copy_(begin)
        self.given.block_start_loc.copy_(begin * WIDTH)


def keys(drafting: Drafting) -> torch.Tensor:
    """Without those of tokens that have no slot."""
    return drafting.model.kv[:-1].clone()


@pytest.mark.parametrize("version", versions("vllm/v1/worker/gpu/spec_decode/", among=Versions(">=0.31").supported()))
@torch.inference_mode()
def test_a_replay_drafts_as_vllm_and_padding_writes_nothing(modules, version: str) -> None:
    stock = Drafting(modules(version, **STOCK), version)
    recorded, padding = Drafting(modules(version), version), Padded(4)
    recorded.write([0], [WIDTH], [0], 4)
    graph = Graph()
    before = keys(recorded)
    with recording.recorded_with(padding.given), capture(graph):
        recorded.propose(4)
    # There is no request yet.
    recorded.model.kv[:-1] = before
    for states, lengths, rejected in BATCHES:
        count = len(states)
        stock.write(states, lengths, rejected, count)
        expected = stock.propose(count)
        recorded.write(states, lengths, rejected, 4)
        padding.write(count)
        graph.replay()
        assert recorded.speculator.draft_tokens[:count].equal(expected)
        assert keys(recorded).equal(keys(stock))
        # From none on; each step adds its own.
        assert (recorded.speculator.input_buffers.seq_lens[count:4] == K - 1).all()
