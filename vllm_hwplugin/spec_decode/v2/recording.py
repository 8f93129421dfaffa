# SPDX-License-Identifier: Apache-2.0
"""What vLLM's methods see while a graph captures them, and how padding stays out of the KV cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.sampling_params import SamplingParams
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample import states as sampling_states

from vllm_hwplugin.spec_decode.decode_batch import MAX_NUM_REQS, GraphShape, uniform_shape
from vllm_hwplugin.spec_decode.draft_schedule import counts_of
from vllm_hwplugin.spec_decode.drafters import MASK_METHODS
from vllm_hwplugin.spec_decode.graph_recording import known_arguments
from vllm_hwplugin.spec_decode.obstacles import Part, shares_experts
from vllm_hwplugin.spec_decode.ranks import Beyond
from vllm_hwplugin.spec_decode.step_counts import Reason
from vllm_hwplugin.spec_decode.v2.mixed_dispatch import MixedDispatch
from vllm_hwplugin.spec_decode.v2.tail_buffers import Padding

#: Limit of the fp32 logits that are sampled at a time. The head's own logits, half as large, are in memory with them.
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
        """Return the parts that requests of vLLM's `SamplingStates` need, or None.

        None: no single request needs all the parts. `rows` is [number of requests], integers. `top_p_apart` is
        `splits_top_p()`.
        """
        temperature = states.temperature.np[rows]
        has_top_k = states.top_k.np[rows] != states.vocab_size
        has_top_p = states.top_p.np[rows] != 1.0
        top_k, top_p = bool(has_top_k.any()), bool(has_top_p.any())
        if top_p_apart and top_k and bool((has_top_p & ~has_top_k).any()):
            return None
        # With top-k or top-p vLLM always applies the temperature; 0 and 1 change nothing.
        scaled = top_k or top_p or not bool(np.all((temperature == 0.0) | (temperature == 1.0)))
        return cls((scaled, top_k, top_p))

    @property
    def narrows(self) -> bool:
        """Whether top-k or top-p removes tokens."""
        return self.value[1] or self.value[2]

    def example(self) -> dict[str, float]:
        """Return arguments of `SamplingParams` that need exactly these parts."""
        scaled, top_k, top_p = self.value
        return {"temperature": 0.5 if scaled else 0.0, "top_k": 2 if top_k else 0, "top_p": 0.5 if top_p else 1.0}


def scheduled_query_lens(runner: Any) -> list[int]:
    """Return a request's tokens in a decode batch, by batch size.

    The first item is for one request, the last for at most `MAX_NUM_REQS`. An item is 1 + num_speculative_tokens, or
    1 + the count of vLLM's draft schedule. It is 0, for no graph, if the schedule has 0 drafts: vLLM then uses another
    sampler.
    """
    spec, most = runner.speculative_config, min(runner.max_num_reqs, MAX_NUM_REQS)
    schedule = getattr(spec, "num_speculative_tokens_per_batch_size", None)
    if schedule is None:
        return [runner.decode_query_len] * most
    drafts = build_dynamic_sd_schedule_lookup(schedule, runner.max_num_reqs, spec.num_speculative_tokens)
    return [1 + count if count else 0 for count in drafts[1 : 1 + most]]


def rungs(full_graphs: Collection[tuple[int, int | None]], *query_lens: Sequence[int]) -> list[GraphShape]:
    """Return the shapes of the target's FULL decode graphs, largest first.

    Args:
        full_graphs: (num_reqs, uniform_token_count) of each of the target's FULL graphs.
        query_lens: as `scheduled_query_lens` returns them. Each sequence adds shapes.
    """
    shapes = set()
    for count, query_len in chain(*(enumerate(lens, 1) for lens in query_lens)):
        sizes = [size for size, uniform in full_graphs if uniform == query_len and count <= size <= MAX_NUM_REQS]
        if sizes:
            shapes.add(uniform_shape(query_len, min(sizes)))
    return sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_reqs), reverse=True)


def decode_shapes(runner: Any) -> list[GraphShape]:
    """Return the shapes of the target's FULL decode graphs, largest first.

    Planned graphs count, also before their capture. With a schedule of draft counts, each count has the shapes of its
    batch sizes; all batch sizes if the load decides between the counts. With adaptive verification: `row_shapes`.
    """
    planned = runner.cudagraph_manager._capture_descs.get(CUDAGraphMode.FULL, ())
    if getattr(runner, "adaptive_verification", None) is not None:
        return row_shapes(runner) if planned else []
    full_graphs = [(desc.num_reqs, desc.uniform_token_count) for desc in planned]
    lens = scheduled_query_lens(runner)
    every = [[1 + count] * len(lens) for count in counts_of(runner.compilation_config) if count]
    return rungs(full_graphs, *(every or [lens]))


def row_shapes(runner: Any) -> list[GraphShape]:
    """Return shapes by rows of logits, largest first.

    With adaptive verification the host knows a batch's rows and not a request's. vLLM samples such a batch in one
    piece, and so does a graph. A batch may verify no draft: then each request has a row, and vLLM has another sampler.
    """
    most_reqs = min(runner.max_num_reqs, MAX_NUM_REQS)
    at_a_time = rows_at_a_time(runner.sampler.sampling_states.vocab_size)

    def sizes(most: int) -> set[int]:
        return {most, *(size for size in (8, 16, 32, 64, *range(128, most, 128)) if size < most)}

    # A batch with drafts has more rows than requests.
    drafts = {(size, min(most_reqs, size - 1)) for size in sizes(min(most_reqs * runner.decode_query_len, at_a_time))}
    plain = {(size, size) for size in sizes(min(most_reqs, at_a_time))}
    return [GraphShape(rows, reqs, None) for rows, reqs in sorted(drafts | plain, reverse=True)]


def mixed_shapes(runner: Any) -> list[GraphShape]:
    """Return the shapes of mixed batches, in descending order of tokens.

    The target has FULL graphs of them, planned or captured, and so has a first pass on its batch.
    """
    # In a step with a prompt a draft that takes images gets embeddings from the host. Ranks of data parallelism agree
    # on tokens, and a graph of later passes would have other tokens on each.
    speculator, dispatch = runner.speculator, MixedDispatch.of(runner)
    if runner.dp_size > 1 or dispatch is None or getattr(speculator, "supports_mm_inputs", False):
        return []
    manager = getattr(speculator, "prefill_cudagraph_manager", None)
    if drafts_in_blocks(runner):
        # DFlash has no first pass, and reads none of the target's metadata.
        manager = runner.cudagraph_manager if runner.lora_config is None else None
    full = () if manager is None else manager._capture_descs.get(CUDAGraphMode.FULL, ())
    planned = (desc for desc in full if dispatch.is_mixed(desc) and desc.num_reqs <= MAX_NUM_REQS)
    shapes = [GraphShape(desc.num_tokens, desc.num_reqs, None) for desc in planned]
    if drafts_in_blocks(runner):
        # The drafter's inputs have a block for each request of the graph.
        shapes = [shape for shape in shapes if shape.num_reqs * runner.decode_query_len <= runner.max_num_tokens]
    return sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True)


def draft_ranks(runner: Any, left: Container[Part]) -> Beyond:
    """Return the ranks that must have the same drafting graphs."""
    shared = Part.V2_DRAFTING not in left and shares_experts(runner)
    return Beyond.DATA_PARALLEL if shared else Beyond.NONE


def later_tokens(runner: Any, num_reqs: int, query_len: int) -> int:
    """Return the tokens of a draft's passes after the first, or 0.

    0: they do not follow from the target's graph of a decode batch, or vLLM drafts without graphs. Ranks that share a
    draft's experts must run passes of the same tokens, in a graph of the plugin or not. vLLM pads these passes by the
    most requests of any rank. All ranks decode if the target's graph is a decode batch's, so the graph bounds that
    number.
    """
    if not shares_experts(runner):
        return num_reqs
    speculator, planned = runner.speculator, runner.cudagraph_manager._capture_descs[CUDAGraphMode.FULL]
    first = speculator.prefill_cudagraph_manager.dispatch(num_reqs, num_reqs * query_len, query_len, 0)
    if first.cg_mode != CUDAGraphMode.FULL or first.num_tokens != num_reqs * query_len:
        return 0
    if speculator.num_speculative_steps == 1:
        # There are none.
        return num_reqs
    smaller = [desc.num_reqs for desc in planned if desc.uniform_token_count == query_len and desc.num_reqs < num_reqs]
    counts = range(1 + max(smaller, default=0), num_reqs + 1)
    later = {speculator.decode_cudagraph_manager.dispatch(count, count, 1, 0) for count in counts}
    full = [desc.num_tokens for desc in later if desc.cg_mode == CUDAGraphMode.FULL]
    return full[0] if len(later) == len(full) == 1 else 0


def drafts_in_blocks(runner: Any) -> bool:
    """Whether one pass makes all drafts of a request, as with DFlash."""
    return runner.speculative_config.method in MASK_METHODS


def decode_query_len(batch: Any, known: Container[int]) -> int | Reason:
    """Return the tokens of each request, or why no graph drafts.

    The requests of vLLM's `InputBatch` must decode one token, with equal draft counts that `known` has graphs for.
    """
    if batch.is_prefilling_np.any():
        return Reason.PROMPT
    query_len = int(batch.num_scheduled_tokens.max())
    full = batch.num_reqs * query_len
    if query_len not in known or batch.num_tokens != full or batch.num_draft_tokens != full - batch.num_reqs:
        return Reason.FEWER_DRAFTS
    return query_len


# vLLM's PAD_SLOT_ID: kernels skip writes to this slot.
_NO_SLOT: Final = -1

# The padding of the graph that is being captured. The speculator's patched `propose` masks it.
_recorded: Padding | None = None


@contextmanager
def recorded_with(padding: Padding) -> Iterator[None]:
    """Have `mask_decode`, `mask_extended` and `mask_block` mask this padding."""
    global _recorded
    _recorded = padding
    try:
        yield
    finally:
        _recorded = None


@contextmanager
def metadata_of_steps(speculator: Any) -> Iterator[list[Any]]:
    """Build draft steps' metadata before the capture, and update it inside.

    Yields a list of the metadata that the graph writes to. The graph's owner must keep it.
    """
    # For builders that work on the host (`builders.updated_in_place`). vLLM updates their metadata before each step; up
    # to 0.31 it builds the metadata for the first step.
    name = _build_of(speculator)
    build, made = getattr(speculator, name), list[Any]()

    def built_or_updated(*args: Any, **kwargs: Any) -> Any:
        if not torch.cuda.is_current_stream_capturing():
            made[:] = [build(*args, **kwargs)]
            return made[0]
        for group in (group for groups in speculator.attn_groups for group in groups):
            # A cache's blocks may be larger than a kernel's. Building maps them, updating does not.
            if hasattr(group, "map_to_kernel_block_table"):
                group.map_to_kernel_block_table(speculator.block_tables.input_block_tables[group.kv_cache_group_id])
            group.update_draft_decode_metadata(made[0])
        return made[0]

    setattr(speculator, name, built_or_updated)
    try:
        yield made
    finally:
        delattr(speculator, name)


def _build_of(speculator: Any) -> str:
    """Return the name of the method that builds decode metadata."""
    # Up to 0.29 it has the second name.
    names = ("_build_uniform_attn_metadata", "_build_draft_attn_metadata")
    return next(name for name in names if hasattr(speculator, name))


def block_pass(speculator: Any, propose: Callable[[], object]) -> Callable[[], None]:
    """Call `propose` without DFlash's pass over its blocks, and return the pass.

    `propose` computes the context's keys before the pass, for the batch's tokens. The pass follows only the number of
    requests, and builds its own attention metadata.
    """
    build, generate = names = _build_of(speculator), "_generate_draft"
    calls = dict[str, inspect.BoundArguments]()

    def note(name: str, signature: inspect.Signature, /, *args: Any, **kwargs: Any) -> None:
        calls[name] = signature.bind(*args, **kwargs)

    for name in names:
        setattr(speculator, name, partial(note, name, inspect.signature(getattr(speculator, name))))
    try:
        propose()
    finally:
        for name in names:
            delattr(speculator, name)

    def run() -> None:
        built, given = calls[build], calls[generate]
        given.arguments["attn_metadata"] = getattr(speculator, build)(*built.args, **built.kwargs)
        getattr(speculator, generate)(*given.args, **given.kwargs)

    return run


# The patched `propose` calls these after it has prepared the pass for every request of the graph. Without a capture
# they do nothing.


def mask_decode(speculator: Any) -> None:
    """Keep padding out of the KV cache in a drafter's one-token steps."""
    if _recorded is not None:
        _mask(speculator, _recorded, _recorded.query_start_loc)


