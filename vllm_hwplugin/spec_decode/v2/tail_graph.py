# SPDX-License-Identifier: Apache-2.0
"""Sample and draft in two CUDA graphs per decode step (Model Runner V2).

A graph captures vLLM's own methods for each shape, and a step replays two graphs instead of calling the methods. There
are two because vLLM starts to copy the sampled tokens to the host between them, and drafting should not delay that.
Also, only sampling has variants. docs/model-runner-v2.md says which steps they serve.

Sampling starts from rows of hidden states, whichever requests they belong to. So the same graphs sample for a batch
with a prompt or with unequal draft counts: its rows are put where a decode batch has them. With adaptive verification,
where only the device knows which rows are whose, sampling has graphs by rows. Drafting starts from the sampled tokens,
and processes all tokens. So a graph drafts also if vLLM samples, and mixed batches have drafting graphs by tokens, if
the target and the draft's first pass have them.

Between steps only the requests in the buffers are kept.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final

import numpy as np
import torch
from vllm.distributed.parallel_state import graph_capture

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.features import V2_TAIL_GRAPH
from vllm_hwplugin.nwor import runner as nwor
from vllm_hwplugin.spec_decode.decode_batch import GraphShape, asks_for_nothing_else
from vllm_hwplugin.spec_decode.graph_recording import Graphs, attempt, reserved_memory
from vllm_hwplugin.spec_decode.obstacles import Part, decodes_plainly, why_not
from vllm_hwplugin.spec_decode.step_counts import Reason, StepCounts
from vllm_hwplugin.spec_decode.v2.mixed_dispatch import MixedDispatch
from vllm_hwplugin.spec_decode.v2.recording import (
    SamplerParts,
    decode_query_len,
    decode_shapes,
    draft_ranks,
    drafts_in_blocks,
    mixed_shapes,
    splits_top_p,
)
from vllm_hwplugin.spec_decode.v2.tail_buffers import LogitsRows
from vllm_hwplugin.spec_decode.v2.tail_capture import Captured, Held, Served, ShapeGraphs, TailRecorder, target_states

#: Surplus rows of logits that a graph may compute for a batch that it does not draft for. The GPU should take less time
#: for them than the host takes for the launches that the graph saves.
_SURPLUS: Final = 128

#: The parts of a step, with the words for the case that vLLM does the part.
_DRAFTS: Final = "vLLM drafts"
_DRAFTS_MIXED: Final = "vLLM drafts for mixed batches"
_HALVES: Final = {Part.V2_SAMPLING: "vLLM samples", Part.V2_DRAFTING: _DRAFTS}


@dataclasses.dataclass(frozen=True)
class _Step:
    """What samples and drafts for a batch: a graph, or vLLM for a reason.

    Attributes:
        updated: whether a graph has updated the requests' state, and vLLM is still to call for that.
        drafts: the drafts, if a graph made them.
    """

    batch: Any
    sampling: Served | Reason
    drafting: Served | Reason
    updated: bool = False
    drafts: torch.Tensor | None = None


class TailGraphs(Graphs[Captured]):
    """The sampling and drafting graphs of one `GPUModelRunner`, which holds them as `tail_graphs`.

    Each step calls `sample`, `postprocess_sampled`, `propose`, `keep_drafts` and `drafts_of`, in this order. `sample`
    chooses the step's graphs.

    Args:
        vllm: has vLLM's own `sample` and `postprocess_sampled`. None: the runner, if nothing overrides them.
    """

    feature, effect = V2_TAIL_GRAPH, "vLLM's own kernels after the target"
    needed = "there are no graphs of sampling and drafting"

    def __init__(self, runner: Any, vllm: Any = None):
        super().__init__(runner)
        self._vllm = runner if vllm is None else vllm
        self._plain = np.zeros(runner.max_num_reqs, dtype=bool)
        self._scores_prompt = np.zeros(runner.max_num_reqs, dtype=bool)
        self._splits_top_p = splits_top_p()
        # Seconds that the capture for vLLM's memory estimate took.
        self._estimated = 0.0
        self._mixed_failed = False
        self._sampling, self._drafting = StepCounts(V2_TAIL_GRAPH, "sampling"), StepCounts(V2_TAIL_GRAPH, "drafting")

    def forget(self) -> None:
        super().forget()
        # The graphs of vLLM's memory estimate, whose memory is taken until the real capture.
        self._profiled: Captured | None = None
        self._step = _Step(None, Reason.NOT_CAPTURED, Reason.NOT_CAPTURED)
        # The requests in the buffers, from this step or the last. None after a step that graphs do not draft for.
        self.held: Held | None = None

    # -- a start ------------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Capture all graphs, as the last captures of `capture_model`.

        From 0.29 vLLM estimates the memory of graphs before there is a KV cache, and captures its largest graphs for
        that. The graphs of the largest shape here are then captured too; smaller shapes use the same memory. The real
        capture frees them first.

        Raises:
            FeatureRequired: no graph can be captured, and the feature's switch is `on`.
        """
        self.forget()
        runner = self._owner
        if self.failed or (runner.speculator is None and not decodes_plainly(runner)):
            return
        profile_only = getattr(runner.cudagraph_manager, "_max_full_descs_to_capture", None) is not None
        beyond = draft_ranks(runner, ())
        left = {part: reason for part in _HALVES if (reason := why_not(runner, part, beyond=beyond)) is not None}
        beyond = draft_ranks(runner, left)
        # Without a drafter nothing drafts.
        parts = _HALVES if runner.speculator is not None else (Part.V2_SAMPLING,)
        by_vllm = {_HALVES[part]: reason for part, reason in left.items() if part in parts}
        reason = why_not(runner, Part.V2_SAMPLING | Part.V2_DRAFTING) if len(left) == len(_HALVES) else None
        largest = slice(1 if profile_only else None)
        shapes = [] if reason else decode_shapes(runner)[largest]
        mixed = [] if Part.V2_DRAFTING in left or self._mixed_failed else mixed_shapes(runner)[largest]
        if not shapes:
            if not profile_only:
                self.stay_stock(reason or "the target has no FULL graph of a decode batch")
            return
        started, reserved = time.perf_counter(), reserved_memory()
        with graph_capture(device=runner.device):
            # Inside the context, so that the ranks leave it together if the capture fails.
            self.attempt(lambda: self._record(shapes, mixed, left), beyond=beyond)
            captured = self.captured
            if captured is not None and not profile_only:
                for companion in self._companions:
                    with captured.touched:
                        # vLLM's drafter reads the target's attention metadata.
                        companion.capture(captured, _DRAFTS if _DRAFTS in by_vllm else None)
                self.captured = captured.watched(runner)
        runner.req_states.draft_tokens.zero_()
        torch.accelerator.synchronize()
        if captured is None:
            return
        if profile_only:
            self._profiled, self.captured = captured, None
            self._estimated = time.perf_counter() - started
            # vLLM measures free memory next. The runs before each capture worked in more than graphs need.
            torch.accelerator.empty_cache()
            return
        run_records.note(
            V2_TAIL_GRAPH,
            f"{len(shapes)} shapes of at most {max(shape.num_reqs for shape in shapes)} requests, captured in "
            f"{time.perf_counter() - started:.1f} s, {max(reserved_memory() - reserved, 0) / 2**20:.0f} MiB"
            + (f"; the largest before that, for vLLM's estimate, in {self._estimated:.1f} s" if self._estimated else "")
            + "".join(f"; {part}: {reason}" for part, reason in by_vllm.items())
            + (f"; {_DRAFTS_MIXED}: capturing graphs failed" if self._mixed_failed else ""),
        )
        run_records.use(V2_TAIL_GRAPH, True)

    def _record(self, shapes: Sequence[GraphShape], mixed: Sequence[GraphShape], left: Mapping[Part, str]) -> None:
        recorder = TailRecorder(self._owner, self._vllm, left, shapes, mixed)
        captured = self.captured = recorder.record()

        def record() -> None:
            self.captured = recorder.record_mixed(captured)

        def forget() -> None:
            # A failed capture may leave the pool in disorder.
            self.captured = dataclasses.replace(captured, pool=torch.cuda.graph_pool_handle())

        if mixed:
            self._mixed_failed = not attempt(V2_TAIL_GRAPH, _DRAFTS_MIXED, record, forget, kernels=nullcontext)

    # -- a request ----------------------------------------------------------------------------------------------------

    def add_request(self, row: int, params: Any) -> None:
        """Note whether graphs can sample for a request with `SamplingParams` `params`."""
        self._plain[row] = asks_for_nothing_else(params)
        self._scores_prompt[row] = params.prompt_logprobs is not None

    # -- a step -------------------------------------------------------------------------------------------------------

    def sample(self, hidden_states: torch.Tensor, batch: Any, grammar_output: Any) -> Any:
        """Sample like `GPUModelRunner.sample`; a graph also does `postprocess_sampled`."""
        self.follow_weights()
        grammar = grammar_output is not None or batch.has_structured_output_reqs
        step = self._step = _Step(batch, *self._graphs_for(hidden_states, batch, grammar))
        if self._sampling.missed(step.sampling):
            sampled = self._vllm.sample(hidden_states, batch, grammar_output)
            if not isinstance(step.drafting, Reason):
                # Drafting reads the counts there. Another stream may still copy a graph's previous counts to the host.
                self._owner.main_stream.wait_stream(self._owner.output_copy_stream)
                outputs, count = step.drafting.outputs, len(sampled[1])
                outputs.num_sampled[:count].copy_(sampled[1])
                outputs.num_rejected[:count].copy_(sampled[2])
            return sampled
        # Another stream copies the previous step's outputs to the host.
        self._owner.main_stream.wait_stream(self._owner.output_copy_stream)
        self._step = dataclasses.replace(step, updated=True)
        step.sampling.graph.replay()
        outputs, count = step.sampling.outputs, batch.num_reqs
        num_sampled, num_rejected = outputs.num_sampled[:count], outputs.num_rejected[:count]
        nwor.replayed(self._owner, num_rejected)
        output = dataclasses.replace(
            step.sampling.output,
            sampled_token_ids=outputs.sampled_token_ids[:count],
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )
        return output, num_sampled, num_rejected

    def postprocess_sampled(self, *arguments: Any, **settings: Any) -> None:
        """Update the requests' state, unless the sampling graph did."""
        step, self._step = self._step, dataclasses.replace(self._step, updated=False)
        if not step.updated:
            self._vllm.postprocess_sampled(*arguments, **settings)

    def propose(
        self, vllms: Callable[..., torch.Tensor], input_batch: Any, *arguments: Any, **settings: Any
    ) -> torch.Tensor:
        """Draft for the batch that was sampled.

        vLLM drafts for any other batch, such as a dummy batch. `vllms` is the speculator's own `propose`, and gets all
        further arguments.
        """
        step, speculator, held = self._step, self._owner.speculator, self.held
        if input_batch is not step.batch:
            return vllms(input_batch, *arguments, **settings)
        drafting = step.drafting
        wanted = settings.get("num_speculative_tokens")
        if wanted is not None and not isinstance(drafting, Reason):
            query_len = self._owner.decode_query_len if held is None else held.graphs.query_len
            if wanted != query_len - 1:
                drafting = Reason.FEWER_DRAFTS
        if self._drafting.missed(drafting):
            return vllms(input_batch, *arguments, **settings)
        drafting.graph.replay()
        if drafting.then is not None:
            drafting.then.replay()
        # The n-gram speculator names its drafts `drafts`.
        all_drafts = speculator.drafts if hasattr(speculator, "drafts") else speculator.draft_tokens
        drafts: torch.Tensor = all_drafts[: input_batch.num_reqs]
        # Another stream copies a batch's drafts to the host if it has a grammar.
        own = drafts.clone() if input_batch.has_structured_output_reqs else drafts
        self._step = dataclasses.replace(step, drafts=own)
        return drafts

    def keep_drafts(self, *, idx_mapping: torch.Tensor, draft_tokens: torch.Tensor) -> None:
        """Put the drafts into the requests' state, unless the graph did."""
        if self._step.drafts is None:
            self._owner.req_states.draft_tokens[idx_mapping] = draft_tokens

    def drafts_of(self, idx_mapping: torch.Tensor) -> torch.Tensor:
        """Return the drafts in the requests' state, in the batch's order."""
        drafts = self._step.drafts
        return self._owner.req_states.draft_tokens[idx_mapping] if drafts is None else drafts

    def follow_weights(self) -> None:
        """Update fused weights; drop the graphs if weights moved or misfit.

        Called before a step's inputs are prepared, because vLLM's drafter needs more of the inputs than a graph writes.
        If no graph prepares inputs, called before sampling.
        """
        captured = self.captured
        if captured is not None and (reason := captured.parameters.moved() or captured.fused.keep_in_place()):
            self.give_up(reason)

    def _graphs_for(
        self, hidden_states: torch.Tensor, batch: Any, grammar: bool
    ) -> tuple[Served | Reason, Served | Reason]:
        """Put the batch into the buffers; return what samples and drafts."""
        captured = self.captured
        if captured is None:
            return Reason.NOT_CAPTURED, Reason.NOT_CAPTURED
        len_or_reason = decode_query_len(batch, captured.most_reqs)
        if not isinstance(len_or_reason, Reason):
            if batch.num_reqs > captured.most_reqs[len_or_reason]:
                len_or_reason = Reason.LARGER_BATCH
            elif hidden_states.data_ptr() != target_states(self._owner)[0].data_ptr():
                len_or_reason = Reason.NO_FULL_GRAPH
            else:
                rows, num_tokens = batch.idx_mapping_np, batch.num_tokens_after_padding
                held = self.hold(captured, batch.req_ids, rows, len_or_reason, num_tokens)
                if isinstance(held, Held):
                    needed = Reason.STRUCTURED_OUTPUT if grammar else held.sampling
                    return held.graphs.sample(needed), held.graphs.drafting
                len_or_reason = held
        self.held = None
        drafting = self._mixed_drafting(captured, hidden_states, batch, len_or_reason)
        sampling: Served | Reason = Reason.STRUCTURED_OUTPUT
        if not grammar:
            sampling = self._sampling_alone(captured, hidden_states, batch, len_or_reason)
        if isinstance(sampling, Reason) and not isinstance(drafting, Reason):
            self._write(captured, batch.idx_mapping_np, self._owner.decode_query_len)
        return sampling, drafting

    def hold(
        self, captured: Captured, req_ids: list[str], rows: np.ndarray, query_len: int, num_tokens: int
    ) -> Held | Reason:
        """Put requests into the buffers, or return why no graph covers them.

        Args:
            req_ids: requests past their prompts with equal draft counts, in the batch's order; at most
                `most_reqs[query_len]`.
            rows: [number of requests], integers: rows in the runner's state.
            query_len: tokens of each request.
            num_tokens: tokens of the batch, with padding.
        """
        # With data parallelism a batch is padded to the largest batch of all ranks.
        graphs = captured.graphs.get((query_len, num_tokens // query_len))
        if graphs is None or num_tokens != graphs.shape.num_tokens:
            return Reason.NO_FULL_GRAPH
        dispatch = MixedDispatch.of(self._owner)
        if dispatch is not None and dispatch.replays() and draft_ranks(self._owner, captured.left):
            # Another rank has a prompt, and drafts without these graphs.
            return Reason.NO_FULL_GRAPH
        # A request that gets another row is prefilled in its next step, and that step resets `held`.
        if self.held is not None and graphs is self.held.graphs and req_ids == self.held.req_ids:
            return self.held
        drafts, padded = not isinstance(graphs.drafting, Reason), len(rows) < graphs.shape.num_reqs
        # Drafting writes to padding's row.
        if drafts and padded and not self._owner.req_states.free_indices:
            return Reason.NO_FREE_ROW
        self._write(captured, rows, query_len)
        self.held = Held(req_ids, rows, self._needed(captured, rows), graphs)
        return self.held

    def _mixed_drafting(
        self, captured: Captured, hidden_states: torch.Tensor, batch: Any, reason: Reason
    ) -> Served | Reason:
        """Return the graph that drafts for a mixed batch, or a reason.

        `reason` is why graphs of decode batches do not draft.
        """
        if Part.V2_DRAFTING in captured.left:
            return Reason.NOT_CAPTURED
        dispatch, graphs = MixedDispatch.of(self._owner), captured.mixed.get(batch.num_tokens_after_padding)
        if dispatch is None or graphs is None or not dispatch.replays():
            return reason
        if batch.num_reqs > graphs.shape.num_reqs:
            return Reason.LARGER_BATCH
        # vLLM may have run the target without a graph, after a change of the ranks of experts.
        if hidden_states.data_ptr() != target_states(self._owner)[0].data_ptr():
            return Reason.NO_FULL_GRAPH
        if batch.num_reqs < graphs.shape.num_reqs:
            if batch.num_tokens == graphs.shape.num_tokens:
                # Padding needs one of the graph's tokens.
                return Reason.NO_FULL_GRAPH
            if not self._owner.req_states.free_indices:
                return Reason.NO_FREE_ROW
        drafting = graphs.drafting
        if drafts_in_blocks(self._owner) and not isinstance(drafting, Reason):
            blocks = captured.blocks.get(batch.num_reqs)
            # The first graph makes the inputs of as many blocks as it has requests.
            if blocks is None or blocks.shape.num_reqs > graphs.shape.num_reqs or isinstance(blocks.drafting, Reason):
                return Reason.LARGER_BATCH
            drafting = dataclasses.replace(drafting, then=blocks.drafting.graph)
        return drafting

    def _needed(self, captured: Captured, rows: np.ndarray) -> SamplerParts | Reason:
        """Return the sampler's parts that `rows` need, or a reason."""
        if not self._plain[rows].all():
            return Reason.SAMPLING_PARAMETERS
        if captured.adapts_logits and self._owner.lora_state.lora_ids[rows].any():
            return Reason.ADAPTERS
        needed = SamplerParts.of(self._owner.sampler.sampling_states, rows, self._splits_top_p)
        return Reason.SAMPLING_PARAMETERS if needed is None or (captured.drawn_by_host and needed.narrows) else needed

    def _write(self, captured: Captured, rows: np.ndarray, query_len: int, logits: LogitsRows | None = None) -> None:
        free = self._owner.req_states.free_indices
        # Without drafting, padding's row is read and not written, so it may be a request's row.
        captured.buffers.write(rows, free[-1] if free else int(rows[0]), query_len, logits)

    def _sampling_alone(
        self, captured: Captured, hidden_states: torch.Tensor, batch: Any, reason: Reason
    ) -> Served | Reason:
        """Return the graph that only samples for `batch`, or a reason.

        `reason` is why graphs do not draft.
        """
        rows, num_rows = batch.idx_mapping_np, batch.num_reqs + batch.num_draft_tokens
        num_logits = None if captured.by_rows else np.diff(batch.cu_num_logits_np)
        if num_logits is None:
            smallest = _holding(captured.by_rows, batch.num_reqs, num_rows)
        else:
            smallest = min(
                (
                    graphs
                    for query_len in captured.most_reqs
                    if (graphs := captured.graphs.get((query_len, batch.num_reqs))) and query_len >= num_logits.max()
                ),
                key=lambda graphs: graphs.shape.num_tokens,
                default=None,
            )
        if smallest is None:
            return Reason.LARGER_BATCH
        if not smallest.sampling:
            return Reason.NOT_CAPTURED
        # With a drafter, vLLM samples a batch without drafts by another sampler than the captured sampler. Graphs by
        # rows are of both samplers, and have few more rows than the batch.
        other = not batch.num_draft_tokens and self._owner.speculator is not None
        if not captured.by_rows and (other or smallest.shape.num_tokens - num_rows > _SURPLUS):
            return reason
        # vLLM computes prompt logprobs after sampling, from the computed part of the prompt before this step.
        if self._scores_prompt[rows].any():
            return Reason.SAMPLING_PARAMETERS
        needed = self._needed(captured, rows)
        if isinstance(needed, Reason):
            return needed
        states = target_states(self._owner)[0]
        gathered = hidden_states.data_ptr() != states.data_ptr()
        if gathered:
            # Only the target's graphs write there, and nothing reads what they wrote.
            torch.index_select(hidden_states, 0, batch.logits_indices, out=states[: len(batch.logits_indices)])
        self._write(captured, rows, smallest.query_len, LogitsRows(batch, gathered, num_logits))
        return smallest.sample(needed)


def _holding(graphs: Sequence[ShapeGraphs], num_reqs: int, num_rows: int) -> ShapeGraphs | None:
    """Return the first graph that holds `num_rows` rows of logits, or None."""
    drafts = num_rows > num_reqs
    for made in graphs:
        rows, reqs = made.shape.num_tokens, made.shape.num_reqs
        # Kernels read the row of a request's next token, and the token after it: padding's are two that no request has.
        # Without drafts each request of a graph has a row.
        spare = 2 if drafts and num_reqs < reqs else 0
        if drafts == (rows > reqs) and num_reqs <= reqs and num_rows + spare <= rows:
            return made
    return None
