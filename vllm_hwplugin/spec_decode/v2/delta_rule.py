# SPDX-License-Identifier: Apache-2.0
"""Serve layers with a gated delta rule in graphs of mixed batches (Model Runner V2).

The shapes of vLLM's metadata for these layers follow the batch: how many requests verify drafts, which tokens are
theirs, into how many chunks the prompts are cut. A graph needs shapes that follow only its size. `FixedMetadata` has
such shapes, in tensors of fixed address, which the host fills in each step. vLLM's layer and its kernels are unchanged:
they get the metadata of a batch in which some requests verify drafts and others compute prompts.

| part | shape in a graph of T tokens and R requests | padding |
|---|---|---|
| requests that decode | R requests, at most R × (1 + k) tokens | no tokens, null block |
| prompts | `MOST_PROMPTS` requests and one more, T tokens | no tokens, null block, a state of zeros |
| chunks of prompts | as many as T tokens and these requests can have | a chunk of the one more request |
| blocks of the convolution | likewise | `PAD_SLOT_ID` |

Both parts read their padding tokens from the graph's last row and write them there, so no batch may fill a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID, PAD_SLOT_ID, mamba_get_block_table_tensor

from vllm_hwplugin.spec_decode.v2.methods import put_before
from vllm_hwplugin.spec_decode.v2.tail_buffers import Packed

#: Prompts in a graph. It copies as many states in each layer, 3 MiB each for Qwen3.6-27B.
MOST_PROMPTS: Final = 8

#: Requests that each graph holds, if it has as many tokens.
_LEAST_REQUESTS: Final = 64

#: Tokens of a prompt's chunk (`FLA_CHUNK_SIZE`), and of a block of the convolution (`causal_conv1d_fn`).
_CHUNK: Final = 64
_CONVOLUTION: Final = 8

#: Attribute of a builder: its `FixedBuilder`.
_FIXED: Final = "_hwplugin_fixed"


@dataclass
class FixedMetadata(GDNAttentionMetadata):  # type: ignore[misc]
    """Metadata whose shapes follow only the graph.

    Attributes:
        rows: the rows of requests that decode, and of requests in their prompt, on the device.
    """

    rows: tuple[torch.Tensor, ...] = ()


def most_requests(num_tokens: int, decode_tokens: int) -> int:
    """Return how many requests a graph of `num_tokens` tokens holds.

    `decode_tokens` are the tokens of a request that decodes with all drafts.
    """
    # For a row of padding the recurrent kernel launches a block per head and 32 columns of its state (192 for
    # Qwen3.6-27B), and the convolution's a block per 256 channels. Each exits when it has read the row's length or
    # state index. So a small graph must not have many rows, and a large graph gains more than they cost.
    return max(_LEAST_REQUESTS, num_tokens // decode_tokens)


def attach(builder: Any, num_tokens: int, num_reqs: int, replays: Callable[[], bool]) -> None:
    """Have a `GDNAttentionMetadataBuilder` make fixed metadata for mixed batches' graphs.

    Args:
        num_tokens: of the largest graph.
        num_reqs: of the largest graph.
        replays: whether the target replays such a graph in this step.
    """
    fixed = vars(builder).setdefault(_FIXED, FixedBuilder(builder, num_tokens, num_reqs, replays))
    put_before(builder, "build", fixed.build)
    put_before(builder, "build_for_cudagraph_capture", fixed.build_for_capture)
    put_before(builder, "update_block_table", fixed.update_block_table)


class FixedBuilder:
    """Makes `FixedMetadata` in place of one `GDNAttentionMetadataBuilder`."""

    def __init__(self, builder: Any, num_tokens: int, num_reqs: int, replays: Callable[[], bool]):
        self._builder, self._replays = builder, replays
        self._drafts: int = builder.num_spec
        device = builder.device
        self._packed = Packed(self._parts(num_tokens, num_reqs), device)
        self._decode_states = torch.full((num_reqs, 1 + self._drafts), NULL_BLOCK_ID, dtype=torch.int32, device=device)
        self._prompt_states = torch.full((MOST_PROMPTS + 1,), NULL_BLOCK_ID, dtype=torch.int32, device=device)
        self._accepted = torch.ones(num_reqs, dtype=torch.int32, device=device)
        self._has_state = torch.zeros(MOST_PROMPTS + 1, dtype=torch.bool, device=device)
        # The layer only asks whether it is there.
        self._masks = torch.zeros(num_reqs, dtype=torch.bool, device=device)

    def _parts(self, num_tokens: int, num_reqs: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return each field's shape in a graph, and its type."""
        blocks = num_tokens // _CONVOLUTION + MOST_PROMPTS
        return {
            "spec_query_start_loc": ((num_reqs + 1,), torch.int32),
            "non_spec_query_start_loc": ((MOST_PROMPTS + 2,), torch.int32),
            "chunk_indices": ((2 * (num_tokens // _CHUNK + MOST_PROMPTS),), torch.int32),
            "batch_ptr": ((blocks,), torch.int32),
            "token_chunk_offset_ptr": ((blocks,), torch.int32),
            "spec_token_indx": ((min(num_tokens, num_reqs * (1 + self._drafts)),), torch.int64),
            "non_spec_token_indx": ((num_tokens,), torch.int64),
            "chunk_offsets": ((MOST_PROMPTS + 2,), torch.int64),
            "decode_rows": ((num_reqs,), torch.int64),
            "prompt_rows": ((MOST_PROMPTS + 1,), torch.int64),
        }

    def build(
        self,
        vllms: Callable[..., Any],
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: Any = None,
        num_decode_draft_tokens_cpu: Any = None,
        **settings: Any,
    ) -> Any:
        if not self._replays():
            given = common_attn_metadata, num_accepted_tokens, num_decode_draft_tokens_cpu
            return vllms(common_prefix_len, *given, **settings)
        lengths = common_attn_metadata.query_start_loc_cpu.diff().numpy().astype(np.int64)
        decodes = num_decode_draft_tokens_cpu.numpy() >= 0
        return self._fill(common_attn_metadata, lengths, decodes, num_accepted_tokens)

    def build_for_capture(self, vllms: Callable[..., Any], common_attn_metadata: Any) -> Any:
        batch = common_attn_metadata
        if batch.num_reqs == 1 or batch.max_query_len < batch.num_actual_tokens:
            # Of a decode batch.
            return vllms(batch)
        nothing = np.zeros(batch.num_reqs, dtype=np.int64)
        return self._fill(batch, nothing, nothing > 0, self._accepted)

    def update_block_table(
        self, vllms: Callable[..., Any], metadata: Any, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> Any:
        """Return `metadata` with the states of another KV cache group."""
        if not isinstance(metadata, FixedMetadata):
            return vllms(metadata, blk_table, slot_mapping)
        aligned = getattr(self._builder, "mamba_aligned_state_indices", None)
        return replace(metadata, **self._states(blk_table if aligned is None else aligned, metadata))

    def _fill(self, batch: Any, lengths: np.ndarray, decodes: np.ndarray, accepted: torch.Tensor) -> Any:
        """Fill the fields for a batch.

        Args:
            batch: vLLM's `CommonAttentionMetadata`, padded to the graph.
            lengths: tokens by request.
            decodes: which requests decode.
            accepted: tokens that the last step accepted, by request.
        """
        num_tokens, num_reqs = batch.num_actual_tokens, batch.num_reqs
        decode_rows = np.flatnonzero(decodes & (lengths > 0))
        prompt_rows = np.flatnonzero(~decodes & (lengths > 0))
        assert len(prompt_rows) <= MOST_PROMPTS, f"{len(prompt_rows)} prompts in a graph for {MOST_PROMPTS}"
        prompts = lengths[prompt_rows]
        of_decodes: np.ndarray = np.repeat(decodes, lengths)
        assert len(of_decodes) < num_tokens, f"a batch of {len(of_decodes)} tokens fills the graph"
        chunks, blocks = _cut(prompts, _CHUNK), _cut(prompts, _CONVOLUTION)
        fields = self._upload(
            self._parts(num_tokens, num_reqs),
            {
                "spec_query_start_loc": (_starts(lengths[decode_rows]), None),
                "non_spec_query_start_loc": (_starts(prompts), None),
                "chunk_indices": (chunks.T.ravel(), (MOST_PROMPTS, 0)),
                "batch_ptr": (blocks[0], PAD_SLOT_ID),
                "token_chunk_offset_ptr": (blocks[1], 0),
                "spec_token_indx": (np.flatnonzero(of_decodes), num_tokens - 1),
                "non_spec_token_indx": (np.flatnonzero(~of_decodes), num_tokens - 1),
                "chunk_offsets": (_starts(-(-prompts // _CHUNK)), None),
                "decode_rows": (decode_rows, 0),
                "prompt_rows": (prompt_rows, 0),
            },
        )
        rows = fields.pop("decode_rows")[: len(decode_rows)], fields.pop("prompt_rows")[: len(prompt_rows)]
        self._accepted[len(decode_rows) :] = 1
        self._accepted[: len(decode_rows)] = accepted[rows[0]]
        self._has_state[len(prompt_rows) :] = False
        self._has_state[: len(prompt_rows)] = (batch.compute_num_computed_tokens() > 0)[rows[1]]
        pointers = {name: fields[name] for name in ("batch_ptr", "token_chunk_offset_ptr")}
        metadata = FixedMetadata(
            num_prefills=MOST_PROMPTS,
            num_prefill_tokens=num_tokens,
            num_decodes=0,
            num_decode_tokens=0,
            num_spec_decodes=num_reqs,
            num_spec_decode_tokens=len(fields["spec_token_indx"]),
            num_actual_tokens=num_tokens,
            has_initial_state=self._has_state,
            prefill_has_initial_state=self._has_state,
            spec_sequence_masks=self._masks[:num_reqs],
            num_accepted_tokens=self._accepted[:num_reqs],
            prefill_query_start_loc=fields["non_spec_query_start_loc"],
            # The convolution has as many programs as there are blocks.
            nums_dict={
                _CONVOLUTION: {
                    "tot": len(fields["batch_ptr"]),
                    "mlist": None,
                    "mlist_len": len(fields["batch_ptr"]),
                    "offsetlist": None,
                    **pointers,
                }
            },
            chunk_indices=fields.pop("chunk_indices").view(-1, 2),
            rows=rows,
            **fields,
        )
        return replace(metadata, **self._states(self._block_table(batch), metadata))

    def _block_table(self, batch: Any) -> torch.Tensor:
        """Return the blocks of each request's states, as vLLM's builder finds them."""
        aligned: torch.Tensor | None = getattr(self._builder, "mamba_aligned_state_indices", None)
        if aligned is not None:
            return aligned
        mode = self._builder.vllm_config.cache_config.mamba_cache_mode
        return mamba_get_block_table_tensor(batch.block_table_tensor, batch.seq_lens, self._builder.kv_cache_spec, mode)

    def _states(self, block_table: torch.Tensor, metadata: FixedMetadata) -> dict[str, torch.Tensor]:
        """Return the fields that name blocks of states, filled from `block_table`."""
        decode_rows, prompt_rows = metadata.rows
        self._decode_states[len(decode_rows) :] = NULL_BLOCK_ID
        self._decode_states[: len(decode_rows)] = block_table[decode_rows, : 1 + self._drafts]
        self._prompt_states[len(prompt_rows) :] = NULL_BLOCK_ID
        self._prompt_states[: len(prompt_rows)] = block_table[prompt_rows, 0]
        return {
            "spec_state_indices_tensor": self._decode_states[: metadata.num_spec_decodes],
            "non_spec_state_indices_tensor": self._prompt_states,
            "prefill_state_indices": self._prompt_states,
        }

    def _upload(
        self,
        parts: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        values: Mapping[str, tuple[np.ndarray, int | tuple[int, int] | None]],
    ) -> dict[str, torch.Tensor]:
        """Copy values and padding to the fields, and return the fields.

        Padding None repeats the last value.
        """
        fields = {}
        for name, (own, padding) in values.items():
            ((size,), _), place = parts[name], self._packed.host[name]
            place[: len(own)] = own
            if isinstance(padding, tuple):
                place[len(own) : size].reshape(-1, 2)[:] = padding
            else:
                place[len(own) : size] = own[-1] if padding is None else padding
            fields[name] = self._packed.device[name][:size]
        self._packed.copy()
        return fields


def _starts(lengths: np.ndarray) -> np.ndarray:
    starts: np.ndarray = np.concatenate(([0], np.cumsum(lengths)))
    return starts


def _cut(lengths: np.ndarray, size: int) -> np.ndarray:
    """Return the pieces of all lengths: whose piece it is, and which."""
    counts: np.ndarray = -(-lengths // size)
    owners: np.ndarray = np.repeat(np.arange(len(lengths)), counts)
    pieces: np.ndarray = np.stack((owners, np.arange(len(owners)) - _starts(counts)[owners]))
    return pieces
