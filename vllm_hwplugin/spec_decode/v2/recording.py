# SPDX-License-Identifier: Apache-2.0
"""How vLLM's own methods are recorded: what they see of a step meanwhile, and which of its requests are padding."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Final

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample import states as sampling_states

from vllm_hwplugin.spec_decode.decode_batch import MAX_NUM_REQS, GraphShape, uniform_shape
from vllm_hwplugin.spec_decode.graph_recording import known_arguments
from vllm_hwplugin.spec_decode.step_counts import Reason
from vllm_hwplugin.spec_decode.v2.tail_buffers import Padding

#: Of the fp32 logits that are sampled at a time, with which the head's own, half as large, are in memory.
_MOST_LOGITS_BYTES: Final = 320 << 20


class SamplerParts(Enum):
    """The parts of vLLM's sampler that a batch needs. vLLM leaves a part out that no request of the batch needs."""

    #: Every temperature is 0 or 1.
    PLAIN = (False, False, False)
    TEMPERATURE = (True, False, False)
    TOP_K = (True, True, False)
    TOP_P = (True, False, True)
    TOP_K_TOP_P = (True, True, True)

    @classmethod
    def of(cls, states: Any, rows: np.ndarray, top_p_apart: bool = False) -> SamplerParts | None:
        """What the requests at `rows` of vLLM's `SamplingStates` need; None where no one request needs all of it.

        With top-k or top-p the temperature is always applied, which changes nothing where it is 0 or 1.

        Args:
            states: of the sampler.
            rows: [number of requests], integers.
            top_p_apart: whether vLLM has kernels of their own for requests with top-p and without top-k, which are
                left out of a batch without such requests.
        """
        temperature = states.temperature.np[rows]
        has_top_k = states.top_k.np[rows] != states.vocab_size
        has_top_p = states.top_p.np[rows] != 1.0
        top_k, top_p = bool(has_top_k.any()), bool(has_top_p.any())
        if top_p_apart and top_k and bool((has_top_p & ~has_top_k).any()):
            return None
        scaled = top_k or top_p or not bool(np.all((temperature == 0.0) | (temperature == 1.0)))
        return cls((scaled, top_k, top_p))

    @property
    def narrows(self) -> bool:
        """Whether tokens are left out by top-k or top-p."""
        return self.value[1] or self.value[2]

    def example(self) -> dict[str, float]:
        """Arguments of `SamplingParams` for a request that needs exactly this."""
        scaled, top_k, top_p = self.value
        return (
            {"temperature": 0.5 if scaled else 0.0}
            | ({"top_k": 2} if top_k else {})
            | ({"top_p": 0.5} if top_p else {})
        )


def scheduled_query_lens(runner: Any) -> list[int]:
    """Tokens of a request in a decode batch, by the batch's number of requests from 1 to `MAX_NUM_REQS` at most.

    They are 1 + num_speculative_tokens, or as vLLM's schedule of numbers of drafts has them. Where this has 0, they are
    0 for no graph: vLLM has another sampler then than for other batches.

    Args:
        runner: a `GPUModelRunner`.
    """
    spec, most = runner.speculative_config, min(runner.max_num_reqs, MAX_NUM_REQS)
    schedule = getattr(spec, "num_speculative_tokens_per_batch_size", None)
    if schedule is None:
        return [runner.decode_query_len] * most
    drafts = build_dynamic_sd_schedule_lookup(schedule, runner.max_num_reqs, spec.num_speculative_tokens)
    return [1 + one if one else 0 for one in drafts[1 : 1 + most]]


def rungs(full_graphs: Collection[tuple[int, int | None]], query_lens: Sequence[int]) -> list[GraphShape]:
    """The shapes to capture, most tokens first: those in which the target decodes in a FULL graph.

    Args:
        full_graphs: (num_reqs, uniform_token_count) of each of the target's FULL graphs.
        query_lens: tokens of a request in a decode batch, by the batch's number of requests from 1 on; 0 for no graph.
    """
    found = set()
    for count, query_len in enumerate(query_lens, 1):
        sizes = [size for size, uniform in full_graphs if uniform == query_len and count <= size <= MAX_NUM_REQS]
        if sizes:
            found.add(uniform_shape(query_len, min(sizes)))
    return sorted(found, key=lambda shape: (shape.num_tokens, shape.num_reqs), reverse=True)