def mask_extended(speculator: Any) -> None:
    """Keep padding out of the KV cache in a draft's first pass."""
    if _recorded is not None:
        # The pass has a request's tokens of the decode batch and the token sampled after them.
        _mask(speculator, _recorded, _recorded.block_start_loc + _recorded.query_start_loc)


def _mask(speculator: Any, padding: Padding, query_start_loc: torch.Tensor) -> None:
    """Give padding no keys and no query tokens, hence no slots.

    Args:
        query_start_loc: [num_reqs + 1], int32: offset of each request's tokens.
    """
    buffers, num_reqs = speculator.input_buffers, padding.alive.shape[0]
    buffers.query_start_loc[: num_reqs + 1].copy_(query_start_loc)
    buffers.seq_lens[:num_reqs].mul_(padding.alive)


#: Attributes of a DFlash speculator that walks through candidates: up to 0.30, and from 0.31.
WALKS: Final = ("selector_top_k", "candidate_sampler")


def mask_block(speculator: Any, context_slots: torch.Tensor) -> None:
    """Keep padding out of a DFlash drafter's KV cache.

    Args:
        context_slots: [..., tokens]: slots of the target's tokens in the draft's cache.
    """
    if _recorded is None:
        return
    padding, mixed = _recorded, _recorded.dead_mixed is not None
    dead_tokens = padding.dead_tokens if padding.dead_mixed is None else padding.dead_mixed
    num_tokens = dead_tokens.shape[0]
    context_slots[..., :num_tokens].masked_fill_(dead_tokens, _NO_SLOT)
    block, num_reqs, starts = speculator.num_query_per_req, padding.alive.shape[0], padding.block_start_loc
    if mixed or num_tokens != num_reqs * block:
        # DFlash makes a block of all drafts, also if fewer are verified.
        starts = padding.query_start_loc * block
        dead_tokens = (padding.alive == 0).unsqueeze(1).expand(-1, block).flatten()
    _mask(speculator, padding, starts)
    speculator.block_tables.slot_mappings[:, : num_reqs * block].masked_fill_(dead_tokens, _NO_SLOT)
    if any(hasattr(speculator, name) for name in WALKS):
        # A draft that walks through candidates (DFlash2, LiLiCorr) stores them at the request's row, and the next step
        # takes them out of the row's probabilities. All padding shares a row, so it would take out other candidates
        # than it stored. Such a draft skips rows below 0.
        dead = (padding.alive == 0).unsqueeze(1).expand(-1, speculator.num_speculative_steps).flatten()
        speculator.sample_idx_mapping[: len(dead)].masked_fill_(dead, -1)


