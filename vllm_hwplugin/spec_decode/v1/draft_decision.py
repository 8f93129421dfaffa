# SPDX-License-Identifier: Apache-2.0
"""What is captured for a drafter, or why nothing: plain facts in, shapes and reasons out.

A drafter runs two kinds of pass. The first reads every scheduled token of every request: 1 + k of them in a decode
batch, more if the drafter appends slots of its own. The later ones read one token a request. vLLM pads both with one
table, made of the target's capture sizes, so a single request's one-token pass is padded to 1 + k. Here each query
length has its own table, counted in requests.

A DFlash drafter reads only the last given token. Keys and values of the others are put into its cache beforehand. Its
queries are that token and k masks, in every batch, and each sees the whole block.

Neither torch nor vLLM is imported, so the rules need no device; `draft_facts` reads the facts off a proposer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from vllm_hwplugin.spec_decode.decode_batch import GraphShape, uniform_shape

#: Tokens of a request in every pass of an autoregressive drafter but the first.
STEP_QUERY_LEN = 1


def request_ladder(capture_sizes: Iterable[int], target_query_len: int, max_num_seqs: int) -> tuple[int, ...]:
    """Request counts, ascending, at which a uniform batch of the target has a graph.

    The drafter then has a graph wherever the target has one. `max_num_seqs` itself is added, so that the fullest batch
    does not fall off the ladder when it lies between two capture sizes.

    Args:
        capture_sizes: `cudagraph_capture_sizes`, in tokens.
        target_query_len: tokens a request in a uniform batch of the target (1 + num_speculative_tokens).
        max_num_seqs: the scheduler's limit on requests in a batch.
    """
    sizes = tuple(capture_sizes)
    rungs = {size // target_query_len for size in sizes if size % target_query_len == 0}
    rungs = {rung for rung in rungs if 1 <= rung <= max_num_seqs}
    if sizes and max_num_seqs * target_query_len <= max(sizes):
        rungs.add(max_num_seqs)
    return tuple(sorted(rungs))


def pad_up(ladder: Sequence[int], count: int) -> int | None:
    """The smallest rung that holds `count`, or None where none does."""
    index = bisect_left(ladder, count)
    return ladder[index] if count > 0 and index < len(ladder) else None


@dataclass(frozen=True, slots=True)
class DraftKeys:
    """The shapes that are captured, by query length.

    Attributes:
        uniform: query length in tokens -> request counts, ascending.
        mixed: token counts of batches whose rows differ in length, ascending; empty where the mode has no such graphs.
        max_num_seqs: rows of a mixed graph, at most.
    """

    uniform: Mapping[int, tuple[int, ...]]
    mixed: tuple[int, ...]
    max_num_seqs: int

    def find(self, num_tokens: int, query_len: int | None) -> GraphShape | None:
        """The captured shape to pad this batch to, or None where there is no graph for it.

        Args:
            num_tokens: tokens in the batch.
            query_len: tokens of every request in it; None where they differ.
        """
        if query_len is not None and num_tokens % query_len == 0:
            num_reqs = pad_up(self.requests(query_len), num_tokens // query_len)
            if num_reqs is not None:
                return uniform_shape(query_len, num_reqs)
        padded = pad_up(self.mixed, num_tokens)
        return None if padded is None else self._mixed_shape(padded)

    def requests(self, query_len: int) -> tuple[int, ...]:
        """Request counts, ascending, of the graphs for this query length; empty where there are none."""
        return self.uniform.get(query_len, ())

    def all(self) -> tuple[GraphShape, ...]:
        """Every shape, largest first, so that later captures can reuse the memory pool of earlier ones."""
        shapes = [uniform_shape(query_len, rung) for query_len, ladder in self.uniform.items() for rung in ladder]
        shapes += [self._mixed_shape(size) for size in self.mixed]
        return tuple(sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_reqs), reverse=True))

    def largest(self, num_reqs: int) -> DraftKeys:
        """Of each kind the largest shape, and of uniform ones the largest of at most `num_reqs` requests, too.

        The smaller ones use the memory of these.
        """
        tops = {
            query_len: tuple(sorted({ladder[-1], *[rung for rung in ladder if rung <= num_reqs][-1:]}))
            for query_len, ladder in self.uniform.items()
            if ladder
        }
        return DraftKeys(tops, self.mixed[-1:], self.max_num_seqs)

    def _mixed_shape(self, num_tokens: int) -> GraphShape:
        return GraphShape(num_tokens=num_tokens, num_reqs=min(num_tokens, self.max_num_seqs), query_len=None)


@dataclass(frozen=True, slots=True)
class FirstPass:
    """The first pass of one drafter.

    Attributes:
        query_len: tokens of a request; in a decode batch, or where `always_uniform` in every batch.
        max_tokens: what the drafter's buffers hold.
        always_uniform: whether batches with prefill have that shape too.
        causal: whether a query sees only those before it.
        tokens_only: whether the model is called with token ids and positions alone.
    """

    query_len: int
    max_tokens: int
    always_uniform: bool = False
    causal: bool = True
    tokens_only: bool = False


@dataclass(frozen=True)
class DrafterFacts:
    """What is known of a drafter once the target's graph mode is settled.

    Attributes:
        proposer: name of its class.
        target_mode: name of the target's `CUDAGraphMode`.
        target_has_graphs: whether that mode has FULL graphs.
        covered: whether its drafting code is the patched one.
        padded_batch: whether rejected tokens stay in its batches.
        breakable_any_mode: whether its model runs in breakable CUDA graphs that capture in every mode.
        shares_mtp_indices: whether its model is told on the host to share top-k indices between steps.
        prompts_by_layer: the KV connector that vLLM asks at each layer of a pass, if the drafter's passes over prompts
            would have graphs and the target's have none; else None.
    """

    proposer: str
    target_mode: str
    target_has_graphs: bool = True
    covered: bool = True
    enforce_eager: bool = False
    padded_batch: bool = True
    data_parallel_size: int = 1
    context_parallel_size: int = 1
    lora: bool = False
    breakable_any_mode: bool = False
    shares_mtp_indices: bool = False
    prompts_by_layer: str | None = None


@dataclass(frozen=True)
class BatchFacts:
    """What decides which batches of a drafter can have graphs.

    Attributes:
        capture_sizes: the target's `cudagraph_capture_sizes`, in tokens.
        mixed: whether the target has FULL graphs for batches that mix prefill and decode.
        first: the drafter's first pass.
        max_num_seqs: requests in a batch, at most.
        parallel_drafting: the first pass drafts every token, so there are no one-token steps.
    """

    capture_sizes: tuple[int, ...]
    mixed: bool
    num_speculative_tokens: int
    first: FirstPass
    max_num_seqs: int
    parallel_drafting: bool = False


@dataclass(frozen=True)
class CaptureFacts:
    """What is known once the runner captures the target's graphs.

    Attributes:
        attention: why the draft layers' attention backends allow no graph, or None.
        decode_threshold: the longest query that every one of them treats as decode; None for no limit.
        table_rows: rows that the drafter's block table holds; None where the runner built no metadata for it.
    """

    attention: str | None = None
    decode_threshold: int | None = None
    table_rows: int | None = None


@dataclass(frozen=True)
class CapturePlan:
    """The shapes to capture; None where nothing is captured, for `reason`."""

    keys: DraftKeys | None
    reason: str = ""


def decide(drafter: DrafterFacts, batches: BatchFacts, at_capture: CaptureFacts | None = None) -> CapturePlan:
    """What to capture for a drafter.

    Args:
        at_capture: None before the target's graphs are captured. The answer is then what could be captured at most.
    """
    reason = drafter_obstacle(drafter)
    if reason is None and at_capture is not None:
        reason = at_capture.attention
    if reason is not None:
        return CapturePlan(None, reason)
    keys = plan_keys(batches, None if at_capture is None else at_capture.decode_threshold)
    shapes = keys.all()
    if not shapes:
        return CapturePlan(None, "no capture size holds a whole batch of the drafter")
    if at_capture is not None:
        rows, held = max(shape.num_reqs for shape in shapes), at_capture.table_rows
        if held is None:
            missing = "the runner built no attention metadata for the drafter's KV-cache group while capturing"
            return CapturePlan(None, missing)
        if rows > held:
            return CapturePlan(None, f"the largest graph has {rows} rows, and the drafter's block table holds {held}")
    return CapturePlan(keys)


def drafter_obstacle(drafter: DrafterFacts) -> str | None:
    """Why this drafter runs as in stock vLLM whatever its batches and its attention are, or None."""
    if not drafter.covered:
        return f"{drafter.proposer} has drafting code of its own that no live feature covers"
    if drafter.enforce_eager:
        return "the speculative config asks for enforce_eager"
    if not drafter.target_has_graphs:
        return f"the target's cudagraph_mode is {drafter.target_mode}, and the drafter follows it"
    if not drafter.padded_batch:
        return "disable_padded_drafter_batch gives the drafter batches of varying query length"
    if drafter.data_parallel_size > 1:
        return "with data parallelism the ranks agree on a graph mode by token count alone"
    if drafter.context_parallel_size > 1:
        return "decode context parallelism keeps per-rank lengths at changing addresses"
    if drafter.lora:
        return "layers that the drafter shares with the target map tokens to LoRA adapters by the target's batch"
    if drafter.breakable_any_mode:
        return "the draft model already runs in breakable CUDA graphs, which capture in every mode"
    if drafter.shares_mtp_indices:
        return "the draft model shares top-k indices between steps by a host-side switch"
    if drafter.prompts_by_layer is not None:
        return f"{drafter.prompts_by_layer} may load and save keys layer by layer, also those of the draft of a prompt"
    return None


def plan_keys(batches: BatchFacts, decode_threshold: int | None) -> DraftKeys:
    """The shapes that follow the target's, wherever the drafter's attention and buffers can have them."""
    first = batches.first
    ladder = request_ladder(batches.capture_sizes, 1 + batches.num_speculative_tokens, batches.max_num_seqs)
    uniform: dict[int, tuple[int, ...]] = {}
    if batches.num_speculative_tokens > 1 and not batches.parallel_drafting:
        uniform[STEP_QUERY_LEN] = ladder
    if decode_threshold is None or first.query_len <= decode_threshold:
        uniform[first.query_len] = tuple(rung for rung in ladder if rung * first.query_len <= first.max_tokens)
    mixed: tuple[int, ...] = ()
    if batches.mixed and not first.always_uniform:
        mixed = tuple(sorted(size for size in batches.capture_sizes if size <= first.max_tokens))
    return DraftKeys(uniform=uniform, mixed=mixed, max_num_seqs=batches.max_num_seqs)


@dataclass(frozen=True)
class ChainFacts:
    """What decides whether a drafter's one-token steps may be one graph.

    Attributes:
        attention: why the draft layers' attention backends do not allow it, or None.
        expanded_hidden_states: whether the states that the draft model passes on are wider than those it samples from.
        host_side: what the drafter does on the host between steps.
    """

    num_speculative_tokens: int
    attention: str | None = None
    parallel_drafting: bool = False
    expanded_hidden_states: bool = False
    host_side: tuple[str, ...] = ()


def chain_obstacle(facts: ChainFacts) -> str | None:
    """Why this drafter's steps are launched one by one, or None."""
    if facts.num_speculative_tokens < 2 or facts.parallel_drafting:
        return "one pass drafts every token, so there is no chain"
    if facts.attention is not None:
        return f"metadata has to be built between steps ({facts.attention})"
    if facts.expanded_hidden_states:
        return "the states that the draft model passes on are wider than those it samples from"
    if facts.host_side:
        return f"the drafter does host work between steps: {', '.join(facts.host_side)}"
    return None
