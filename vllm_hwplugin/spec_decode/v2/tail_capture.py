# SPDX-License-Identifier: Apache-2.0
"""Capture the sampling and drafting graphs of a runner from vLLM's own methods (Model Runner V2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.v1.worker.gpu.cudagraph_utils import prepare_inputs_to_capture
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_hwplugin.nwor import runner as nwor
from vllm_hwplugin.spec_decode.builders import updated_in_place
from vllm_hwplugin.spec_decode.decode_batch import GraphShape
from vllm_hwplugin.spec_decode.drafters import MASK_METHODS, STANDALONE_METHODS
from vllm_hwplugin.spec_decode.graph_recording import known_arguments, record_graph, shared_scratch
from vllm_hwplugin.spec_decode.obstacles import Part
from vllm_hwplugin.spec_decode.step_counts import Reason
from vllm_hwplugin.spec_decode.v2.mixed_bounds import longest_query
from vllm_hwplugin.spec_decode.v2.recording import (
    HiddenRows,
    SamplerParts,
    block_pass,
    draft_ranks,
    drafts_in_blocks,
    idx_dtype,
    later_tokens,
    metadata_of_steps,
    recorded_with,
    rows_at_a_time,
    sampling_as,
)
from vllm_hwplugin.spec_decode.v2.tail_buffers import Outputs, TailBuffers
from vllm_hwplugin.spec_decode.weights import FusedWeights, Parameters, Touched, around_graphs


@dataclasses.dataclass(frozen=True)
class Served:
    """A graph that samples or drafts, and what sampling leaves: results, and vLLM's `SamplerOutput` to put them in.

    `then` is a second graph of drafting, to replay after `graph`.
    """

    graph: torch.cuda.CUDAGraph
    outputs: Outputs
    output: Any = None
    then: torch.cuda.CUDAGraph | None = None


@dataclasses.dataclass(frozen=True)
class ShapeGraphs:
    """The graphs of one shape: sampling by needed parts, and drafting or why vLLM drafts.

    A mixed batch's graph only drafts: sampling's graphs do not depend on how many tokens a request has.
    """

    shape: GraphShape
    sampling: Mapping[SamplerParts, Served]
    drafting: Served | Reason
    # Keeps the tensors alive that the captured update of the drafter's metadata writes.
    metadata: Any = None

    @property
    def query_len(self) -> int:
        """Tokens of each request."""
        return self.shape.num_tokens // self.shape.num_reqs

    def sample(self, needed: SamplerParts | Reason) -> Served | Reason:
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
    graphs: ShapeGraphs


@dataclasses.dataclass(frozen=True)
class Captured:
    """The graphs of one capture, and what they read.

    Attributes:
        left: the parts of a step that no graph has, and why.
        graphs: by (tokens of a request, number of requests) of a batch, the smallest that hold it.
        mixed: drafting graphs of mixed batches, by tokens with padding. DFlash's end before its pass over blocks.
        blocks: graphs of that pass, by number of requests, the smallest that hold them.
        by_rows: graphs that sample batches whose draft counts are only on the device, smallest first; some for batches
            without drafts.
        most_reqs: requests of the largest graph, by tokens of a request.
        batches: the captured batches, by (tokens of a request, number of requests) of a graph.
        adapts_logits: whether adapters may change logits.
        drawn_by_host: whether FlashInfer may sample if top-k or top-p removes tokens. Its random numbers come from a
            state that torch keeps on the host, so each replay would draw the same numbers. It never samples a batch
            with drafts.
        scratch: keeps memory alive that kernels of the graphs work in.
        touched: the modules that captures called.
        read_whole: a module whose weights are all read.
        parameters: the weights that were captured, if they are watched.
    """

    left: Mapping[Part, str]
    graphs: Mapping[tuple[int, int], ShapeGraphs]
    mixed: Mapping[int, ShapeGraphs]
    blocks: Mapping[int, ShapeGraphs]
    by_rows: Sequence[ShapeGraphs]
    most_reqs: Mapping[int, int]
    batches: Mapping[tuple[int, int], Any]
    buffers: TailBuffers
    pool: Any
    adapts_logits: bool
    drawn_by_host: bool
    scratch: Sequence[torch.Tensor]
    fused: FusedWeights
    touched: Touched
    read_whole: torch.nn.Module | None
    parameters: Parameters = dataclasses.field(default_factory=Parameters)

    def watched(self, runner: Any) -> Captured:
        """Watch the weights of the modules captured so far, and of heads."""
        models = {Part.V2_SAMPLING: runner.model, Part.V2_DRAFTING: getattr(runner.speculator, "model", None)}
        places: list[tuple[Any, str]] = [*self.touched.places(*models.values())]
        for part in models.keys() - self.left.keys():
            places += around_graphs(models[part])
        return dataclasses.replace(self, parameters=Parameters(self.read_whole, places=places))

    def batch_of(self, runner: Any, held: Held) -> Any:
        """Return the held requests' decode batch, as vLLM's `prepare_inputs` makes it.

        Its tensors are the graphs' inputs and outputs. It lacks the requests' token counts on the host.
        """
        shape, query_len = held.graphs.shape, held.graphs.query_len
        num_reqs, num_tokens = len(held.req_ids), len(held.req_ids) * query_len
        recorded, states = self.batches[query_len, shape.num_reqs], runner.req_states
        start_loc: Any = np.minimum(np.arange(shape.num_reqs + 1), num_reqs).astype(np.int32) * np.int32(query_len)
        return dataclasses.replace(
            recorded,
            req_ids=held.req_ids,
            num_reqs=num_reqs,
            num_reqs_after_padding=shape.num_reqs,
            idx_mapping=self.buffers.idx_mapping(num_reqs),
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


def target_states(runner: Any) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """Return the output tensors of the target's FULL graphs, at full size."""
    manager = runner.cudagraph_manager
    return manager.hidden_states, manager.aux_hidden_states if manager.use_aux_hidden_state_outputs else None