def decode_query_len(batch: Any, known: Container[int]) -> int | Reason:
    """Tokens of each request of vLLM's `InputBatch`, if all decode one token and equally many drafts; else why not.

    Args:
        known: the numbers of tokens that there are graphs for.
    """
    if batch.is_prefilling_np.any():
        return Reason.PROMPT
    query_len = int(batch.num_scheduled_tokens.max())
    full = batch.num_reqs * query_len
    if query_len not in known or batch.num_tokens != full or batch.num_draft_tokens != full - batch.num_reqs:
        return Reason.FEWER_DRAFTS
    return query_len


# vLLM's PAD_SLOT_ID: what is to be written there is not written.
_NO_SLOT: Final = -1

# The padding of the graph that is being recorded: the speculator's patched `propose` has to know of it.
_recorded: Padding | None = None


@contextmanager
def recorded_with(padding: Padding) -> Iterator[None]:
    """While it lasts, a graph with this padding is recorded."""
    global _recorded
    _recorded = padding
    try:
        yield
    finally:
        _recorded = None


@contextmanager
def metadata_of_steps(speculator: Any) -> Iterator[list[Any]]:
    """While it lasts, metadata of draft steps is built by the run before a recording, and the recording updates it.

    For a drafter whose builders may work on the host, which no graph can do, where vLLM can bring what they have built
    up to date (`builders.updated_in_place`). vLLM does that before each step, up to 0.31 but for the first one, for
    which it has built the metadata.

    Yields:
        A list of the metadata that the recording writes to, to be kept with the graph.
    """
    # In 0.28 and 0.29 by the former name.
    name = next(
        name for name in ("_build_uniform_attn_metadata", "_build_draft_attn_metadata") if hasattr(speculator, name)
    )
    build, made = getattr(speculator, name), list[Any]()

    def built_or_updated(*args: Any, **kwargs: Any) -> Any:
        if not torch.cuda.is_current_stream_capturing():
            made[:] = [build(*args, **kwargs)]
            return made[0]
        for group in (group for groups in speculator.attn_groups for group in groups):
            # Blocks of a cache may be larger than those of a kernel. Building maps them, updating does not.
            if hasattr(group, "map_to_kernel_block_table"):
                group.map_to_kernel_block_table(speculator.block_tables.input_block_tables[group.kv_cache_group_id])
            group.update_draft_decode_metadata(made[0])
        return made[0]

    setattr(speculator, name, built_or_updated)
    try:
        yield made
    finally:
        delattr(speculator, name)


def mask_decode(speculator: Any) -> None:
    """Keep padding out of the KV cache in the one-token steps of a drafter whose `propose` is being recorded.

    Called by the patched `propose` where it has prepared these steps, for which it takes every request of the graph.
    """
    if _recorded is not None:
        _mask(speculator, _recorded, _recorded.query_start_loc)


def mask_extended(speculator: Any) -> None:
    """Keep padding out of the KV cache in the first pass of a draft model whose `propose` is being recorded.

    Called by the patched `propose` after `prepare_prefill_inputs`, for the same reason. This pass has a request's
    tokens of a decode batch, and the one that was sampled behind them.
    """
    if _recorded is not None:
        _mask(speculator, _recorded, _recorded.block_start_loc + _recorded.query_start_loc)


def _mask(speculator: Any, padding: Padding, query_start_loc: torch.Tensor) -> None:
    """Leave padding no query tokens, to which vLLM's own kernel then gives no slots, and no keys.

    Args:
        query_start_loc: [num_reqs + 1], int32: where each request's tokens begin.
    """
    buffers, num_reqs = speculator.input_buffers, padding.alive.shape[0]
    buffers.query_start_loc[: num_reqs + 1].copy_(query_start_loc)
    buffers.seq_lens[:num_reqs].mul_(padding.alive)


