# SPDX-License-Identifier: Apache-2.0
"""The tail of a decode step of Model Runner V2 in two CUDA graphs: sampling, and drafting.

After the target's graph vLLM launches dozens of kernels, copies and graphs one by one: logits, rejection, the
requests' new state, and each part of the draft. For a small model the host needs longer for that than the GPU. Here
vLLM's own methods run once for each shape while a graph records them; a step replays the two graphs instead of calling
the methods. There are two because vLLM starts to copy the sampled tokens to the host between them, and drafting should
not delay that. Also, only sampling has variants.

Sampling begins with rows of hidden states, and does not ask whose they are. So the same graphs sample for a batch in
which a prompt is computed, or in which a request has fewer drafts: its rows are put where a decode batch has them.
Drafting goes over all tokens, and is vLLM's own then.

Drafting begins with what was sampled, and does not ask how. So where a request needs more of the sampler than a graph
has, vLLM samples, and the graph drafts.

With vLLM's schedule of numbers of drafts there are graphs for each number, of the batches that it is for. They serve
steps that verify as many drafts as they make; where the number changes, vLLM drafts.

An engine without a drafter may have the graphs of sampling, where it is asked for them. Its batches have no drafts, and
vLLM's sampler for such batches is recorded.

A batch that is not covered takes vLLM's own way, step by step. One thing is kept between steps: which requests the
buffers hold.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_hwplugin import journal
from vllm_hwplugin.fallback import gives_up, stays_stock
from vllm_hwplugin.features import V2_TAIL_GRAPH
from vllm_hwplugin.nwor import runner as nwor
from vllm_hwplugin.spec_decode.builders import updated_in_place
from vllm_hwplugin.spec_decode.decode_batch import GraphShape, asks_for_nothing_else
from vllm_hwplugin.spec_decode.drafters import MASK_METHODS, STANDALONE_METHODS
from vllm_hwplugin.spec_decode.graph_recording import (
    attempt,
    known_arguments,
    record_graph,
    reserved_memory,
    shared_scratch,
)
from vllm_hwplugin.spec_decode.obstacles import Part, decodes_plainly, why_not
from vllm_hwplugin.spec_decode.step_counts import Reason, StepCounts
from vllm_hwplugin.spec_decode.v2.recording import (
    HiddenRows,
    SamplerParts,
    decode_query_len,
    idx_dtype,
    metadata_of_steps,
    recorded_with,
    rows_at_a_time,
    rungs,
    sampling_as,
    scheduled_query_lens,
    splits_top_p,
)
from vllm_hwplugin.spec_decode.v2.tail_buffers import LogitsRows, TailBuffers
from vllm_hwplugin.spec_decode.weights import FusedWeights, Parameters, Touched, around_graphs

if TYPE_CHECKING:
    from vllm_hwplugin.spec_decode.v2.step_inputs import StepInputs

_STOCK: Final = "vLLM's own kernels after the target"

#: Rows of logits that a graph may have more than a batch needs which it does not draft for. A GPU should make them in
#: less time than the host takes for the launches that the graph saves.
_SURPLUS: Final = 128

#: Who does what no graph does.
_HALVES: Final = {Part.V2_SAMPLING: "vLLM samples", Part.V2_DRAFTING: "vLLM drafts"}


@dataclasses.dataclass(frozen=True)
class _Graphs:
    """Those of one shape: of sampling by what a batch needs, and of drafting; or what there is of them."""

    shape: GraphShape
    sampling: dict[SamplerParts, torch.cuda.CUDAGraph]
    drafting: torch.cuda.CUDAGraph | Reason
    # Holds what the recorded update of the drafter's metadata writes.
    metadata: Any = None

    @property
    def query_len(self) -> int:
        """Tokens of each request."""
        return self.shape.num_tokens // self.shape.num_reqs

    def sample(self, needed: SamplerParts | Reason) -> torch.cuda.CUDAGraph | Reason:
        return needed if isinstance(needed, Reason) else self.sampling.get(needed, Reason.NOT_CAPTURED)


@dataclasses.dataclass(frozen=True)
class Held:
    """The requests that the buffers hold.

    Attributes:
        req_ids: in the order of the batch.
        rows: [number of requests], integers: each one's row in the runner's state.
        sampling: what they need of the sampler; or why vLLM samples for them.
        graphs: those that serve them.
    """

    req_ids: list[str]
    rows: np.ndarray
    sampling: SamplerParts | Reason
    graphs: _Graphs


class TailGraphs:
    """The tail graphs of one `GPUModelRunner`, which holds them as `tail_graphs`.

    Each step calls `sample`, `postprocess_sampled`, `propose`, `keep_drafts` and `drafts_of`, in this order. The first
    decides which graphs serve the step.

    Args:
        runner: the runner.
        vllm: has vLLM's own `sample` and `postprocess_sampled`. None: the runner, where nothing overrides them.
    """

    def __init__(self, runner: Any, vllm: Any = None):
        self._runner, self._vllm = runner, runner if vllm is None else vllm
        self._plain = np.zeros(runner.max_num_reqs, dtype=bool)
        self._scores_prompt = np.zeros(runner.max_num_reqs, dtype=bool)
        self._splits_top_p = splits_top_p()
        # Whether FlashInfer may draw where top-k or top-p leaves tokens out. It takes its random numbers from a state
        # that torch has on the host, so a graph would draw the same ones for ever. It never draws beside drafts.
        self._drawn_by_host = False
        # Whether adapters may change logits.
        self._adapts_logits = False
        self._companions: list[StepInputs] = []
        # The halves that no graph can have, and why.
        self._vllms: dict[Part, str] = {}
        self._failed = False
        # Seconds that the recording for vLLM's estimate of memory took.
        self._estimated = 0.0
        self._sampling, self._drafting = StepCounts(V2_TAIL_GRAPH, "sampling"), StepCounts(V2_TAIL_GRAPH, "drafting")
        self._forget()

    def add(self, companion: StepInputs) -> None:
        """Capture `companion` with these graphs from now on."""
        self._companions.append(companion)

    def _forget(self) -> None:
        self._graphs: list[_Graphs] = []
        self._buffers: TailBuffers | None = None
        self._pool: Any = None
        self._scratch: list[torch.Tensor] = []
        self._fused: FusedWeights | None = None
        self._parameters: Parameters | None = None
        self._touched = Touched()
        self._read_whole: torch.nn.Module | None = None
        self._output: Any = None
        # Whether this step's sampling is done, and not yet what follows it.
        self._sampled = False
        # What was sampled, and not yet drafted for.
        self._batch: Any = None
        # Of this step, where a graph made them.
        self._drafts: torch.Tensor | None = None
        # That of this step, or why vLLM drafts.
        self._drafting_graph: torch.cuda.CUDAGraph | Reason = Reason.NOT_CAPTURED
        # Of this step or of the last, as long as graphs draft for them; None where another step came after it.
        self.held: Held | None = None
        # By tokens of a request and number of requests.
        self._served: dict[tuple[int, int], _Graphs] = {}
        self._batches: dict[tuple[int, int], Any] = {}
        #: By tokens of a request, how many requests the largest graph has.
        self.most_reqs: dict[int, int] = {}
        for companion in self._companions:
            companion.forget()

    # -- a start ------------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Record all graphs: the last thing that `capture_model` captures.

        From 0.29 on vLLM measures what graphs need before there is a KV cache, and captures its largest for that. The
        largest here is recorded then, too, and the smaller ones use its memory; the real capture lets it go.

        Raises:
            FeatureRequired: nothing can be recorded, and the feature's gate says `on`.
        """
        self._forget()
        runner = self._runner
        if self._failed or (runner.speculator is None and not decodes_plainly(runner)):
            return
        profile_only = getattr(runner.cudagraph_manager, "_max_full_descs_to_capture", None) is not None
        self._vllms = {part: reason for part in _HALVES if (reason := why_not(runner, part)) is not None}
        # Without a drafter nobody drafts.
        halves = _HALVES if runner.speculator is not None else (Part.V2_SAMPLING,)
        left = {part: reason for part, reason in self._vllms.items() if part in halves}
        reason = why_not(runner, Part.V2_SAMPLING | Part.V2_DRAFTING) if len(self._vllms) == len(_HALVES) else None
        shapes = [] if reason else self._shapes()[: 1 if profile_only else None]
        if not shapes:
            if not profile_only:
                stays_stock(V2_TAIL_GRAPH, _STOCK, reason or "the target has no FULL graph of a decode batch")
                self._leave_companions("there are no tail graphs")
            return
        started, reserved = time.perf_counter(), reserved_memory()
        with graph_capture(device=runner.device):
            # Within: where it fails, the ranks leave the context together.
            self._failed = not attempt(V2_TAIL_GRAPH, _STOCK, lambda: self._record(shapes), self._forget)
            # vLLM's drafter takes what metadata the target had.
            asked_for = _HALVES[Part.V2_DRAFTING] if Part.V2_DRAFTING in left else None
            for companion in () if self._failed or profile_only else self._companions:
                assert self._buffers is not None
                with self._touched:
                    companion.capture(self._batches, self._buffers, self._pool, asked_for)
                self._watch()
        runner.req_states.draft_tokens.zero_()
        torch.accelerator.synchronize()
        if self._failed:
            self._leave_companions("there are no tail graphs")
            return
        if profile_only:
            self._estimated = time.perf_counter() - started
            return
        # The smallest graph that holds a batch, which was recorded last.
        for graphs in self._graphs:
            self.most_reqs.setdefault(graphs.query_len, graphs.shape.num_reqs)
            for count in range(1, graphs.shape.num_reqs + 1):
                self._served[graphs.query_len, count] = graphs
        journal.note(
            V2_TAIL_GRAPH,
            f"{len(shapes)} shapes of at most {max(self.most_reqs.values())} requests, captured in "
            f"{time.perf_counter() - started:.1f} s, {(reserved_memory() - reserved) / 2**20:.0f} MiB"
            + (f"; the largest before that, for vLLM's estimate, in {self._estimated:.1f} s" if self._estimated else "")
            + "".join(f"; {_HALVES[part]}: {reason}" for part, reason in left.items()),
        )
        journal.use(V2_TAIL_GRAPH, True)

    def _leave_companions(self, reason: str) -> None:
        for companion in self._companions:
            companion.stay_stock(reason)

    def _shapes(self) -> list[GraphShape]:
        """Those in which the target decodes in a FULL graph, largest first, also where it has few of them so far.

        With a schedule, of each number of drafts those that hold a batch which it is for.
        """
        manager = self._runner.cudagraph_manager
        planned = manager._capture_descs.get(CUDAGraphMode.FULL, ())
        found = [(desc.num_reqs, desc.uniform_token_count) for desc in planned]
        return rungs(found, scheduled_query_lens(self._runner))

    def _record(self, shapes: Sequence[GraphShape]) -> None:
        runner = self._runner
        most = max(shape.num_reqs for shape in shapes)
        self._drawn_by_host = runner.speculator is None and runner.sampler.use_flashinfer
        chunk_rows = rows_at_a_time(runner.sampler.sampling_states.vocab_size)
        self._buffers = TailBuffers(runner, most, runner.decode_query_len, idx_dtype(runner), chunk_rows)
        self._pool = torch.cuda.graph_pool_handle()
        if runner.lora_config is not None:
            self._adapts_logits = any(isinstance(one, LogitsProcessorWithLoRA) for one in runner.model.modules())
            # The target's last graph may have been for adapters. Without any, vLLM launches no kernel for them.
            none = (0,) * shapes[0].num_tokens
            runner._set_active_loras(none, none, set())
        draft = getattr(runner.speculator, "model", None)
        method = runner.speculative_config.method if Part.V2_DRAFTING not in self._vllms else None
        # vLLM has no graphs of a standalone draft model.
        standalone = method in STANDALONE_METHODS
        self._touched = Touched(None if standalone else draft)
        self._read_whole = draft if standalone else None
        with self._touched:
            for shape in shapes:
                self._graphs.append(self._capture_shape(shape, self._pool))
        self._scratch = shared_scratch()
        self._watch()
        if method in MASK_METHODS:
            self._fused = FusedWeights(draft)

    def _watch(self) -> None:
        """Watch the modules that what was recorded so far has called, and the heads."""
        models = {
            Part.V2_SAMPLING: self._runner.model,
            Part.V2_DRAFTING: getattr(self._runner.speculator, "model", None),
        }
        places: list[tuple[Any, str]] = [*self._touched.places(*models.values())]
        for part in models.keys() - self._vllms.keys():
            places += around_graphs(models[part])
        self._parameters = Parameters(self._read_whole, places=places)

    def _capture_shape(self, shape: GraphShape, pool: Any) -> _Graphs:
        runner, buffers = self._runner, self._buffers
        assert buffers is not None
        query_len = shape.num_tokens // shape.num_reqs
        buffers.clear(query_len)
        # Before vLLM prepares the inputs, because a dummy batch writes into them.
        chunks = [self._chunk(shape, first) for first in range(0, shape.num_reqs, buffers.chunk_reqs(query_len))]
        # For each of the two runs: the first kernel that reads a plan of FlashMLA's makes it, and a recorded one must.
        prepared = [
            prepare_inputs_to_capture(
                shape.num_reqs,
                shape.num_tokens,
                runner.model_state,
                runner.input_buffers,
                runner.block_tables,
                runner.attn_groups,
                runner.kv_cache_config,
                **known_arguments(prepare_inputs_to_capture, full_cudagraph=True, max_query_len=query_len),
            )
            for _ in range(2)
        ]
        batch = self._batches[query_len, shape.num_reqs] = self._recorded_batch(slice(shape.num_reqs), query_len)
        sampling = {}
        for needed in () if Part.V2_SAMPLING in self._vllms else SamplerParts:
            if self._drawn_by_host and needed.narrows:
                continue
            with sampling_as(runner.sampler, needed), buffers.stand_in():
                sampling[needed] = record_graph(lambda: self._sample(batch, chunks), pool, runner.vllm_config)
        if Part.V2_DRAFTING in self._vllms:
            return _Graphs(shape, sampling, Reason.NOT_CAPTURED)
        with metadata_of_steps(runner.speculator) if updated_in_place(runner.speculator) else nullcontext() as metadata:
            drafting = record_graph(lambda: self._draft(batch, query_len, *prepared.pop()), pool, runner.vllm_config)
        return _Graphs(shape, sampling, drafting, metadata)

    def _recorded_batch(self, reqs: slice, query_len: int) -> Any:
        """Return a decode batch of vLLM's `InputBatch`, of these requests of the buffers."""
        runner, buffers = self._runner, self._buffers
        assert buffers is not None
        first, end = reqs.start or 0, reqs.stop
        num_reqs, rows = end - first, slice(first * query_len, end * query_len)
        start_loc = torch.arange(num_reqs + 1, dtype=torch.int32, device=runner.device) * query_len
        start_loc_np: Any = np.arange(num_reqs + 1, dtype=np.int32) * query_len
        full: Any = np.full(num_reqs, query_len - 1, dtype=np.int32)
        return dataclasses.replace(
            InputBatch.make_dummy(num_reqs, num_reqs * query_len, runner.input_buffers),
            idx_mapping=buffers.idx_mapping(end)[first:],
            # The row that `sampling_as` has prepared.
            idx_mapping_np=np.zeros(num_reqs, dtype=np.intp),
            expanded_idx_mapping=buffers.expanded_idx_mapping[rows],
            expanded_local_pos=buffers.local_pos[rows],
            num_draft_tokens=int(full.sum()),
            num_draft_tokens_per_req=full if full.any() else None,
            query_start_loc=start_loc,
            query_start_loc_np=start_loc_np,
            seq_lens=runner.input_buffers.seq_lens[first:end],
            cu_num_logits=buffers.cu_num_logits[first : end + 1],
            cu_num_logits_np=start_loc_np,
            logits_indices=buffers.logits_indices[rows],
            # What depends on the length of sequences on the host has to hold for the longest.
            seq_lens_cpu_upper_bound=torch.full((num_reqs,), runner.max_model_len, dtype=torch.int32),
        )

    def _chunk(self, shape: GraphShape, first: int) -> tuple[slice, Any]:
        """Return the requests of the graph that are sampled at a time, from `first` on, and their batch.

        A batch with a prompt has more tokens than one that decodes, so the batch names all of the inputs.
        """
        buffers, inputs = self._buffers, self._runner.input_buffers
        assert buffers is not None
        query_len = shape.num_tokens // shape.num_reqs
        reqs = slice(first, min(first + buffers.chunk_reqs(query_len), shape.num_reqs))
        return reqs, dataclasses.replace(
            self._recorded_batch(reqs, query_len),
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            query_start_loc=inputs.query_start_loc[first : reqs.stop + 1],
        )

    def _sample(self, batch: Any, chunks: Sequence[tuple[slice, Any]]) -> None:
        """From the target's hidden states to the requests' new state; the chunks' logits share their memory."""
        runner, buffers = self._runner, self._buffers
        assert buffers is not None
        num_reqs, kept, query_len = batch.num_reqs, buffers.outputs, batch.num_tokens // batch.num_reqs
        with nwor.deferred(runner):
            for reqs, chunk in chunks:
                if reqs.start:
                    starts = chunk.cu_num_logits
                    chunk = dataclasses.replace(chunk, cu_num_logits=starts - starts[0])
                rows = buffers.hidden_rows[reqs.start * query_len : reqs.stop * query_len]
                hidden_states: Any = HiddenRows(self._target()[0], rows)
                output, num_sampled, num_rejected = self._vllm.sample(hidden_states, chunk, None)
                kept.sampled_token_ids[reqs].copy_(output.sampled_token_ids)
                kept.num_sampled[reqs].copy_(num_sampled)
                kept.num_rejected[reqs].copy_(num_rejected)
                self._output = output
        nwor.restore(runner, num_rejected=kept.num_rejected[:num_reqs], num_draft_tokens=batch.num_draft_tokens)
        self._vllm.postprocess_sampled(
            buffers.idx_mapping_alive(num_reqs),
            kept.sampled_token_ids[:num_reqs],
            kept.num_sampled[:num_reqs],
            kept.num_rejected[:num_reqs],
            runner.input_buffers.query_start_loc[: num_reqs + 1],
        )

    def _draft(self, batch: Any, query_len: int, metadata: Any, slots: Any) -> None:
        """From the requests' new state to the next draft tokens, and these into the requests' state."""
        runner, buffers = self._runner, self._buffers
        assert buffers is not None
        num_reqs, kept = batch.num_reqs, buffers.outputs
        hidden_states, aux_hidden_states = self._target()
        # From 0.32 on. Before, vLLM always drafts as many as there are at most.
        asked = known_arguments(runner.speculator.propose, num_speculative_tokens=query_len - 1)
        padding = buffers.padding(num_reqs, query_len)
        # Rows of padding hold what a step with other requests left, maybe a graph of longer ones.
        num_sampled, num_rejected = (
            counts[:num_reqs] * padding.alive for counts in (kept.num_sampled, kept.num_rejected)
        )
        with recorded_with(padding):
            drafts = runner.speculator.propose(
                batch,
                metadata,
                slots,
                self._draft_hidden_states(hidden_states)[: batch.num_tokens],
                None if aux_hidden_states is None else [one[: batch.num_tokens] for one in aux_hidden_states],
                num_sampled,
                num_rejected,
                runner.req_states.last_sampled_tokens,
                runner.req_states.next_prefill_tokens,
                buffers.temperature,
                buffers.seeds,
                # That is, without graphs of its own: a graph cannot be replayed while another is recorded.
                is_profile=True,
                **asked,
            )
        if asked:
            drafts[:, query_len - 1 :] = -1
        runner.req_states.draft_tokens[batch.idx_mapping] = drafts

    def _target(self) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """What the target's FULL graphs leave, of the largest batch."""
        manager = self._runner.cudagraph_manager
        return manager.hidden_states, manager.aux_hidden_states if manager.use_aux_hidden_state_outputs else None

    def _draft_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the drafter gets of the target, as `sample_tokens` finds it."""
        model = self._runner.model
        states = model.get_mtp_target_hidden_states() if hasattr(model, "get_mtp_target_hidden_states") else None
        # From 0.32 on, of a model that keeps none for a drafter of this kind.
        return hidden_states if states is None else states

    # -- a request ----------------------------------------------------------------------------------------------------

    def add_request(self, row: int, params: Any) -> None:
        """Note whether graphs can sample for a request of these `SamplingParams`."""
        self._plain[row] = asks_for_nothing_else(params)
        self._scores_prompt[row] = params.prompt_logprobs is not None

    # -- a step -------------------------------------------------------------------------------------------------------

    def sample(self, hidden_states: torch.Tensor, batch: Any, grammar_output: Any) -> Any:
        """`GPUModelRunner.sample`, and `postprocess_sampled` with it where a graph serves."""
        self.follow_weights()
        self._sampled, self._drafts, self._batch = False, None, batch
        grammar = grammar_output is not None or batch.has_structured_output_reqs
        sampling, self._drafting_graph = self._graphs_for(hidden_states, batch, grammar)
        if isinstance(sampling, Reason):
            self._sampling.missed(sampling)
            sampled = self._vllm.sample(hidden_states, batch, grammar_output)
            if not isinstance(self._drafting_graph, Reason):
                self._hand_over(*sampled[1:])
            return sampled
        assert self._buffers is not None
        # What the step before left is copied to the host on another stream.
        self._runner.main_stream.wait_stream(self._runner.output_copy_stream)
        self._sampled = True
        self._sampling.served()
        sampling.replay()
        count, kept = batch.num_reqs, self._buffers.outputs
        num_sampled, num_rejected = kept.num_sampled[:count], kept.num_rejected[:count]
        nwor.replayed(self._runner, num_rejected)
        output = dataclasses.replace(
            self._output,
            sampled_token_ids=kept.sampled_token_ids[:count],
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )
        return output, num_sampled, num_rejected

    def _hand_over(self, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> None:
        """Have drafting read what vLLM has sampled: for each request of the batch, how many tokens of either kind."""
        assert self._buffers is not None
        kept, count = self._buffers.outputs, len(num_sampled)
        # As in a step that a graph samples for, which may have been the one before.
        self._runner.main_stream.wait_stream(self._runner.output_copy_stream)
        kept.num_sampled[:count].copy_(num_sampled)
        kept.num_rejected[:count].copy_(num_rejected)

    def postprocess_sampled(self, *arguments: Any, **settings: Any) -> None:
        """Update the requests' state, unless the graph that sampled has done it."""
        done, self._sampled = self._sampled, False
        if not done:
            self._vllm.postprocess_sampled(*arguments, **settings)

    def propose(
        self, vllms: Callable[..., torch.Tensor], input_batch: Any, *arguments: Any, **settings: Any
    ) -> torch.Tensor:
        """Draft for the batch that was sampled. vLLM drafts for any other, such as a dummy batch.

        Args:
            vllms: the speculator's own `propose`.
            input_batch: vLLM's batch. What follows is for its speculator.
        """
        batch, self._batch = self._batch, None
        if input_batch is not batch:
            return vllms(input_batch, *arguments, **settings)
        speculator, graph, held = self._runner.speculator, self._drafting_graph, self.held
        wanted = settings.get("num_speculative_tokens")
        if held is not None and wanted is not None and wanted != held.graphs.query_len - 1:
            graph = Reason.FEWER_DRAFTS
        if isinstance(graph, Reason):
            self._drafting.missed(graph)
            return vllms(input_batch, *arguments, **settings)
        self._drafting.served()
        graph.replay()
        # Those of n-grams have a name of their own.
        kept = speculator.drafts if hasattr(speculator, "drafts") else speculator.draft_tokens
        drafts: torch.Tensor = kept[: batch.num_reqs]
        # Those of a batch with a grammar are copied to the host on another stream.
        self._drafts = drafts.clone() if batch.has_structured_output_reqs else drafts
        return drafts

    def keep_drafts(self, *, idx_mapping: torch.Tensor, draft_tokens: torch.Tensor) -> None:
        """Put the drafts into the requests' state, where that has not been done."""
        if self._drafts is None:
            self._runner.req_states.draft_tokens[idx_mapping] = draft_tokens

    def drafts_of(self, idx_mapping: torch.Tensor) -> torch.Tensor:
        """The drafts in the requests' state, in the order of the batch."""
        return self._runner.req_states.draft_tokens[idx_mapping] if self._drafts is None else self._drafts

    def follow_weights(self) -> None:
        """Have graphs read new weights; give the graphs up if these do not fit or lie elsewhere.

        Before a step's inputs are made, because vLLM's drafter takes more of them than a graph leaves; and where no
        graph makes these, before the step is sampled.
        """
        reason = None if self._parameters is None else self._parameters.moved()
        if reason is None and self._fused is not None:
            reason = self._fused.keep_in_place()
        if reason is not None:
            for companion in self._companions:
                companion.give_up(reason)
            self._forget()
            gives_up(V2_TAIL_GRAPH, _STOCK, reason)

    def _graphs_for(
        self, hidden_states: torch.Tensor, batch: Any, grammar: bool
    ) -> tuple[torch.cuda.CUDAGraph | Reason, torch.cuda.CUDAGraph | Reason]:
        """The graphs that sample and draft for this batch, of which the buffers then hold the requests.

        Each may be the reason why vLLM does it.
        """
        if not self._served:
            return Reason.NOT_CAPTURED, Reason.NOT_CAPTURED
        found = decode_query_len(batch, self.most_reqs)
        if not isinstance(found, Reason):
            if batch.num_reqs > self.most_reqs[found]:
                found = Reason.LARGER_BATCH
            elif hidden_states.data_ptr() != self._target()[0].data_ptr():
                found = Reason.NO_FULL_GRAPH
            else:
                held = self.hold(batch.req_ids, batch.idx_mapping_np, found, batch.num_tokens_after_padding)
                if isinstance(held, Held):
                    sampling = Reason.STRUCTURED_OUTPUT if grammar else held.sampling
                    return held.graphs.sample(sampling), held.graphs.drafting
                found = held
        self.held = None
        return Reason.STRUCTURED_OUTPUT if grammar else self._sampling_alone(hidden_states, batch, found), found

    def hold(self, req_ids: list[str], rows: np.ndarray, query_len: int, num_tokens: int) -> Held | Reason:
        """Have the buffers hold these requests, or say why graphs do not serve them.

        Args:
            req_ids: each past its prompt and with equally many drafts, in the order of the batch; at most as many as
                `most_reqs` has for `query_len`.
            rows: [number of requests], integers: each one's row in the runner's state.
            query_len: tokens of each.
            num_tokens: of the batch, with padding.
        """
        found = self._served[query_len, len(req_ids)]
        if num_tokens != found.shape.num_tokens:
            return Reason.NO_FULL_GRAPH
        # A request that gets another row is prefilled in its next step, which ends what is held.
        if self.held is not None and found is self.held.graphs and req_ids == self.held.req_ids:
            return self.held
        drafts, padded = not isinstance(found.drafting, Reason), len(rows) < found.shape.num_reqs
        # Drafting writes to the row of padding.
        if drafts and padded and not self._runner.req_states.free_indices:
            return Reason.NO_FREE_ROW
        self._write(rows, query_len)
        self.held = Held(req_ids, rows, self._needed(rows), found)
        return self.held

    def _needed(self, rows: np.ndarray) -> SamplerParts | Reason:
        """What the requests at `rows` need of the sampler; or why no graph samples for them."""
        if not self._plain[rows].all():
            return Reason.SAMPLING_PARAMETERS
        if self._adapts_logits and self._runner.lora_state.lora_ids[rows].any():
            return Reason.ADAPTERS
        needed = SamplerParts.of(self._runner.sampler.sampling_states, rows, self._splits_top_p)
        return Reason.SAMPLING_PARAMETERS if needed is None or (self._drawn_by_host and needed.narrows) else needed

    def _write(self, rows: np.ndarray, query_len: int, logits: LogitsRows | None = None) -> None:
        assert self._buffers is not None
        free = self._runner.req_states.free_indices
        # What does not draft reads the row of padding and writes nothing there, so it may be a request's.
        self._buffers.write(rows, free[-1] if free else int(rows[0]), query_len, logits)

    def _sampling_alone(self, hidden_states: torch.Tensor, batch: Any, reason: Reason) -> torch.cuda.CUDAGraph | Reason:
        """The graph that samples for a batch which graphs do not draft for; or why vLLM samples.

        Args:
            reason: why graphs do not draft.
        """
        rows, num_logits = batch.idx_mapping_np, np.diff(batch.cu_num_logits_np)
        num_rows = int(num_logits.sum())
        found = min(
            (
                graphs
                for query_len in self.most_reqs
                if (graphs := self._served.get((query_len, batch.num_reqs))) and query_len >= num_logits.max()
            ),
            key=lambda graphs: graphs.shape.num_tokens,
            default=None,
        )
        if found is None:
            return Reason.LARGER_BATCH
        if not found.sampling:
            return Reason.NOT_CAPTURED
        # Beside a drafter, a batch without drafts has another sampler of vLLM's than the one that was recorded.
        if (
            not batch.num_draft_tokens and self._runner.speculator is not None
        ) or found.shape.num_tokens - num_rows > _SURPLUS:
            return reason
        # vLLM scores a prompt after it has sampled, by how much of it was computed before.
        if self._scores_prompt[rows].any():
            return Reason.SAMPLING_PARAMETERS
        needed = self._needed(rows)
        if isinstance(needed, Reason):
            return needed
        states = self._target()[0]
        gathered = hidden_states.data_ptr() != states.data_ptr()
        if gathered:
            # The target's own graphs alone write there, and nobody reads what they left.
            torch.index_select(hidden_states, 0, batch.logits_indices, out=states[: len(batch.logits_indices)])
        ends = batch.query_start_loc_np[1 : 1 + batch.num_reqs]
        self._write(rows, found.query_len, LogitsRows(num_logits, ends, gathered))
        return found.sample(needed)

    def held_batch(self) -> Any:
        """A decode batch of the requests that are held, as vLLM's `prepare_inputs` makes it.

        Its tensors are those that graphs read and write. It leaves out how many tokens each request has on the host.
        """
        held, buffers, runner = self.held, self._buffers, self._runner
        assert held is not None
        assert buffers is not None
        shape, query_len = held.graphs.shape, held.graphs.query_len
        num_reqs, num_tokens = len(held.req_ids), len(held.req_ids) * query_len
        recorded, states = self._batches[query_len, shape.num_reqs], runner.req_states
        start_loc: Any = np.minimum(np.arange(shape.num_reqs + 1), num_reqs).astype(np.int32) * np.int32(query_len)
        return dataclasses.replace(
            recorded,
            req_ids=held.req_ids,
            num_reqs=num_reqs,
            num_reqs_after_padding=shape.num_reqs,
            idx_mapping=buffers.idx_mapping(num_reqs),
            idx_mapping_np=held.rows,
            expanded_idx_mapping=recorded.expanded_idx_mapping[:num_tokens],
            expanded_local_pos=recorded.expanded_local_pos[:num_tokens],
            num_scheduled_tokens=np.full(num_reqs, query_len, dtype=np.int32),
            num_tokens=num_tokens,
            num_tokens_after_padding=shape.num_tokens,
            num_draft_tokens=num_tokens - num_reqs,
            num_draft_tokens_per_req=None if query_len == 1 else recorded.num_draft_tokens_per_req[:num_reqs],
            query_start_loc=runner.input_buffers.query_start_loc[: shape.num_reqs + 1],
            query_start_loc_np=start_loc,
            prefill_len_np=states.prefill_len.np[held.rows],
            num_computed_prefill_tokens_np=states.num_computed_prefill_tokens[held.rows],
            is_prefilling_np=np.zeros(num_reqs, dtype=bool),
            logits_indices=recorded.logits_indices[:num_tokens],
            cu_num_logits=recorded.cu_num_logits[: num_reqs + 1],
            cu_num_logits_np=recorded.cu_num_logits_np[: num_reqs + 1],
        )
