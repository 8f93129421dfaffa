# SPDX-License-Identifier: Apache-2.0
"""Capture sampling and drafting of a decode step of the V1 runner in two CUDA graphs.

With `draft-full-graph` and `draft-loop-graph` the drafter's passes are graphs, and the host still launches dozens of
kernels and copies one by one between the target and the last draft token: logits, rejection, next tokens, counts,
inputs of the first pass, metadata, inputs of the chain. Here all of that is also captured, from vLLM's own functions,
for each shape in which the target decodes in a FULL graph. A step then replays *sampling* and *drafting*
(`draft_phase_graphs`).

*Sampling* is for requests that ask the sampler only for a temperature and a seed, and for top-k or top-p if the model's
default sampling parameters do. If vLLM samples, only *drafting* is replayed, after a third graph, *counting*. A batch
that is not covered takes vLLM's own way, step by step. Only one thing is kept between steps: which requests the buffers
hold.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Final

import torch
from vllm.v1.outputs import SamplerOutput

from vllm_hwplugin import journal
from vllm_hwplugin.features import V1_DRAFT_PHASE
from vllm_hwplugin.nwor import runner as nwor
from vllm_hwplugin.spec_decode.decode_batch import (
    MAX_NUM_REQS,
    GraphShape,
    asks_for_nothing_else,
    has_prompt,
    uniform_shape,
)
from vllm_hwplugin.spec_decode.graph_recording import attempt, reserved_memory, settle_all_reduce
from vllm_hwplugin.spec_decode.obstacles import Part, why_not
from vllm_hwplugin.spec_decode.step_counts import Reason, StepCounts
from vllm_hwplugin.spec_decode.v1.draft_decision import DraftKeys
from vllm_hwplugin.spec_decode.v1.draft_full_graph import Companion
from vllm_hwplugin.spec_decode.v1.draft_phase_graphs import (
    Drafting,
    Filters,
    PhaseBuffers,
    PhaseGraphs,
    PhaseRecorder,
    Sampling,
    TargetStates,
    draws_natively,
    input_addresses,
)
from vllm_hwplugin.spec_decode.v1.pass_graphs import PassGraphs
from vllm_hwplugin.spec_decode.weights import Parameters, around_graphs

#: In place of a draft, from 0.25 on, in a new request whose prompt is computed except for its last token.
_PLACEHOLDER: Final = -1


class DraftPhase(Companion):
    """The graphs of one `GPUModelRunner`, which holds this as `draft_phase` and calls it as its own methods.

    Each step calls `logits`, `sample` and `propose`, in this order. `logits` and `propose` decide which graphs the step
    replays.
    """

    feature, effect = V1_DRAFT_PHASE, "vLLM's own kernels between the target and the drafter's graphs"

    def __init__(self, runner: Any):
        self._runner = runner
        self._draft_graphs = getattr(getattr(runner, "drafter", None), "draft_graphs", None)
        self._sampling, self._drafting = StepCounts(V1_DRAFT_PHASE, "sampling"), StepCounts(V1_DRAFT_PHASE, "drafting")
        self.forget()
        if self._draft_graphs is not None:
            self._draft_graphs.add(lambda *_: self)

    def forget(self) -> None:
        self._recorder: PhaseRecorder | None = None
        self._buffers: PhaseBuffers | None = None
        # Both by number of the target's tokens.
        self._shapes: dict[int, GraphShape] = {}
        self._graphs: dict[int, PhaseGraphs] = {}
        self._step: PhaseGraphs | Reason = Reason.NOT_CAPTURED
        self._kind: Sampling | None = None
        self._judged: Any = None
        self._judgement: Sampling | None = None
        self._parameters_of: Any = None
        self._weights: Parameters | None = None
        # The parts of sampling that no graph does.
        self._vllms = ""
        self._spent = (0.0, 0)

    # -- a start ------------------------------------------------------------------------------------------------------

    def capture(self, passes: PassGraphs, keys: DraftKeys, template: Any) -> None:
        """Prepare to capture, between the drafter's graphs and the target's."""
        self.forget()
        runner = self._runner
        reason = why_not(runner, Part.V1_DRAFTING)
        if reason is not None:
            self.stay_stock(reason)
            return
        counts = keys.requests(self.query_len)
        if self.query_len > 2 and not runner.drafter.parallel_drafting:
            counts = tuple(count for count in counts if runner.drafter.draft_loop.serves(count))
        shapes = [uniform_shape(self.query_len, count) for count in counts if count <= MAX_NUM_REQS]
        if not shapes:
            self.stay_stock("the drafter's passes have no graphs of decode batches that could be joined")
            return
        self._shapes = {shape.num_tokens: shape for shape in shapes}

        def prepare() -> None:
            self._buffers = PhaseBuffers(shapes[-1].num_reqs, self.query_len, runner.device)

        if not attempt(self.feature, self.effect, prepare, self.forget):
            self.failed = True
            return
        assert self._buffers is not None
        drawn = getattr(runner.drafter, "_enable_probabilistic_draft_probs", False)
        sampling: tuple[Sampling, ...] = ()
        filters = Filters(False, False)
        if why_not(runner, Part.V1_SAMPLING) is not None:
            self._vllms = "vLLM samples"
        else:
            # Graphs that filter take as long to capture as the others, and more memory: if requests rarely ask for
            # filters, that would be wasted.
            filters = Filters.by_default(runner.model_config, runner.input_batch.vocab_size)
            if any(filters) and not draws_natively(runner):
                self._vllms = "vLLM samples within top-k and top-p, because a graph would repeat its random numbers"
                filters = Filters(False, False)
            sampling = tuple(
                kind for kind in Sampling if (drawn or not kind.of_drawn) and (any(filters) or not kind.filters)
            )
        drafting = tuple(Drafting)[: 2 if drawn else 1]
        self._recorder = PhaseRecorder(runner, passes, self._buffers, sampling, drafting, filters)
        self._weights = Parameters(places=around_graphs(runner.model))
        journal.use(V1_DRAFT_PHASE, False, "the target has no FULL graph of a decode batch")

    def capture_behind(self, outputs: Any, template: Any, *, profiling: bool) -> None:
        """Capture the graphs that follow the target's FULL graph, just captured.

        The patched `GPUModelRunner._dummy_run` calls this. `template` is the `CommonAttentionMetadata` that the runner
        built for the drafter's KV-cache group, or None. With `profiling` vLLM measures its largest graph's memory. The
        largest graphs here, which may be smaller, are then captured behind it, and only the memory that they need
        stays.

        Raises:
            FeatureRequired: they cannot be captured, and the switch is `on`.
        """
        if self._recorder is None or template is None:
            return
        states = TargetStates.of(outputs)
        num_tokens = states.hidden.shape[0]
        if profiling:
            num_tokens = max((size for size in self._shapes if size <= num_tokens), default=0)
        shape = self._shapes.get(num_tokens)
        if shape is None:
            return
        cached = torch.accelerator.memory_reserved() if profiling else 0
        started, reserved = time.perf_counter(), reserved_memory()
        if not attempt(self.feature, self.effect, partial(self._record, shape, states, template), self.forget):
            self.failed = True
            return
        seconds, used = self._spent
        self._spent = seconds + time.perf_counter() - started, used + reserved_memory() - reserved
        if profiling:
            settle_all_reduce()
            self._graphs.clear()
            # vLLM takes the drop in the device's free memory at the next size as the memory of each further graph. So
            # the allocator must hold again what vLLM's own runs had left it, or the next size would allocate it again.
            have_again = partial(torch.empty, cached - reserved, dtype=torch.uint8, device=self._runner.device)
            self.failed = not attempt(self.feature, self.effect, have_again, self.forget)
            return
        largest = max(graphs.shape.num_reqs for graphs in self._graphs.values())
        journal.note(
            V1_DRAFT_PHASE,
            f"{len(self._graphs)} shapes of at most {largest} requests, captured in {self._spent[0]:.1f} s, "
            f"{self._spent[1] / 2**20:.0f} MiB" + (self._vllms and f"; {self._vllms}"),
        )
        journal.use(V1_DRAFT_PHASE, True)

    def _record(self, shape: GraphShape, states: TargetStates, template: Any) -> None:
        assert self._recorder is not None
        self._graphs[shape.num_tokens] = self._recorder.record(shape, states, template)

    @property
    def query_len(self) -> int:
        """Tokens of a request in a decode batch: 1 + num_speculative_tokens."""
        return 1 + int(self._runner.speculative_config.num_speculative_tokens)

    # -- a step -------------------------------------------------------------------------------------------------------

    def logits(
        self, scheduler_output: Any, spec_decode_metadata: Any, *, hidden_states: torch.Tensor, indices: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return hidden states at `indices` and logits; None if a graph samples."""
        step = self._step_for(scheduler_output, spec_decode_metadata, hidden_states)
        kind: Sampling | Reason
        if isinstance(step, Reason):
            kind = step
        else:
            assert self._recorder is not None
            self._recorder.hold(self._runner.input_batch.num_reqs, step.shape)
            kind = self._kind_of_batch(step, scheduler_output)
        self._step, self._kind = step, None if isinstance(kind, Reason) else kind
        if not isinstance(kind, Reason):
            self._sampling.served()
            return None, None
        self._sampling.missed(kind)
        sample_hidden_states = hidden_states[indices]
        return sample_hidden_states, self._runner.model.compute_logits(sample_hidden_states)

    def sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        """Do `GPUModelRunner._sample`; return vLLM's `SamplerOutput`."""
        runner, step = self._runner, self._step
        if self._kind is None:
            return runner._sample(logits, spec_decode_metadata)
        assert not isinstance(step, Reason)
        assert self._buffers is not None
        assert self._recorder is not None
        count = runner.input_batch.num_reqs
        # Other streams still copy the results of the step before to the host.
        _wait_for(runner.async_output_copy_stream)
        _wait_for(runner.valid_sampled_token_count_copy_stream)
        metadata = runner.input_batch.sampling_metadata
        if self._kind is not Sampling.GREEDY:
            self._take_parameters(metadata, count)
        if self._kind.of_drawn:
            self._take_draft_probs(count)
        self._recorder.noise_of(self._kind).draw(count, metadata.generators)
        step.sampling[self._kind].replay()
        output = SamplerOutput(sampled_token_ids=self._buffers.sampled_token_ids[:count], logprobs_tensors=None)
        nwor.restore_sampled(runner, spec_decode_metadata, output)
        return output

    def propose(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor | None,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: Any,
        metadata: Any,
        slot_mappings: Any,
    ) -> Any:
        """Return the next drafts, int64 [batch, num_speculative_tokens], as `propose_draft_token_ids`."""
        runner, step = self._runner, self._step
        states = TargetStates(hidden_states, tuple(aux_hidden_states or ()))
        if not isinstance(step, Reason):
            step = self._against(step, scheduler_output, states, metadata) or step
        if isinstance(step, Reason):
            self._drafting.missed(step)
            return runner.propose_draft_token_ids(
                scheduler_output,
                sampled_token_ids,
                sampling_metadata,
                hidden_states,
                sample_hidden_states,
                aux_hidden_states,
                spec_decode_metadata,
                metadata,
                slot_mappings,
            )
        self._drafting.served()
        buffers, count = self._buffers, metadata.num_reqs
        assert buffers is not None
        if self._kind is None:
            _wait_for(runner.async_output_copy_stream)
            _wait_for(runner.valid_sampled_token_count_copy_stream)
            buffers.sampled_token_ids[:count].copy_(sampled_token_ids)
            step.counting.replay()
        runner._copy_valid_sampled_token_count(buffers.next_token_ids[:count], buffers.num_valid[:count])
        _wait_for(runner.draft_token_ids_copy_stream)
        if self._best(sampling_metadata):
            step.drafting[Drafting.BEST].replay()
            return buffers.drafts[:count]
        self._take_parameters(sampling_metadata, count)
        buffers.draft_noise.draw(count, {})
        step.drafting[Drafting.DRAWN].replay()
        runner._draft_probs = buffers.draft_probs(count)
        runner._draft_prob_req_ids = runner.input_batch.req_ids.copy()
        return buffers.drafts[:count]

    def _best(self, sampling_metadata: Any) -> bool:
        """Whether vLLM drafts the best tokens, and draws none."""
        draws = getattr(self._runner.drafter, "_enable_probabilistic_draft_probs", False)
        return not draws or sampling_metadata.all_greedy

    def _take_parameters(self, sampling_metadata: Any, count: int) -> None:
        if self._parameters_of is not sampling_metadata:
            assert self._buffers is not None
            for name in ("temperature", "top_k", "top_p"):
                given = getattr(sampling_metadata, name)
                if given is not None:
                    getattr(self._buffers, name)[:count].copy_(given[:count])
            self._parameters_of = sampling_metadata

    def _take_draft_probs(self, count: int) -> None:
        """Put the drafts' distribution where graphs read it, even vLLM's own."""
        assert self._buffers is not None
        given, buffer = self._runner._draft_probs, self._buffers.draft_probs(count)
        if given.data_ptr() != buffer.data_ptr():
            buffer.copy_(given)

    def _step_for(
        self, scheduler_output: Any, spec_decode_metadata: Any, hidden_states: torch.Tensor
    ) -> PhaseGraphs | Reason:
        """Return graphs if all requests decode with all drafts, or why not."""
        if self._graphs and self._weights is not None and (reason := self._weights.moved()) is not None:
            self.give_up(reason)
        if not self._graphs:
            return Reason.NOT_CAPTURED
        runner, query_len = self._runner, self.query_len
        count = runner.input_batch.num_reqs
        if runner.discard_request_mask.np[:count].any():
            return Reason.PROMPT
        if (
            spec_decode_metadata is None
            or scheduler_output.total_num_scheduled_tokens != count * query_len
            or spec_decode_metadata.num_draft_tokens != [query_len - 1] * count
        ):
            return Reason.PROMPT if has_prompt(runner.input_batch, count) else Reason.FEWER_DRAFTS
        if count * query_len > max(self._graphs):
            return Reason.LARGER_BATCH
        step = self._graphs.get(hidden_states.shape[0])
        if step is None or count > step.shape.num_reqs or step.states[0] != hidden_states.data_ptr():
            return Reason.NO_FULL_GRAPH
        return step

    def _kind_of_batch(self, step: PhaseGraphs, scheduler_output: Any) -> Sampling | Reason:
        """Return how the batch is sampled, or why no graph does it."""
        runner = self._runner
        metadata = runner.input_batch.sampling_metadata
        # vLLM makes it again when requests come, go or move.
        if metadata is not self._judged:
            self._judged, self._judgement = metadata, self._judge(metadata)
        kind = self._judgement
        if kind is None:
            grammar = scheduler_output.has_structured_output_requests
            return Reason.STRUCTURED_OUTPUT if grammar else Reason.SAMPLING_PARAMETERS
        probs = getattr(runner, "_draft_probs", None)
        if kind is not Sampling.GREEDY and probs is not None:
            if runner._draft_prob_req_ids != runner.input_batch.req_ids:
                return Reason.REQUESTS_CHANGED
            kind = Sampling.FILTERED_OF_DRAWN if kind.filters else Sampling.RANDOM_OF_DRAWN
        if kind not in step.sampling:
            return Reason.NOT_CAPTURED
        return kind if _are_drafts(runner, scheduler_output) else Reason.REQUESTS_CHANGED

    def _judge(self, metadata: Any) -> Sampling | None:
        """Return how the batch is sampled, or None if no graph can."""
        requests = self._runner.requests
        if metadata.output_token_ids or not all(
            asks_for_nothing_else(requests[req_id].sampling_params) for req_id in self._runner.input_batch.req_ids
        ):
            return None
        filters = Filters.of(metadata)
        if any(filters):
            assert self._recorder is not None
            return Sampling.FILTERED if filters == self._recorder.filters else None
        return Sampling.GREEDY if metadata.all_greedy else Sampling.RANDOM

    def _against(self, step: PhaseGraphs, scheduler_output: Any, states: TargetStates, metadata: Any) -> Reason | None:
        """Return why the drafting graph would differ from vLLM, or None."""
        proposer = self._runner.drafter
        wanted = getattr(scheduler_output, "num_spec_tokens_to_schedule", None)
        if wanted not in (None, self.query_len - 1):
            return Reason.FEWER_DRAFTS
        assert self._draft_graphs is not None
        if (
            step.states != states.addresses()
            or step.inputs != input_addresses(metadata)
            or not self._draft_graphs.may_replay(metadata)
        ):
            return Reason.MOVED
        context = getattr(proposer, "draft_context", None)
        if context is None or context.keep_fused_in_place():
            return None
        self.give_up("the context's keys and values have no graph any more")
        return Reason.NOT_CAPTURED


def _are_drafts(runner: Any, scheduler_output: Any) -> bool:
    """Whether each request verifies drafts, not placeholders."""
    # A request that was not in the step before may have placeholders. vLLM rejects these; but the graphs read what the
    # target was given, in which they are token ids.
    if not runner.use_async_scheduling:
        return not any(_PLACEHOLDER in tokens for tokens in scheduler_output.scheduled_spec_decode_tokens.values())
    # The scheduler runs ahead of the device, and does not know the drafts.
    before = runner.input_batch.prev_req_id_to_index
    return bool(before) and all(req_id in before for req_id in runner.input_batch.req_ids)


def _wait_for(stream: Any) -> None:
    """Make the next launch wait for copies of what it overwrites."""
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)
