# SPDX-License-Identifier: Apache-2.0
"""The inputs of a decode step of Model Runner V2 in one CUDA graph.

Before the target's graph vLLM makes the batch anew in each step: copies to the device, five kernels, and attention
metadata. Where `TailGraphs` serves a step, its requests have equally many drafts. Then the requests' state has all
that the inputs are made of: one graph makes positions, lengths, token ids, block tables, slots and the metadata's
device half. The host adds only lengths that no kernel reads. With other requests than in the step before,
`TailGraphs` has their rows copied first.

A model that takes images or the like has none of them behind a prompt: the graph makes embeddings of the token ids, and
positions of several dimensions. Where metadata is made on the host, as for recurrent layers, or somebody else takes it,
the graph makes all but that: vLLM makes it in each step, from the graph's inputs.

vLLM's own functions are recorded.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens, prepare_pos_seq_lens
from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR

from vllm_hwplugin import journal
from vllm_hwplugin.fallback import gives_up, stays_stock
from vllm_hwplugin.features import V2_STEP_INPUTS
from vllm_hwplugin.spec_decode.graph_recording import attempt, record_graph
from vllm_hwplugin.spec_decode.obstacles import Part, custom_processors, why_not
from vllm_hwplugin.spec_decode.step_counts import Reason, StepCounts
from vllm_hwplugin.spec_decode.v2.tail_buffers import StandIn, TailBuffers
from vllm_hwplugin.spec_decode.v2.tail_graph import Held, TailGraphs

_STOCK: Final = "vLLM prepares every step"


def shows_metadata(runner: Any) -> bool:
    """Whether vLLM shows a KV connector the attention metadata of each step; a graph leaves the host none.

    From 0.30 on it does, with more of a step beside the scheduler's output.

    Args:
        runner: a `GPUModelRunner` that has its KV cache.
    """
    connector = runner.kv_connector
    return connector is not NO_OP_KV_CONNECTOR and len(inspect.signature(connector.pre_forward).parameters) > 1


def _embeds_tokens(runner: Any) -> bool:
    """Whether vLLM embeds the tokens of each step in front of the target, and nothing else.

    With adapters it also says in each step which of them an encoder has, with a connector it fetches what other engines
    have encoded, and it may put embeddings of a prompt over those of its tokens.
    """
    return bool(
        runner.supports_mm_inputs
        and runner.lora_config is None
        and runner.vllm_config.ec_transfer_config is None
        and getattr(runner.model_state, "prompt_embeds_state", None) is None
    )


class StepInputs:
    """The input graphs of one `GPUModelRunner`, which holds them as `step_inputs`.

    Args:
        runner: the runner.
        tail: its tail graphs, which capture these after their own.
    """

    def __init__(self, runner: Any, tail: TailGraphs):
        self._runner, self._tail = runner, tail
        self._step_counts = StepCounts(V2_STEP_INPUTS, "inputs")
        tail.add(self)
        self.forget()

    def forget(self) -> None:
        """Have no graphs, and nothing that was made for them."""
        # By tokens of a request and number of requests.
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        # vLLM's tensors that move, and where the graphs read them.
        self._moving: tuple[Any, ...] = ()
        self._fixed: tuple[torch.Tensor, ...] = ()
        self._metadata_is_vllms = False
        self._reads_slots = False
        self._tells_of_each_step = False
        self._embeds = self._embedded = False
        # The requests that were served last, and their batch.
        self._held: Held | None = None
        self._template: Any = None
        # Since the graphs' copies.
        self._blocks_changed = True
        # Whether vLLM's next call of `apply_staged_writes` has nothing to apply.
        self._same_sampling = self._same_blocks = False
        self._batch: Any = None

    # -- a start ------------------------------------------------------------------------------------------------------

    def stay_stock(self, reason: str) -> None:
        """Have no graphs, and put in the journal why.

        Raises:
            FeatureRequired: the feature's gate says `on`.
        """
        stays_stock(V2_STEP_INPUTS, _STOCK, reason)

    def give_up(self, reason: str) -> None:
        """Have no graphs any more, in an engine that serves, and put in the journal why."""
        if self._graphs:
            self.forget()
            gives_up(V2_STEP_INPUTS, _STOCK, reason)

    def capture(
        self, batches: Mapping[tuple[int, int], Any], buffers: TailBuffers, pool: Any, metadata_asked_for: str | None
    ) -> None:
        """Record the graphs for these shapes.

        Args:
            batches: by tokens of a request and number of requests, the batch that the tail's graphs were recorded with.
            buffers: where the tail's graphs have the requests' rows.
            pool: memory of the tail's graphs.
            metadata_asked_for: what takes attention metadata of each step; None where nothing does.

        Raises:
            FeatureRequired: nothing can be recorded, and the feature's gate says `on`.
        """
        self.forget()
        if (reason := why_not(self._runner, Part.V2_INPUTS)) is not None:
            self.stay_stock(reason)
            return
        runner = self._runner
        reason = why_not(runner, Part.V2_METADATA) or metadata_asked_for
        if reason is None and shows_metadata(runner):
            reason = "a KV connector is shown each step"
        self._embeds = _embeds_tokens(runner)
        self._tells_of_each_step = bool(custom_processors(runner))
        rope = getattr(runner.model_state, "rope_state", None)
        # Both change when a request comes, and the first with its blocks.
        self._moving = (runner.block_tables.num_blocks, *(() if rope is None else (rope.prefill_delta,)))

        def record_all() -> None:
            self._fixed = tuple(one.gpu.to(runner.device, copy=True) for one in self._moving)
            with buffers.stand_in(), StandIn(self._moving, self._fixed):
                for shape, batch in batches.items():
                    buffers.clear(shape[0])
                    prepare = self._preparing(batch, buffers, reason is None)
                    self._graphs[shape] = record_graph(prepare, pool, runner.vllm_config)

        if not attempt(V2_STEP_INPUTS, _STOCK, record_all, self.forget):
            return
        if reason is not None:
            self._metadata_is_vllms = True
            journal.note(V2_STEP_INPUTS, f"{reason}; attention metadata is vLLM's in each step")
        # vLLM makes metadata of each half of a batch, also if a graph has made the inputs.
        self._reads_slots = self._metadata_is_vllms or getattr(runner, "ubatch_runner", None) is not None
        journal.use(V2_STEP_INPUTS, True)

    def _preparing(self, batch: Any, buffers: TailBuffers, metadata: bool) -> Callable[[], None]:
        """What vLLM's `prepare_inputs` and `prepare_attn` do for `batch`, on the device.

        Args:
            metadata: whether attention metadata is made, too.
        """
        runner = self._runner
        inputs, states = runner.input_buffers, runner.req_states
        num_reqs, num_tokens = batch.num_reqs, batch.num_tokens
        padding = buffers.padding(num_reqs, num_tokens // num_reqs)
        start_loc = inputs.query_start_loc[: num_reqs + 1]
        attended = dataclasses.replace(batch, query_start_loc=start_loc)
        # On the device, or a graph would copy it from memory of the host that was freed long ago.
        no_image = torch.zeros(num_tokens, dtype=torch.bool, device=runner.device)

        def prepare() -> None:
            start_loc.copy_(padding.block_start_loc)
            if hasattr(inputs, "is_padding"):
                # From 0.25 on; read where experts pass padding over.
                inputs.is_padding[:num_tokens].copy_(padding.dead_tokens)
            prepare_pos_seq_lens(
                batch.idx_mapping, start_loc, states.num_computed_tokens.gpu, inputs.positions, inputs.seq_lens
            )
            # Padding has its row's length, which attention would take for keys.
            inputs.seq_lens[:num_reqs].mul_(padding.alive)
            combine_sampled_and_draft_tokens(
                inputs.input_ids,
                batch.idx_mapping,
                states.last_sampled_tokens,
                start_loc,
                inputs.seq_lens[:num_reqs],
                states.prefill_len.gpu,
                states.draft_tokens,
                batch.cu_num_logits,
                num_tokens,
            )
            block_tables, slots = runner.prepare_attn(attended)
            if runner.model_config.is_hybrid:
                # As vLLM leaves padding. Kernels of recurrent layers take all requests of a graph, pass over block 0,
                # and would move the state that another batch had in a row.
                for table in block_tables:
                    table[:num_reqs].mul_(padding.alive.unsqueeze(1))
            if metadata:
                runner.model_state.prepare_attn(
                    attended, CUDAGraphMode.FULL, block_tables, slots, runner.attn_groups, runner.kv_cache_config
                )
            if self._embeds:
                runner.model_state.encoder_runner.get_inputs_embeds(inputs.input_ids[:num_tokens], [], no_image)
            runner.model_state.prepare_inputs(attended, states)

        return prepare

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin_step(self, scheduled: Any) -> None:
        """Decide whether vLLM has parameters and blocks to apply in this step."""
        self._same_sampling = not self.changes_sampling(scheduled)
        self._same_blocks = not self.changes_blocks(scheduled)

    def apply_sampling(self, vllms: Callable[[], None]) -> None:
        """Apply parameters that the sampler has staged, unless this step has none."""
        same, self._same_sampling = self._same_sampling, False
        if not same:
            vllms()

    def apply_blocks(self, vllms: Callable[[], None]) -> None:
        """Apply blocks that the block tables have staged, unless this step has none."""
        same, self._same_blocks = self._same_blocks, False
        if not same:
            vllms()

    def changes_sampling(self, scheduled: Any) -> bool:
        """Whether the sampler has parameters of a new request to take over, or processors that count steps."""
        return not self._graphs or self._tells_of_each_step or bool(scheduled.scheduled_new_reqs)

    def changes_blocks(self, scheduled: Any) -> bool:
        """Whether a request has other blocks than in the step before, which the device is to know of."""
        changed = bool(scheduled.scheduled_new_reqs) or any(
            blocks is not None for blocks in scheduled.scheduled_cached_reqs.new_block_ids
        )
        self._blocks_changed |= changed
        return changed or not self._graphs

    def steady(self, scheduled: Any, desc: Any) -> Any:
        """vLLM's `InputBatch` of this step, whose inputs are then on the device; None where vLLM has to prepare them.

        Args:
            scheduled: the step's `SchedulerOutput`.
            desc: the target's `BatchExecutionDescriptor`.
        """
        self._batch = None
        held = self._hold(scheduled, desc)
        if isinstance(held, Reason):
            self._step_counts.missed(held)
            return None
        self._step_counts.served()
        runner = self._runner
        if self._blocks_changed:
            for moving, fixed in zip(self._moving, self._fixed, strict=True):
                fixed.copy_(moving.gpu, non_blocking=True)
            self._blocks_changed = False
        if held is not self._held:
            self._held, self._template = held, self._tail.held_batch()
        self._graphs[desc.uniform_token_count, desc.num_reqs].replay()
        tables = runner.block_tables
        if hasattr(tables, "_num_dirty_rows"):
            # From 0.33 on vLLM clears rows of a larger batch, and a replay does not tell it how many it wrote.
            tables._num_dirty_rows = max(tables._num_dirty_rows, desc.num_reqs)
        self._embedded = self._embeds and not scheduled.scheduled_encoder_inputs
        computed = runner.req_states.num_computed_tokens_np[held.rows]
        upper = np.zeros(self._template.num_reqs_after_padding, dtype=np.int32)
        np.add(computed, desc.uniform_token_count, out=upper[: len(computed)])
        self._batch = dataclasses.replace(
            self._template,
            has_structured_output_reqs=scheduled.has_structured_output_requests,
            num_computed_tokens_np=computed,
            seq_lens_cpu_upper_bound=torch.from_numpy(upper),
        )
        return self._batch

    def _hold(self, scheduled: Any, desc: Any) -> Held | Reason:
        """The requests of this step, which the tail's buffers then hold; or why vLLM has to prepare its inputs."""
        self._tail.follow_weights()
        if not self._graphs:
            return Reason.NOT_CAPTURED
        # vLLM sorts a batch by what its requests have, and these all have the same.
        order, width = list(scheduled.num_scheduled_tokens), max(scheduled.num_scheduled_tokens.values())
        drafts, most_reqs = scheduled.scheduled_spec_decode_tokens, self._tail.most_reqs.get(width)
        if (
            most_reqs is None
            or scheduled.total_num_scheduled_tokens != len(order) * width
            or len(drafts) != (len(order) if width > 1 else 0)
            or sum(map(len, drafts.values())) != len(order) * (width - 1)
        ):
            return Reason.PROMPT if self._has_prompt(self._rows(order)) else Reason.FEWER_DRAFTS
        # From 0.33 on, drafts are skipped for requests that are sure to end. vLLM's own drafter then takes the step's
        # attention metadata, of which a graph leaves nothing on the host.
        if scheduled.num_spec_tokens_to_schedule != width - 1 or getattr(scheduled, "skip_drafts", False):
            return Reason.FEWER_DRAFTS
        if len(order) > most_reqs:
            return Reason.LARGER_BATCH
        shape = (desc.uniform_token_count, desc.num_reqs)
        if desc.cg_mode != CUDAGraphMode.FULL or shape[0] != width or shape not in self._graphs:
            # The prefix cache may hold all of a prompt but its last token.
            return Reason.PROMPT if self._has_prompt(self._rows(order)) else Reason.NO_FULL_GRAPH
        held = self._tail.held
        if held is not None and order == held.req_ids and not scheduled.scheduled_new_reqs:
            rows = held.rows
        else:
            rows = self._rows(order)
            if self._has_prompt(rows):
                return Reason.PROMPT
        return self._tail.hold(order, rows, width, desc.num_tokens)

    def _rows(self, req_ids: list[str]) -> np.ndarray:
        """[number of requests]: each one's row in the runner's state, as vLLM's own batches have it."""
        index = self._runner.req_states.req_id_to_index
        rows: np.ndarray = np.array([index[one] for one in req_ids], dtype=np.intp)
        return rows

    def _has_prompt(self, rows: np.ndarray) -> bool:
        states = self._runner.req_states
        return bool((states.num_computed_prefill_tokens[rows] < states.prefill_len.np[rows]).any())

    def prepare_metadata(self, vllms: Callable[..., Any], input_batch: Any, *arguments: Any, **settings: Any) -> Any:
        """Return the target's attention metadata, or None if a graph replaces it."""
        if self._serves(input_batch) and not self._metadata_is_vllms:
            return None
        return vllms(input_batch, *arguments, **settings)

    def prepare_embeddings(
        self, vllms: Callable[..., Any], scheduled_encoder_inputs: Any, input_batch: Any, *arguments: Any
    ) -> Any:
        """Return the target's embeddings, or None if a graph has made them."""
        if self._serves(input_batch) and self._embedded:
            return None
        return vllms(scheduled_encoder_inputs, input_batch, *arguments)

    def prepare_model_inputs(self, vllms: Callable[..., Any], input_batch: Any, *arguments: Any) -> Any:
        """Return further inputs of the target; a graph reads none."""
        return {} if self._serves(input_batch) else vllms(input_batch, *arguments)

    def _serves(self, batch: Any) -> bool:
        return batch is not None and batch is self._batch

    def attention_inputs(self, batch: Any) -> Any:
        """Return block tables and slots of a prepared batch, or None."""
        if not self._serves(batch):
            return None
        tables = self._runner.block_tables
        block_tables = tuple(one[: batch.num_reqs_after_padding] for one in tables.input_block_tables)
        # vLLM would make a dict of each layer's slots, for metadata that nobody makes.
        slots = tables.slot_mappings[:, : batch.num_tokens_after_padding] if self._reads_slots else ()
        return block_tables, slots