#: What a DFlash speculator has that walks through candidates: up to 0.30, and from 0.31 on.
WALKS: Final = ("selector_top_k", "candidate_sampler")


def mask_block(speculator: Any, context_slots: torch.Tensor) -> None:
    """Keep padding out of the KV cache in the one pass of a DFlash drafter whose `propose` is being recorded.

    Called by the patched `propose` after `prepare_dflash_inputs`, for the same reason.

    Args:
        context_slots: [..., tokens]: where the target's tokens go in the draft's cache.
    """
    if _recorded is None:
        return
    padding, num_tokens = _recorded, _recorded.dead_tokens.shape[0]
    context_slots[..., :num_tokens].masked_fill_(padding.dead_tokens, _NO_SLOT)
    block, num_reqs = speculator.num_query_per_req, padding.alive.shape[0]
    starts, dead_tokens = padding.block_start_loc, padding.dead_tokens
    if num_tokens != num_reqs * block:
        # It makes a block of all drafts, also where fewer are verified.
        starts = padding.query_start_loc * block
        dead_tokens = (padding.alive == 0).unsqueeze(1).expand(-1, block).flatten()
    _mask(speculator, padding, starts)
    speculator.block_tables.slot_mappings[:, : num_reqs * block].masked_fill_(dead_tokens, _NO_SLOT)
    if any(hasattr(speculator, name) for name in WALKS):
        # Candidates of a draft that walks through some (DFlash2, LiLiCorr) are kept at the request's row, to be taken
        # out of its probabilities by the next. All of padding has one row, so they would not be those that were put in.
        # Such a draft passes over rows below 0.
        dead = (padding.alive == 0).unsqueeze(1).expand(-1, speculator.num_speculative_steps).flatten()
        speculator.sample_idx_mapping[: len(dead)].masked_fill_(dead, -1)


class HiddenRows:
    """Stands for a batch's hidden states where logits are made, which are asked for those of the batch's tokens.

    Args:
        states: [number of tokens, hidden size]: what there is.
        rows: [rows of logits], int64: which of them are asked for, whatever tokens these are in the batch.
    """

    def __init__(self, states: torch.Tensor, rows: torch.Tensor):
        self._states, self._rows = states, rows

    def __getitem__(self, logits_indices: torch.Tensor) -> torch.Tensor:
        return self._states[self._rows]


def rows_at_a_time(vocab_size: int) -> int:
    """Return how many rows of logits a graph samples at a time: a power of two, so many that their fp32 copy fits.

    From 512 rows on a GPU computes logits for longer than it reads the head's weights.
    """
    return 1 << (_MOST_LOGITS_BYTES // (4 * vocab_size)).bit_length() - 1


def idx_dtype(runner: Any) -> torch.dtype:
    """Of vLLM's `InputBatch.idx_mapping`, which differs from version to version."""
    dtype: torch.dtype = InputBatch.make_dummy(1, 1, runner.input_buffers).idx_mapping.dtype
    return dtype


def splits_top_p() -> bool:
    """Whether this vLLM launches kernels for requests with top-p and without top-k, and only where there are such.

    With `backport-top-k-top-p` from 0.30 on, without from 0.33 on; before, it launches them for all with top-p.
    """
    return bool(known_arguments(sampling_states.apply_top_k_top_p, has_topp_only_rows=True))


@contextmanager
def sampling_as(sampler: Any, needed: SamplerParts) -> Iterator[None]:
    """While it lasts, the first row of vLLM's sampler is that of a request that needs `needed`.

    There is no request yet, and whoever gets the row later overwrites it.
    """
    extra = known_arguments(sampler.add_request, prompt_len=1)

    def write(**params: float) -> None:
        # Without a seed vLLM would draw one, and requests that bring none would get others than without graphs.
        sampler.add_request(req_idx=0, sampling_params=SamplingParams(**params, seed=0), **extra)
        sampler.apply_staged_writes()

    write(**needed.example())
    try:
        yield
    finally:
        write(temperature=0.0)
