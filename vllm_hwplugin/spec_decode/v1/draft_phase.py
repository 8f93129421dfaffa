# SPDX-License-Identifier: Apache-2.0
"""Capture sampling and drafting of a decode step of the V1 runner in two CUDA graphs.

What the host launches between the target and the last draft token is captured, from vLLM's own functions, for each
shape in which the target decodes in a FULL graph (docs/drafter-graphs.md). A step then replays *sampling* and
*drafting* (`draft_phase_graphs`). If vLLM samples, only *drafting* is replayed, after a third graph, *counting*.
Only one thing is kept between steps: which requests the buffers hold.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from vllm.v1.outputs import SamplerOutput

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.features import V1_DRAFT_PHASE
from vllm_hwplugin.nwor import runner as nwor
from vllm_hwplugin.spec_decode.capture_sizes import full_mixed_sizes
from vllm_hwplugin.spec_decode.decode_batch import (
    MAX_NUM_REQS,
    GraphShape,
    asks_for_nothing_else,
    has_prompt,
    uniform_shape,
)
from vllm_hwplugin.spec_decode.graph_recording import Graphs, reserved_memory, settle_all_reduce
from vllm_hwplugin.spec_decode.obstacles import Part, why_not
from vllm_hwplugin.spec_decode.step_counts import Reason, StepCounts
from vllm_hwplugin.spec_decode.v1.draft_decision import DraftKeys
from vllm_hwplugin.spec_decode.v1.draft_phase_graphs import (
    Drafting,
    PhaseBuffers,
    PhaseGraphs,
    PhaseRecorder,
    Sampling,
    addresses,
    default_filters,
    draws_natively,
    input_addresses,
)
from vllm_hwplugin.spec_decode.v1.pass_graphs import PassGraphs
from vllm_hwplugin.spec_decode.weights import Parameters, around_graphs

#: In place of a draft, from 0.25 on, in a new request whose prompt is computed except for its last token.
_PLACEHOLDER: Final = -1


@dataclass(frozen=True)
class _Plan:
    """What is captured behind the target's graphs, and read in each step.

    Attributes:
        shapes: by number of the target's tokens.
        left: the parts of sampling that no graph does, in words.
    """

    recorder: PhaseRecorder
    shapes: Mapping[int, GraphShape]
    weights: Parameters
    left: str


@dataclass(frozen=True)
class _Step:
    """The graphs of a step, and how its tokens are sampled, or why vLLM samples."""

    plan: _Plan
    graphs: PhaseGraphs
    kind: Sampling | Reason


class DraftPhase(Graphs[dict[int, PhaseGraphs]]):
    """The graphs of one `GPUModelRunner`, which holds this as `draft_phase` and calls it as its own methods.

    Each step calls `logits`, `sample` and `propose`, in this order. `logits` and `propose` decide which graphs the step
    replays.
    """

    feature, effect = V1_DRAFT_PHASE, "vLLM's own kernels between the target and the drafter's graphs"

    def __init__(self, runner: Any):
        super().__init__(runner)
        self._draft_graphs = getattr(getattr(runner, "drafter", None), "draft_graphs", None)
        self._sampling, self._drafting = StepCounts(V1_DRAFT_PHASE, "sampling"), StepCounts(V1_DRAFT_PHASE, "drafting")
        if self._draft_graphs is not None:
            self._draft_graphs.add(lambda *_: self)

    def forget(self) -> None:
        super().forget()
        self._plan: _Plan | None = None
        self._step: _Step | Reason = Reason.NOT_CAPTURED
        self._judged: Any = None
        self._judgement: Sampling | None = None
        self._parameters_of: Any = None
        self._spent = (0.0, 0)

    # -- a start ------------------------------------------------------------------------------------------------------

    def capture(self, passes: PassGraphs, keys: DraftKeys, template: Any) -> None:
        """Prepare to capture, between the drafter's graphs and the target's."""
        self.forget()
        runner = self._owner
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
        if self.attempt(lambda: self._prepare(passes, shapes)):
            run_records.use(V1_DRAFT_PHASE, False, "the target has no FULL graph of a decode batch")

    def _prepare(self, passes: PassGraphs, shapes: Sequence[GraphShape]) -> None:
        runner = self._owner
        buffers = PhaseBuffers(shapes[-1].num_reqs, self.query_len, runner.device)
        drawn = getattr(runner.drafter, "_enable_probabilistic_draft_probs", False)
        sampling: tuple[Sampling, ...] = ()
        filters, left = (False, False), ""
        if why_not(runner, Part.V1_SAMPLING) is not None:
            left = "vLLM samples"
        else:
            # Graphs that filter take as long to capture as the others, and more memory: if requests rarely ask for
            # filters, that would be wasted.
            filters = default_filters(runner.model_config, runner.input_batch.vocab_size)
            if any(filters) and not draws_natively(runner):
                left = "vLLM samples within top-k and top-p, because a graph would repeat its random numbers"
                filters = (False, False)
            sampling = tuple(
                kind for kind in Sampling if (drawn or not kind.of_drawn) and (any(filters) or not kind.filters)
            )
        drafting = tuple(Drafting)[: 2 if drawn else 1]
        self._plan = _Plan(
            PhaseRecorder(runner, passes, buffers, sampling, drafting, filters),
            {shape.num_tokens: shape for shape in shapes},
            Parameters(places=around_graphs(runner.model)),
            left,
        )

    def capture_behind(self, outputs: Any, template: Any, *, profiling: bool) -> None:
        """Capture the graphs that follow the target's FULL graph, just captured.

        The patched `GPUModelRunner._dummy_run` calls this. `template` is the `CommonAttentionMetadata` that the runner
        built for the drafter's KV-cache group, or None. With `profiling` vLLM measures its largest graph's memory. The
        largest graphs here, which may be smaller, are then captured behind it, and only the memory that they need
        stays.

        Raises:
            FeatureRequired: they cannot be captured, and the switch is `on`.
        """
        plan = self._plan
        if plan is None or template is None:
            return
        has_mixed = bool(full_mixed_sizes(self._owner.compilation_config))
        if has_mixed and not profiling and template.max_query_len != self.query_len:
            # A graph of mixed batches, and decode batches have another of this size.
            return
        states = (outputs,) if isinstance(outputs, torch.Tensor) else (outputs[0], *outputs[1])
        num_tokens = states[0].shape[0]
        if profiling:
            num_tokens = max((size for size in plan.shapes if size <= num_tokens), default=0)
        shape = plan.shapes.get(num_tokens)
        if shape is None:
            return
        cached = torch.accelerator.memory_reserved() if profiling else 0
        started, reserved = time.perf_counter(), reserved_memory()

        def record() -> None:
            self.captured = {**(self.captured or {}), num_tokens: plan.recorder.record(shape, states, template)}

        if not self.attempt(record):
            return
        seconds, used = self._spent
        self._spent = seconds + time.perf_counter() - started, used + reserved_memory() - reserved
        if profiling:
            settle_all_reduce()
            self.captured = None
            # vLLM takes the drop in the device's free memory at the next size as the memory of each further graph. So
            # the allocator must hold again what vLLM's own runs had left it, or the next size would allocate it again.
            have_again = partial(torch.empty, cached - reserved, dtype=torch.uint8, device=self._owner.device)
            self.attempt(have_again)
            return
        sizes = [graphs.shape.num_reqs for graphs in (self.captured or {}).values()]
        run_records.note(
            V1_DRAFT_PHASE,
            f"{len(sizes)} shapes of at most {max(sizes)} requests, captured in {self._spent[0]:.1f} s, "
            f"{self._spent[1] / 2**20:.0f} MiB" + (plan.left and f"; {plan.left}"),
        )
        run_records.use(V1_DRAFT_PHASE, True)

    @property
    def query_len(self) -> int:
        """Tokens of a request in a decode batch: 1 + num_speculative_tokens."""
        return 1 + int(self._owner.speculative_config.num_speculative_tokens)

    # -- a step -------------------------------------------------------------------------------------------------------

    def logits(
        self, scheduler_output: Any, spec_decode_metadata: Any, *, hidden_states: torch.Tensor, indices: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return hidden states at `indices` and logits; None if a graph samples."""
        step = self._step = self._step_for(scheduler_output, spec_decode_metadata, hidden_states)
        if not self._sampling.missed(step if isinstance(step, Reason) else step.kind):
            return None, None
        sample_hidden_states = hidden_states[indices]
        return sample_hidden_states, self._owner.model.compute_logits(sample_hidden_states)

    def sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        """Do `GPUModelRunner._sample`; return vLLM's `SamplerOutput`."""
        runner, step = self._owner, self._step
        if isinstance(step, Reason) or isinstance(step.kind, Reason):
            return runner._sample(logits, spec_decode_metadata)
        buffers, kind = step.plan.recorder.buffers, step.kind
        count = runner.input_batch.num_reqs
        # Other streams still copy the results of the step before to the host.
        _wait_for(runner.async_output_copy_stream, runner.valid_sampled_token_count_copy_stream)
        metadata = runner.input_batch.sampling_metadata
        if kind is not Sampling.GREEDY:
            self._take_parameters(buffers, metadata, count)
        if kind.of_drawn:
            # Graphs read the drafts' distribution there, even vLLM's own.
            given, buffer = runner._draft_probs, buffers.draft_probs(count)
            if given.data_ptr() != buffer.data_ptr():
                buffer.copy_(given)
        step.plan.recorder.noise_of(kind).draw(count, metadata.generators)
        step.graphs.sampling[kind].replay()
        output = SamplerOutput(sampled_token_ids=buffers.sampled_token_ids[:count], logprobs_tensors=None)
        nwor.restore_sampled(runner, spec_decode_metadata, output)
        return output

    def propose(self, *arguments: Any) -> Any:
        """Return the next drafts, int64 [batch, num_speculative_tokens], as `propose_draft_token_ids`."""
        runner, step = self._owner, self._step
        scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, _, aux, _, metadata, _ = arguments
        states = (hidden_states, *(aux or ()))
        if not isinstance(step, Reason):
            step = self._against(step.graphs, scheduler_output, states, metadata) or step
        if self._drafting.missed(step):
            return runner.propose_draft_token_ids(*arguments)
        buffers, count = step.plan.recorder.buffers, metadata.num_reqs
        if isinstance(step.kind, Reason):
            _wait_for(runner.async_output_copy_stream, runner.valid_sampled_token_count_copy_stream)
            buffers.sampled_token_ids[:count].copy_(sampled_token_ids)
            step.graphs.counting.replay()
        runner._copy_valid_sampled_token_count(buffers.next_token_ids[:count], buffers.num_valid[:count])
        _wait_for(runner.draft_token_ids_copy_stream)
        if Drafting.DRAWN not in step.graphs.drafting or sampling_metadata.all_greedy:
            step.graphs.drafting[Drafting.BEST].replay()
            return buffers.drafts[:count]
        self._take_parameters(buffers, sampling_metadata, count)
        buffers.draft_noise.draw(count, {})
        step.graphs.drafting[Drafting.DRAWN].replay()
        runner._draft_probs = buffers.draft_probs(count)
        runner._draft_prob_req_ids = runner.input_batch.req_ids.copy()
        return buffers.drafts[:count]

    def _take_parameters(self, buffers: PhaseBuffers, sampling_metadata: Any, count: int) -> None:
        if self._parameters_of is not sampling_metadata:
            for name in ("temperature", "top_k", "top_p"):
                given = getattr(sampling_metadata, name)
                if given is not None:
                    getattr(buffers, name)[:count].copy_(given[:count])
            self._parameters_of = sampling_metadata

    def _step_for(
        self, scheduler_output: Any, spec_decode_metadata: Any, hidden_states: torch.Tensor
    ) -> _Step | Reason:
        """Return graphs if all requests decode with all drafts, or why not."""
        plan, captured = self._plan, self.captured
        if plan is None or captured is None:
            return Reason.NOT_CAPTURED
        if (reason := plan.weights.moved()) is not None:
            self.give_up(reason)
            return Reason.NOT_CAPTURED
        runner, query_len = self._owner, self.query_len
        count = runner.input_batch.num_reqs
        if runner.discard_request_mask.np[:count].any():
            return Reason.PROMPT
        if (
            spec_decode_metadata is None
            or scheduler_output.total_num_scheduled_tokens != count * query_len
            or spec_decode_metadata.num_draft_tokens != [query_len - 1] * count
        ):
            return Reason.PROMPT if has_prompt(runner.input_batch, count) else Reason.FEWER_DRAFTS
        if count * query_len > max(captured):
            return Reason.LARGER_BATCH
        graphs = captured.get(hidden_states.shape[0])
        if graphs is None or count > graphs.shape.num_reqs or graphs.states[0] != hidden_states.data_ptr():
            return Reason.NO_FULL_GRAPH
        plan.recorder.hold(count, graphs.shape)
        return _Step(plan, graphs, self._kind_of_batch(plan, graphs, scheduler_output))

    def _kind_of_batch(self, plan: _Plan, graphs: PhaseGraphs, scheduler_output: Any) -> Sampling | Reason:
        """Return how the batch is sampled, or why no graph does it."""
        runner = self._owner
        metadata = runner.input_batch.sampling_metadata
        # vLLM makes it again when requests come, go or move.
        if metadata is not self._judged:
            self._judged, self._judgement = metadata, self._judge(plan, metadata)
        kind = self._judgement
        if kind is None:
            grammar = scheduler_output.has_structured_output_requests
            return Reason.STRUCTURED_OUTPUT if grammar else Reason.SAMPLING_PARAMETERS
        probs = getattr(runner, "_draft_probs", None)
        if kind is not Sampling.GREEDY and probs is not None:
            if runner._draft_prob_req_ids != runner.input_batch.req_ids:
                return Reason.REQUESTS_CHANGED
            kind = Sampling.FILTERED_OF_DRAWN if kind.filters else Sampling.RANDOM_OF_DRAWN
        if kind not in graphs.sampling:
            return Reason.NOT_CAPTURED
        return kind if _are_drafts(runner, scheduler_output) else Reason.REQUESTS_CHANGED

    def _judge(self, plan: _Plan, metadata: Any) -> Sampling | None:
        """Return how the batch is sampled, or None if no graph can."""
        requests = self._owner.requests
        if metadata.output_token_ids or not all(
            asks_for_nothing_else(requests[req_id].sampling_params) for req_id in self._owner.input_batch.req_ids
        ):
            return None
        filters = metadata.top_k is not None, metadata.top_p is not None
        if any(filters):
            return Sampling.FILTERED if filters == plan.recorder.filters else None
        return Sampling.GREEDY if metadata.all_greedy else Sampling.RANDOM

    def _against(
        self, graphs: PhaseGraphs, scheduler_output: Any, states: Sequence[torch.Tensor], metadata: Any
    ) -> Reason | None:
        """Return why the drafting graph would differ from vLLM, or None."""
        proposer = self._owner.drafter
        wanted = getattr(scheduler_output, "num_spec_tokens_to_schedule", None)
        if wanted not in (None, self.query_len - 1):
            return Reason.FEWER_DRAFTS
        if (
            graphs.states != addresses(states)
            or graphs.inputs != input_addresses(metadata)
            or self._draft_graphs is None
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


def _wait_for(*streams: Any) -> None:
    """Make the next launch wait for copies of what it overwrites."""
    for stream in streams:
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
