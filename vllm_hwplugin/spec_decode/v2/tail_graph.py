# SPDX-License-Identifier: Apache-2.0
"""Sample and draft in two CUDA graphs per decode step (Model Runner V2).

After the target's graph vLLM launches dozens of kernels, copies and graphs one by one: logits, rejection, the requests'
new state, and each part of the draft. For a small model the launches take longer than the GPU's work. Here a graph
captures vLLM's own methods for each shape, and a step replays two graphs instead of calling the methods. There are two
because vLLM starts to copy the sampled tokens to the host between them, and drafting should not delay that. Also, only
sampling has variants.

Sampling starts from rows of hidden states, whichever requests they belong to. So the same graphs sample for a batch
with a prompt or with unequal draft counts: its rows are put where a decode batch has them. Drafting processes all
tokens, and vLLM drafts for such a batch.

Drafting starts from the sampled tokens. So if a request needs more of the sampler than a graph has, vLLM samples, and
the graph drafts.

With vLLM's schedule of draft counts there are graphs for each count and its batch sizes. They cover steps that verify
as many drafts as they make. When the count changes, vLLM drafts.

An engine without a drafter has the sampling graphs only if it is asked for them. Its batches have no drafts, and the
graphs capture vLLM's sampler for such batches.

vLLM samples and drafts for any other batch. Between steps only the requests in the buffers are kept.
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

#: Surplus rows of logits that a graph may compute for a batch that it does not draft for. The GPU should take less time
#: for them than the host takes for the launches that the graph saves.
_SURPLUS: Final = 128

#: The parts of a step, with the words for the case that vLLM does the part.
_HALVES: Final = {Part.V2_SAMPLING: "vLLM samples", Part.V2_DRAFTING: "vLLM drafts"}


@dataclasses.dataclass(frozen=True)
class _Graphs:
    """The graphs of one shape: sampling by needed parts, and drafting or why vLLM drafts."""

    shape: GraphShape
    sampling: dict[SamplerParts, torch.cuda.CUDAGraph]
    drafting: torch.cuda.CUDAGraph | Reason
    # Keeps the tensors alive that the captured update of the drafter's metadata writes.
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
        rows: [number of requests], integers: rows in the runner's state.
        sampling: the sampler's parts that they need, or why vLLM samples.
        graphs: the graphs that cover them.
    """

    req_ids: list[str]
    rows: np.ndarray
    sampling: SamplerParts | Reason
    graphs: _Graphs