def _agreed(dp_size: int, num_reqs: int, num_tokens: int) -> Any:
    """Return what data-parallel ranks agreed on for an eager pass."""
    from vllm.v1.worker.gpu.dp_utils import DPSyncState

    counts = torch.full((dp_size,), num_tokens, dtype=torch.int32, device="cpu")
    return DPSyncState(counts, uniform_token_count=None, eager=True, num_reqs=num_reqs)


class TailRecorder:
    """Captures the sampling and drafting graphs of one `GPUModelRunner`.

    Args:
        vllm: has vLLM's own `sample` and `postprocess_sampled`.
        left: the parts that no graph can have, and why.
        shapes: the graphs' shapes, largest first.
        mixed: the shapes of drafting graphs of mixed batches, largest first.
    """

    def __init__(
        self,
        runner: Any,
        vllm: Any,
        left: Mapping[Part, str],
        shapes: Sequence[GraphShape],
        mixed: Sequence[GraphShape] = (),
    ):
        self._runner, self._vllm, self._left, self._shapes, self._mixed = runner, vllm, left, shapes, mixed
        self._beyond = draft_ranks(runner, left)
        chunk_rows = rows_at_a_time(runner.sampler.sampling_states.vocab_size)
        most_reqs = max(shape.num_reqs for shape in (*shapes, *mixed))
        self._buffers = TailBuffers(runner, most_reqs, runner.decode_query_len, idx_dtype(runner), chunk_rows)
        self._pool = torch.cuda.graph_pool_handle()
        self._batches: dict[tuple[int, int], Any] = {}

    def record(self) -> Captured:
        runner, adapts_logits = self._runner, False
        if runner.lora_config is not None:
            adapts_logits = any(isinstance(module, LogitsProcessorWithLoRA) for module in runner.model.modules())
            # The target's last graph may have been for adapters. Without active adapters vLLM launches no LoRA kernels.
            none = (0,) * self._shapes[0].num_tokens
            runner._set_active_loras(none, none, set())
        draft = getattr(runner.speculator, "model", None)
        method = runner.speculative_config.method if Part.V2_DRAFTING not in self._left else None
        # vLLM has no graphs of a standalone draft model.
        standalone = method in STANDALONE_METHODS
        touched = Touched(None if standalone else draft)
        graphs, most_reqs, by_rows = dict[tuple[int, int], ShapeGraphs](), dict[int, int](), list[ShapeGraphs]()
        with touched:
            for shape in self._shapes:
                made = self._capture_shape(shape)
                if shape.query_len is None:
                    by_rows.insert(0, made)
                    continue
                most_reqs.setdefault(made.query_len, shape.num_reqs)
                # The smallest that holds a batch is captured last, and replaces larger ones.
                graphs |= {(made.query_len, count): made for count in range(1, shape.num_reqs + 1)}
        return Captured(
            left=self._left,
            graphs=graphs,
            mixed={},
            blocks={},
            by_rows=by_rows,
            most_reqs=most_reqs,
            batches=self._batches,
            buffers=self._buffers,
            pool=self._pool,
            adapts_logits=adapts_logits,
            drawn_by_host=runner.speculator is None and runner.sampler.use_flashinfer,
            scratch=shared_scratch(),
            fused=FusedWeights(draft if method in MASK_METHODS else None),
            touched=touched,
            read_whole=draft if standalone else None,
        )

    def record_mixed(self, captured: Captured) -> Captured:
        """Return `captured`, of `record`, with the graphs of mixed batches."""
        # After `record`, so that they use the memory of sampling's logits.
        runner, blocks = self._runner, dict[int, ShapeGraphs]()
        with captured.touched:
            mixed = {shape.num_tokens: self._capture_mixed(shape) for shape in self._mixed}
            for shape in self._shapes if drafts_in_blocks(runner) else ():
                if shape.query_len == runner.decode_query_len:
                    blocks |= dict.fromkeys(range(1, shape.num_reqs + 1), self._capture_blocks(shape))
        return dataclasses.replace(captured, mixed=mixed, blocks=blocks, scratch=[*captured.scratch, *shared_scratch()])

    def _capture_shape(self, shape: GraphShape) -> ShapeGraphs:
        runner, buffers = self._runner, self._buffers
        query_len = shape.num_tokens // shape.num_reqs
        # Where the device has the draft counts, only it knows where a chunk of requests would end.
        chunk_reqs = shape.num_reqs if shape.query_len is None else buffers.chunk_reqs(query_len)
        buffers.clear(shape.query_len or 1)
        # Before vLLM prepares the inputs, because making a dummy batch overwrites them.
        chunks = [self._chunk(shape, first, chunk_reqs) for first in range(0, shape.num_reqs, chunk_reqs)]
        prepared = [] if shape.query_len is None else self._prepared(shape, query_len)
        batch = self._recorded_batch(slice(shape.num_reqs), shape.num_tokens)
        if shape.query_len is not None:
            self._batches[query_len, shape.num_reqs] = batch
        sampling = {}
        drawn_by_host = not batch.num_draft_tokens and runner.sampler.use_flashinfer
        for needed in () if Part.V2_SAMPLING in self._left else SamplerParts:
            if drawn_by_host and needed.narrows:
                continue
            with sampling_as(runner.sampler, needed), buffers.stand_in():
                graph = record_graph(lambda: self._sample(batch, chunks), self._pool, runner.vllm_config, self._beyond)
            sampling[needed] = Served(graph, buffers.outputs, self._output)
        if Part.V2_DRAFTING in self._left or not later_tokens(runner, shape.num_reqs, query_len):
            return ShapeGraphs(shape, sampling, Reason.NOT_CAPTURED)
        return self._capture(shape, sampling, lambda: self._draft(batch, query_len, False, *prepared.pop()))

    def _capture_mixed(self, shape: GraphShape) -> ShapeGraphs:
        runner, query_len = self._runner, self._runner.decode_query_len
        self._buffers.clear(query_len)
        longest = longest_query(runner.compilation_config, shape.num_tokens)
        prepared = self._prepared(shape, longest)
        inputs, num_reqs = runner.input_buffers, shape.num_reqs
        batch = dataclasses.replace(
            InputBatch.make_dummy(num_reqs, shape.num_tokens, inputs),
            idx_mapping=self._buffers.idx_mapping(num_reqs),
            query_start_loc=inputs.query_start_loc[: num_reqs + 1],
            # DFlash launches blocks for the longest.
            num_scheduled_tokens=np.full(num_reqs, longest, dtype=np.int32),
            seq_lens_cpu_upper_bound=torch.full((num_reqs,), runner.max_model_len, dtype=torch.int32),
        )

        def draft() -> None:
            self._draft(batch, query_len, True, *prepared.pop())

        if not drafts_in_blocks(runner):
            return self._capture(shape, {}, draft)
        graph = record_graph(lambda: block_pass(runner.speculator, draft), self._pool, runner.vllm_config)
        return ShapeGraphs(shape, {}, Served(graph, self._buffers.outputs))

    def _capture_blocks(self, shape: GraphShape) -> ShapeGraphs:
        """Capture DFlash's pass over the blocks of a mixed batch's requests."""
        runner, query_len = self._runner, self._runner.decode_query_len
        self._buffers.clear(query_len)
        batch = self._batches[query_len, shape.num_reqs]
        # DFlash reads none of the target's metadata and slots.
        draft = block_pass(runner.speculator, partial(self._draft, batch, query_len, False, {}, {}))

        def run() -> None:
            draft()
            runner.req_states.draft_tokens[batch.idx_mapping] = runner.speculator.draft_tokens[: shape.num_reqs]

        return self._capture(shape, {}, run)

    def _prepared(self, shape: GraphShape, max_query_len: int) -> list[tuple[Any, Any]]:
        """Return attention metadata and slots for a warm-up and a capture."""
        # Twice: the first kernel that reads a FlashMLA plan computes it, and the captured kernel must compute it too.
        runner = self._runner
        return [
            prepare_inputs_to_capture(
                shape.num_reqs,
                shape.num_tokens,
                runner.model_state,
                runner.input_buffers,
                runner.block_tables,
                runner.attn_groups,
                runner.kv_cache_config,
                **known_arguments(prepare_inputs_to_capture, full_cudagraph=True, max_query_len=max_query_len),
            )
            for _ in range(2)
        ]

    def _capture(
        self, shape: GraphShape, sampling: Mapping[SamplerParts, Served], draft: Callable[[], object]
    ) -> ShapeGraphs:
        runner = self._runner
        with metadata_of_steps(runner.speculator) if updated_in_place(runner.speculator) else nullcontext() as metadata:
            graph = record_graph(draft, self._pool, runner.vllm_config, self._beyond)
        return ShapeGraphs(shape, sampling, Served(graph, self._buffers.outputs), metadata)

    def _recorded_batch(self, reqs: slice, num_tokens: int) -> Any:
        """Return a decode batch of the buffers' requests `reqs`, of `num_tokens` tokens."""
        runner, buffers = self._runner, self._buffers
        first, end = reqs.start or 0, reqs.stop
        num_reqs = end - first
        first_row = first * num_tokens // num_reqs
        rows = slice(first_row, first_row + num_tokens)
        start_loc_np: Any = np.arange(num_reqs + 1, dtype=np.int32) * num_tokens // num_reqs
        start_loc = torch.from_numpy(start_loc_np).to(runner.device)
        full: Any = np.diff(start_loc_np) - 1
        return dataclasses.replace(
            InputBatch.make_dummy(num_reqs, num_tokens, runner.input_buffers),
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

    def _chunk(self, shape: GraphShape, first: int, most_reqs: int) -> tuple[slice, Any]:
        """Return at most `most_reqs` requests sampled together from `first`, and their batch.

        A batch with a prompt has more tokens than a decode batch, so this batch refers to all inputs.
        """
        inputs = self._runner.input_buffers
        reqs = slice(first, min(first + most_reqs, shape.num_reqs))
        return reqs, dataclasses.replace(
            self._recorded_batch(reqs, (reqs.stop - first) * shape.num_tokens // shape.num_reqs),
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            query_start_loc=inputs.query_start_loc[first : reqs.stop + 1],
        )

    def _sample(self, batch: Any, chunks: Sequence[tuple[slice, Any]]) -> None:
        """Sample from the target's hidden states, and update the requests' state."""
        runner, buffers = self._runner, self._buffers
        num_reqs, outputs = batch.num_reqs, buffers.outputs
        with nwor.deferred(runner):
            # The chunks' logits share memory.
            for reqs, chunk in chunks:
                if reqs.start:
                    starts = chunk.cu_num_logits
                    chunk = dataclasses.replace(chunk, cu_num_logits=starts - starts[0])
                first_row = reqs.start * batch.num_tokens // num_reqs
                rows = buffers.hidden_rows[first_row : first_row + chunk.num_tokens]
                hidden_states: Any = HiddenRows(target_states(runner)[0], rows)
                output, num_sampled, num_rejected = self._vllm.sample(hidden_states, chunk, None)
                # Without drafts it has one column, which all columns of the buffer then repeat.
                outputs.sampled_token_ids[reqs].copy_(output.sampled_token_ids)
                outputs.num_sampled[reqs].copy_(num_sampled)
                outputs.num_rejected[reqs].copy_(num_rejected)
                # Without this graph's tensors, whose memory later captures use again.
                self._output = dataclasses.replace(output, sampled_token_ids=None, num_sampled=None, num_rejected=None)
        nwor.restore(runner, num_rejected=outputs.num_rejected[:num_reqs], num_draft_tokens=batch.num_draft_tokens)
        self._vllm.postprocess_sampled(
            buffers.idx_mapping_alive(num_reqs),
            outputs.sampled_token_ids[:num_reqs],
            outputs.num_sampled[:num_reqs],
            outputs.num_rejected[:num_reqs],
            runner.input_buffers.query_start_loc[: num_reqs + 1],
        )

    def _draft(self, batch: Any, query_len: int, mixed: bool, metadata: Any, slots: Any) -> None:
        """Draft from the requests' new state, and put the drafts into it."""
        runner, buffers = self._runner, self._buffers
        num_reqs, outputs = batch.num_reqs, buffers.outputs
        hidden_states, aux_hidden_states = target_states(runner)
        # As in `sample_tokens`. From 0.32 it returns None if the model keeps no states for this kind of drafter.
        states = getattr(runner.model, "get_mtp_target_hidden_states", lambda: None)()
        # From 0.32. Earlier versions always make the largest number of drafts.
        asked = known_arguments(runner.speculator.propose, num_speculative_tokens=query_len - 1)
        if runner.dp_size > 1:
            agreed = _agreed(runner.dp_size, later_tokens(runner, num_reqs, query_len), batch.num_tokens)
            # 0.32 renamed it.
            asked |= known_arguments(runner.speculator.propose, dp_sync=agreed, dp_sync_state=agreed)
        padding = buffers.padding(num_reqs, query_len)
        # Rows of padding hold results of a step with other requests, maybe of a graph with longer requests.
        num_sampled, num_rejected = (
            counts[:num_reqs] * padding.alive for counts in (outputs.num_sampled, outputs.num_rejected)
        )
        if mixed:
            # In a mixed batch padding has no tokens, and the draft's first pass writes the next token to a request's
            # last place. With -1 rejected, padding's is the first place that no request has.
            num_rejected -= (batch.query_start_loc.diff() == 0).int()
            places = torch.arange(batch.num_tokens, device=runner.device)
            padding = dataclasses.replace(padding, dead_mixed=places >= batch.query_start_loc[-1])
        with recorded_with(padding):
            drafts = runner.speculator.propose(
                batch,
                metadata,
                slots,
                (hidden_states if states is None else states)[: batch.num_tokens],
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
        if "num_speculative_tokens" in asked:
            drafts[:, query_len - 1 :] = -1
        runner.req_states.draft_tokens[batch.idx_mapping] = drafts