class HiddenRows:
    """Hidden states, [number of tokens, hidden size], that return `rows` ([rows of logits], int64) for any index.

    To compute logits vLLM indexes a batch's hidden states with the batch's token positions.
    """

    def __init__(self, states: torch.Tensor, rows: torch.Tensor):
        self._states, self._rows = states, rows

    def __getitem__(self, logits_indices: torch.Tensor) -> torch.Tensor:
        return self._states[self._rows]


def rows_at_a_time(vocab_size: int) -> int:
    """Return the rows of logits that a graph samples at a time."""
    # The largest power of two whose fp32 copy fits. From 512 rows on, computing logits takes a GPU longer than reading
    # the head's weights.
    return 1 << (_MOST_LOGITS_BYTES // (4 * vocab_size)).bit_length() - 1


def idx_dtype(runner: Any) -> torch.dtype:
    """Return the dtype of `InputBatch.idx_mapping` in this vLLM version."""
    return InputBatch.make_dummy(1, 1, runner.input_buffers).idx_mapping.dtype


def splits_top_p() -> bool:
    """Whether vLLM has separate kernels for top-p without top-k."""
    # From 0.33, and from 0.30 with `backport-top-k-top-p`, vLLM launches these kernels only for batches with such
    # requests. Earlier versions launch them for all requests with top-p.
    return bool(known_arguments(sampling_states.apply_top_k_top_p, has_topp_only_rows=True))


@contextmanager
def sampling_as(sampler: Any, needed: SamplerParts) -> Iterator[None]:
    """Put a request that needs `needed` into the sampler's first row."""
    # There is no request yet, and the first request that gets the row overwrites it.
    extra = known_arguments(sampler.add_request, prompt_len=1)

    def write(**params: float) -> None:
        # Without a seed vLLM would draw a seed here, and requests without a seed would get other seeds than without
        # graphs.
        sampler.add_request(req_idx=0, sampling_params=SamplingParams(**params, seed=0), **extra)
        sampler.apply_staged_writes()

    write(**needed.example())
    try:
        yield
    finally:
        write(temperature=0.0)