class TailGraphs:
    """The sampling and drafting graphs of one `GPUModelRunner`, which holds them as `tail_graphs`.

    Each step calls `sample`, `postprocess_sampled`, `propose`, `keep_drafts` and `drafts_of`, in this order. `sample`
    chooses the step's graphs.

    Args:
        runner: the runner.
        vllm: has vLLM's own `sample` and `postprocess_sampled`. None: the runner, if nothing overrides them.
    """

    def __init__(self, runner: Any, vllm: Any = None):
        self._runner, self._vllm = runner, runner if vllm is None else vllm
        self._plain = np.zeros(runner.max_num_reqs, dtype=bool)
        self._scores_prompt = np.zeros(runner.max_num_reqs, dtype=bool)
        self._splits_top_p = splits_top_p()
        # Whether FlashInfer may sample if top-k or top-p removes tokens. Its random numbers come from a state that
        # torch keeps on the host, so each replay would draw the same numbers. It never samples a batch with drafts.
        self._drawn_by_host = False
        # Whether adapters may change logits.
        self._adapts_logits = False
        self._companions: list[StepInputs] = []
        # The parts that no graph can have, and why.
        self._vllms: dict[Part, str] = {}
        self._failed = False
        # Seconds that the capture for vLLM's memory estimate took.
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
        # Whether a graph has sampled in this step, and `postprocess_sampled` is still to come.
        self._sampled = False
        # The batch that was sampled and is not drafted for yet.
        self._batch: Any = None
        # This step's drafts, if a graph made them.
        self._drafts: torch.Tensor | None = None
        # This step's graph, or why vLLM drafts.
        self._drafting_graph: torch.cuda.CUDAGraph | Reason = Reason.NOT_CAPTURED
        # The requests in the buffers, from this step or the last. None after a step that graphs do not draft for.
        self.held: Held | None = None
        # By (tokens of a request, number of requests).
        self._served: dict[tuple[int, int], _Graphs] = {}
        self._batches: dict[tuple[int, int], Any] = {}
        #: Requests of the largest graph, by tokens of a request.
        self.most_reqs: dict[int, int] = {}
        for companion in self._companions:
            companion.forget()

    # -- a start ------------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Capture all graphs, as the last captures of `capture_model`.

        From 0.29 vLLM estimates the memory of graphs before there is a KV cache, and captures its largest graphs for
        that. The graphs of the largest shape here are then captured too; smaller shapes use the same memory. The real
        capture frees them first.

        Raises:
            FeatureRequired: no graph can be captured, and the feature's switch is `on`.
        """
        self._forget()
        runner = self._runner
        if self._failed or (runner.speculator is None and not decodes_plainly(runner)):
            return
        profile_only = getattr(runner.cudagraph_manager, "_max_full_descs_to_capture", None) is not None
        self._vllms = {part: reason for part in _HALVES if (reason := why_not(runner, part)) is not None}
        # Without a drafter nothing drafts.
        parts = _HALVES if runner.speculator is not None else (Part.V2_SAMPLING,)
        left = {part: reason for part, reason in self._vllms.items() if part in parts}
        reason = why_not(runner, Part.V2_SAMPLING | Part.V2_DRAFTING) if len(self._vllms) == len(_HALVES) else None
        shapes = [] if reason else self._shapes()[: 1 if profile_only else None]
        if not shapes:
            if not profile_only:
                stays_stock(V2_TAIL_GRAPH, _STOCK, reason or "the target has no FULL graph of a decode batch")
                self._leave_companions("there are no graphs of sampling and drafting")
            return
        started, reserved = time.perf_counter(), reserved_memory()
        with graph_capture(device=runner.device):
            # Inside the context, so that the ranks leave it together if the capture fails.
            self._failed = not attempt(V2_TAIL_GRAPH, _STOCK, lambda: self._record(shapes), self._forget)
            # vLLM's drafter reads the target's attention metadata.
            asked_for = _HALVES[Part.V2_DRAFTING] if Part.V2_DRAFTING in left else None
            for companion in () if self._failed or profile_only else self._companions:
                assert self._buffers is not None
                with self._touched:
                    companion.capture(self._batches, self._buffers, self._pool, asked_for)
                self._watch()
        runner.req_states.draft_tokens.zero_()
        torch.accelerator.synchronize()
        if self._failed:
            self._leave_companions("there are no graphs of sampling and drafting")
            return
        if profile_only:
            self._estimated = time.perf_counter() - started
            return
        # The smallest graph that holds a batch was captured last, and replaces larger graphs.
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
        """Return the shapes of the target's FULL decode graphs, largest first.

        Planned graphs count, also before their capture. With a schedule of draft counts, each count has the shapes of
        its batch sizes.
        """
        manager = self._runner.cudagraph_manager
        planned = manager._capture_descs.get(CUDAGraphMode.FULL, ())
        full_graphs = [(desc.num_reqs, desc.uniform_token_count) for desc in planned]
        return rungs(full_graphs, scheduled_query_lens(self._runner))

    def _record(self, shapes: Sequence[GraphShape]) -> None:
        runner = self._runner
        most = max(shape.num_reqs for shape in shapes)
        self._drawn_by_host = runner.speculator is None and runner.sampler.use_flashinfer
        chunk_rows = rows_at_a_time(runner.sampler.sampling_states.vocab_size)
        self._buffers = TailBuffers(runner, most, runner.decode_query_len, idx_dtype(runner), chunk_rows)
        self._pool = torch.cuda.graph_pool_handle()
        if runner.lora_config is not None:
            self._adapts_logits = any(isinstance(module, LogitsProcessorWithLoRA) for module in runner.model.modules())
            # The target's last graph may have been for adapters. Without active adapters vLLM launches no LoRA kernels.
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
        """Watch the weights of the modules captured so far, and of heads."""
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
        # Before vLLM prepares the inputs, because making a dummy batch overwrites them.
        chunks = [self._chunk(shape, first) for first in range(0, shape.num_reqs, buffers.chunk_reqs(query_len))]
        # Metadata for the warm-up and for the capture: the first kernel that reads a FlashMLA plan computes it, and the
        # captured kernel must compute it too.
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
        """Return a decode batch of the buffers' requests `reqs`."""
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
            # The row that `sampling_as` prepares.
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
            # Choices that the host makes by sequence length must hold for the longest.
            seq_lens_cpu_upper_bound=torch.full((num_reqs,), runner.max_model_len, dtype=torch.int32),
        )

    def _chunk(self, shape: GraphShape, first: int) -> tuple[slice, Any]:
        """Return the requests sampled together from `first`, and their batch.

        A batch with a prompt has more tokens than a decode batch, so this batch refers to all inputs.
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
        """Sample from the target's hidden states, and update the requests' state."""
        runner, buffers = self._runner, self._buffers
        assert buffers is not None
        num_reqs, outputs, query_len = batch.num_reqs, buffers.outputs, batch.num_tokens // batch.num_reqs
        with nwor.deferred(runner):
            # The chunks' logits share memory.
            for reqs, chunk in chunks:
                if reqs.start:
                    starts = chunk.cu_num_logits
                    chunk = dataclasses.replace(chunk, cu_num_logits=starts - starts[0])
                rows = buffers.hidden_rows[reqs.start * query_len : reqs.stop * query_len]
                hidden_states: Any = HiddenRows(self._target()[0], rows)
                output, num_sampled, num_rejected = self._vllm.sample(hidden_states, chunk, None)
                outputs.sampled_token_ids[reqs].copy_(output.sampled_token_ids)
                outputs.num_sampled[reqs].copy_(num_sampled)
                outputs.num_rejected[reqs].copy_(num_rejected)
                self._output = output
        nwor.restore(runner, num_rejected=outputs.num_rejected[:num_reqs], num_draft_tokens=batch.num_draft_tokens)
        self._vllm.postprocess_sampled(
            buffers.idx_mapping_alive(num_reqs),
            outputs.sampled_token_ids[:num_reqs],
            outputs.num_sampled[:num_reqs],
            outputs.num_rejected[:num_reqs],
            runner.input_buffers.query_start_loc[: num_reqs + 1],
        )

    def _draft(self, batch: Any, query_len: int, metadata: Any, slots: Any) -> None:
        """Draft from the requests' new state, and put the drafts into it."""
        runner, buffers = self._runner, self._buffers
        assert buffers is not None
        num_reqs, outputs = batch.num_reqs, buffers.outputs
        hidden_states, aux_hidden_states = self._target()
        # From 0.32. Earlier versions always make the largest number of drafts.
        asked = known_arguments(runner.speculator.propose, num_speculative_tokens=query_len - 1)
        padding = buffers.padding(num_reqs, query_len)
        # Rows of padding hold results of a step with other requests, maybe of a graph with longer requests.
        num_sampled, num_rejected = (
            counts[:num_reqs] * padding.alive for counts in (outputs.num_sampled, outputs.num_rejected)
        )
        with recorded_with(padding):
            drafts = runner.speculator.propose(
                batch,
                metadata,
                slots,
                self._draft_hidden_states(hidden_states)[: batch.num_tokens],
                None if aux_hidden_states is None else [layer[: batch.num_tokens] for layer in aux_hidden_states],
                num_sampled,
                num_rejected,
                runner.req_states.last_sampled_tokens,
                runner.req_states.next_prefill_tokens,
                buffers.temperature,
                buffers.seeds,
                # `is_profile`: without vLLM's graphs. A graph cannot be replayed while another is captured.
                is_profile=True,
                **asked,
            )
        if asked:
            drafts[:, query_len - 1 :] = -1
        runner.req_states.draft_tokens[batch.idx_mapping] = drafts

    def _target(self) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Return the output tensors of the target's FULL graphs, at full size."""
        manager = self._runner.cudagraph_manager
        return manager.hidden_states, manager.aux_hidden_states if manager.use_aux_hidden_state_outputs else None

    def _draft_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the target's states that the drafter reads, as `sample_tokens` does."""
        model = self._runner.model
        states = model.get_mtp_target_hidden_states() if hasattr(model, "get_mtp_target_hidden_states") else None
        # From 0.32 it is None if the model keeps no states for this kind of drafter.
        return hidden_states if states is None else states

    # -- a request ----------------------------------------------------------------------------------------------------

    def add_request(self, row: int, params: Any) -> None:
        """Note whether graphs can sample for a request with `SamplingParams` `params`."""
        self._plain[row] = asks_for_nothing_else(params)
        self._scores_prompt[row] = params.prompt_logprobs is not None

    # -- a step -------------------------------------------------------------------------------------------------------

    def sample(self, hidden_states: torch.Tensor, batch: Any, grammar_output: Any) -> Any:
        """Sample like `GPUModelRunner.sample`; a graph also does `postprocess_sampled`."""
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
        # Another stream copies the previous step's outputs to the host.
        self._runner.main_stream.wait_stream(self._runner.output_copy_stream)
        self._sampled = True
        self._sampling.served()
        sampling.replay()
        count, outputs = batch.num_reqs, self._buffers.outputs
        num_sampled, num_rejected = outputs.num_sampled[:count], outputs.num_rejected[:count]
        nwor.replayed(self._runner, num_rejected)
        output = dataclasses.replace(
            self._output,
            sampled_token_ids=outputs.sampled_token_ids[:count],
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )
        return output, num_sampled, num_rejected

    def _hand_over(self, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> None:
        """Copy vLLM's sampled and rejected counts to where drafting reads them."""
        assert self._buffers is not None
        outputs, count = self._buffers.outputs, len(num_sampled)
        # Another stream may still copy these outputs to the host, if a graph sampled in the previous step.
        self._runner.main_stream.wait_stream(self._runner.output_copy_stream)
        outputs.num_sampled[:count].copy_(num_sampled)
        outputs.num_rejected[:count].copy_(num_rejected)

    def postprocess_sampled(self, *arguments: Any, **settings: Any) -> None:
        """Update the requests' state, unless the sampling graph did."""
        done, self._sampled = self._sampled, False
        if not done:
            self._vllm.postprocess_sampled(*arguments, **settings)

    def propose(
        self, vllms: Callable[..., torch.Tensor], input_batch: Any, *arguments: Any, **settings: Any
    ) -> torch.Tensor:
        """Draft for the batch that was sampled.

        vLLM drafts for any other batch, such as a dummy batch. `vllms` is the speculator's own `propose`, and gets all
        further arguments.
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
        # The n-gram speculator names its drafts `drafts`.
        all_drafts = speculator.drafts if hasattr(speculator, "drafts") else speculator.draft_tokens
        drafts: torch.Tensor = all_drafts[: batch.num_reqs]
        # Another stream copies a batch's drafts to the host if it has a grammar.
        self._drafts = drafts.clone() if batch.has_structured_output_reqs else drafts
        return drafts

    def keep_drafts(self, *, idx_mapping: torch.Tensor, draft_tokens: torch.Tensor) -> None:
        """Put the drafts into the requests' state, unless the graph did."""
        if self._drafts is None:
            self._runner.req_states.draft_tokens[idx_mapping] = draft_tokens

    def drafts_of(self, idx_mapping: torch.Tensor) -> torch.Tensor:
        """Return the drafts in the requests' state, in the batch's order."""
        return self._runner.req_states.draft_tokens[idx_mapping] if self._drafts is None else self._drafts

    def follow_weights(self) -> None:
        """Update fused weights; drop the graphs if weights moved or misfit.

        Called before a step's inputs are prepared, because vLLM's drafter needs more of the inputs than a graph writes.
        If no graph prepares inputs, called before sampling.
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
        """Put the batch into the buffers, and return its two graphs.

        They sample and draft. Either may be the reason why vLLM does that part.
        """
        if not self._served:
            return Reason.NOT_CAPTURED, Reason.NOT_CAPTURED
        len_or_reason = decode_query_len(batch, self.most_reqs)
        if not isinstance(len_or_reason, Reason):
            if batch.num_reqs > self.most_reqs[len_or_reason]:
                len_or_reason = Reason.LARGER_BATCH
            elif hidden_states.data_ptr() != self._target()[0].data_ptr():
                len_or_reason = Reason.NO_FULL_GRAPH
            else:
                held = self.hold(batch.req_ids, batch.idx_mapping_np, len_or_reason, batch.num_tokens_after_padding)
                if isinstance(held, Held):
                    sampling = Reason.STRUCTURED_OUTPUT if grammar else held.sampling
                    return held.graphs.sample(sampling), held.graphs.drafting
                len_or_reason = held
        self.held = None
        return (
            Reason.STRUCTURED_OUTPUT if grammar else self._sampling_alone(hidden_states, batch, len_or_reason),
            len_or_reason,
        )

    def hold(self, req_ids: list[str], rows: np.ndarray, query_len: int, num_tokens: int) -> Held | Reason:
        """Put requests into the buffers, or return why no graph covers them.

        Args:
            req_ids: requests past their prompts with equal draft counts, in the batch's order; at most
                `most_reqs[query_len]`.
            rows: [number of requests], integers: rows in the runner's state.
            query_len: tokens of each request.
            num_tokens: tokens of the batch, with padding.
        """
        # With data parallelism a batch is padded to the largest batch of all ranks.
        graphs = self._served.get((query_len, num_tokens // query_len))
        if graphs is None or num_tokens != graphs.shape.num_tokens:
            return Reason.NO_FULL_GRAPH
        # A request that gets another row is prefilled in its next step, and that step resets `held`.
        if self.held is not None and graphs is self.held.graphs and req_ids == self.held.req_ids:
            return self.held
        drafts, padded = not isinstance(graphs.drafting, Reason), len(rows) < graphs.shape.num_reqs
        # Drafting writes to padding's row.
        if drafts and padded and not self._runner.req_states.free_indices:
            return Reason.NO_FREE_ROW
        self._write(rows, query_len)
        self.held = Held(req_ids, rows, self._needed(rows), graphs)
        return self.held

    def _needed(self, rows: np.ndarray) -> SamplerParts | Reason:
        """Return the sampler's parts that `rows` need, or a reason."""
        if not self._plain[rows].all():
            return Reason.SAMPLING_PARAMETERS
        if self._adapts_logits and self._runner.lora_state.lora_ids[rows].any():
            return Reason.ADAPTERS
        needed = SamplerParts.of(self._runner.sampler.sampling_states, rows, self._splits_top_p)
        return Reason.SAMPLING_PARAMETERS if needed is None or (self._drawn_by_host and needed.narrows) else needed

    def _write(self, rows: np.ndarray, query_len: int, logits: LogitsRows | None = None) -> None:
        assert self._buffers is not None
        free = self._runner.req_states.free_indices
        # Without drafting, padding's row is read and not written, so it may be a request's row.
        self._buffers.write(rows, free[-1] if free else int(rows[0]), query_len, logits)

    def _sampling_alone(self, hidden_states: torch.Tensor, batch: Any, reason: Reason) -> torch.cuda.CUDAGraph | Reason:
        """Return the graph that only samples for `batch`, or a reason.

        `reason` is why graphs do not draft.
        """
        rows, num_logits = batch.idx_mapping_np, np.diff(batch.cu_num_logits_np)
        num_rows = int(num_logits.sum())
        smallest = min(
            (
                graphs
                for query_len in self.most_reqs
                if (graphs := self._served.get((query_len, batch.num_reqs))) and query_len >= num_logits.max()
            ),
            key=lambda graphs: graphs.shape.num_tokens,
            default=None,
        )
        if smallest is None:
            return Reason.LARGER_BATCH
        if not smallest.sampling:
            return Reason.NOT_CAPTURED
        # With a drafter, vLLM samples a batch without drafts by another sampler than the captured sampler.
        if (
            not batch.num_draft_tokens and self._runner.speculator is not None
        ) or smallest.shape.num_tokens - num_rows > _SURPLUS:
            return reason
        # vLLM computes prompt logprobs after sampling, from the computed part of the prompt before this step.
        if self._scores_prompt[rows].any():
            return Reason.SAMPLING_PARAMETERS
        needed = self._needed(rows)
        if isinstance(needed, Reason):
            return needed
        states = self._target()[0]
        gathered = hidden_states.data_ptr() != states.data_ptr()
        if gathered:
            # Only the target's graphs write there, and nothing reads what they wrote.
            torch.index_select(hidden_states, 0, batch.logits_indices, out=states[: len(batch.logits_indices)])
        ends = batch.query_start_loc_np[1 : 1 + batch.num_reqs]
        self._write(rows, smallest.query_len, LogitsRows(num_logits, ends, gathered))
        return smallest.sample(needed)

    def held_batch(self) -> Any:
        """Return the held requests' decode batch, as vLLM's `prepare_inputs` makes it.

        Its tensors are the graphs' inputs and outputs. It lacks the requests' token counts on the host.
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
