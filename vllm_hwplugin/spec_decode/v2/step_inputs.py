# SPDX-License-Identifier: Apache-2.0
"""Prepare the inputs of a decode step in one CUDA graph (Model Runner V2).

If `TailGraphs` covers a step, its requests have equal draft counts, and their state on the device determines the
inputs. One graph of vLLM's own functions computes positions, lengths, token ids, block tables, slots and the device
part of the attention metadata. The host adds only lengths that no kernel reads. If the requests differ from the
previous step's, `TailGraphs` first copies their rows to the device.

A multimodal model has no images or the like after a prompt, so the graph computes embeddings of the token ids and
positions of several dimensions. If a builder makes metadata on the host, as for recurrent layers, or another component
takes the metadata, the graph leaves the metadata out: vLLM builds it in each step from the graph's inputs.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens, prepare_pos_seq_lens
from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.features import V2_STEP_INPUTS
from vllm_hwplugin.spec_decode.graph_recording import Graphs, record_graph
from vllm_hwplugin.spec_decode.obstacles import Part, custom_processors, why_not
from vllm_hwplugin.spec_decode.step_counts import Reason, StepCounts
from vllm_hwplugin.spec_decode.v2.tail_buffers import TailBuffers, stand_in
from vllm_hwplugin.spec_decode.v2.tail_capture import Captured, Held
from vllm_hwplugin.spec_decode.v2.tail_graph import TailGraphs


def _embeds_tokens(runner: Any) -> bool:
    """Whether vLLM only embeds each step's tokens before the target."""
    # With adapters vLLM also selects the encoder's adapters in each step. With an encoder connector it fetches what
    # other engines have encoded. With prompt embeddings it may overwrite the tokens' embeddings.
    return bool(
        runner.supports_mm_inputs
        and runner.lora_config is None
        and runner.vllm_config.ec_transfer_config is None
        and getattr(runner.model_state, "prompt_embeds_state", None) is None
    )


@dataclasses.dataclass(frozen=True)
class _Captured:
    """The graphs of one capture.

    Attributes:
        base: the sampling and drafting graphs, whose buffers hold the requests' rows.
        graphs: by (tokens of a request, number of requests).
        moving: vLLM's tensors whose addresses change.
        fixed: their copies, which the graphs read.
        metadata_is_vllms: whether vLLM builds attention metadata in each step.
        embeds: whether the graphs embed tokens.
        tells_of_each_step: whether the sampler has processors that count steps.
    """

    base: Captured
    graphs: Mapping[tuple[int, int], torch.cuda.CUDAGraph]
    moving: tuple[Any, ...]
    fixed: tuple[torch.Tensor, ...]
    metadata_is_vllms: bool
    embeds: bool
    tells_of_each_step: bool


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step whose inputs a graph made. `embedded`: also the embeddings of all its tokens."""

    captured: _Captured
    batch: Any
    embedded: bool


class StepInputs(Graphs[_Captured]):
    """The input graphs of one `GPUModelRunner`'s `step_inputs`; its `TailGraphs` capture them."""

    feature, effect = V2_STEP_INPUTS, "vLLM prepares every step"

    def __init__(self, runner: Any, tail: TailGraphs):
        super().__init__(runner)
        self._tail = tail
        self._step_counts = StepCounts(V2_STEP_INPUTS, "inputs")

    def forget(self) -> None:
        super().forget()
        # The requests of the last covered step, and their batch.
        self._held: Held | None = None
        self._template: Any = None
        # Since the last copy to `fixed`.
        self._blocks_changed = True
        # Owners of `apply_staged_writes` that have nothing to apply in their next call.
        self._unchanged: set[str] = set()
        # None if vLLM prepared the step.
        self._step: _Step | None = None

    # -- a start ------------------------------------------------------------------------------------------------------

    def capture(self, base: Captured, metadata_asked_for: str | None) -> None:
        """Capture a graph for each batch of `base`.

        Args:
            base: the sampling and drafting graphs.
            metadata_asked_for: what reads each step's attention metadata on the host; None if nothing does.

        Raises:
            FeatureRequired: no graph can be captured, and the feature's switch is `on`.
        """
        self.forget()
        runner = self._owner
        if (reason := why_not(runner, Part.V2_INPUTS)) is not None:
            self.stay_stock(reason)
            return
        reason, connector = why_not(runner, Part.V2_METADATA) or metadata_asked_for, runner.kv_connector
        asks = reason is None and connector is not NO_OP_KV_CONNECTOR
        # From 0.30. A graph leaves no metadata on the host.
        if asks and len(inspect.signature(connector.pre_forward).parameters) > 1:
            reason = "a KV connector is shown each step"
        if not self.attempt(lambda: self._record(base, reason is not None)):
            return
        if reason is not None:
            run_records.note(V2_STEP_INPUTS, f"{reason}; attention metadata is vLLM's in each step")
        run_records.use(V2_STEP_INPUTS, True)

    def _record(self, base: Captured, metadata_is_vllms: bool) -> None:
        runner, embeds = self._owner, _embeds_tokens(self._owner)
        rope = getattr(runner.model_state, "rope_state", None)
        # Both change when a request arrives, `num_blocks` also when a request gets blocks.
        moving = (runner.block_tables.num_blocks, *(() if rope is None else (rope.prefill_delta,)))
        fixed = tuple(source.gpu.to(runner.device, copy=True) for source in moving)
        graphs = {}
        with base.buffers.stand_in(), stand_in(moving, fixed):
            for shape, batch in base.batches.items():
                base.buffers.clear(shape[0])
                prepare = self._preparing(batch, base.buffers, not metadata_is_vllms, embeds)
                graphs[shape] = record_graph(prepare, base.pool, runner.vllm_config)
        self.captured = _Captured(
            base=base,
            graphs=graphs,
            moving=moving,
            fixed=fixed,
            metadata_is_vllms=metadata_is_vllms,
            embeds=embeds,
            tells_of_each_step=bool(custom_processors(runner)),
        )

    def _preparing(self, batch: Any, buffers: TailBuffers, metadata: bool, embeds: bool) -> Callable[[], None]:
        """Return the device work of vLLM's `prepare_inputs` and `prepare_attn`."""
        runner = self._owner
        inputs, states = runner.input_buffers, runner.req_states
        num_reqs, num_tokens = batch.num_reqs, batch.num_tokens
        padding = buffers.padding(num_reqs, num_tokens // num_reqs)
        start_loc = inputs.query_start_loc[: num_reqs + 1]
        attended = dataclasses.replace(batch, query_start_loc=start_loc)
        # On the device: a graph would copy it from host memory that has been freed.
        no_image = torch.zeros(num_tokens, dtype=torch.bool, device=runner.device)

        def prepare() -> None:
            start_loc.copy_(padding.block_start_loc)
            if hasattr(inputs, "is_padding"):
                # From 0.25; experts skip padding by it.
                inputs.is_padding[:num_tokens].copy_(padding.dead_tokens)
            prepare_pos_seq_lens(
                batch.idx_mapping, start_loc, states.num_computed_tokens.gpu, inputs.positions, inputs.seq_lens
            )
            # Padding has its row's length, and attention would read that many keys.
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
            if runner.model_config.is_hybrid or runner.model_config.is_attention_free:
                # As vLLM does for padding. Kernels of recurrent layers process all requests of a graph and skip block
                # 0. With another block they would move the state that another batch had in the row.
                for table in block_tables:
                    table[:num_reqs].mul_(padding.alive.unsqueeze(1))
            if metadata:
                runner.model_state.prepare_attn(
                    attended, CUDAGraphMode.FULL, block_tables, slots, runner.attn_groups, runner.kv_cache_config
                )
            if embeds:
                runner.model_state.encoder_runner.get_inputs_embeds(inputs.input_ids[:num_tokens], [], no_image)
            runner.model_state.prepare_inputs(attended, states)

        return prepare

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin_step(self, scheduled: Any) -> None:
        """Decide whether vLLM has parameters and blocks to apply in this step."""
        captured, new_requests = self.captured, bool(scheduled.scheduled_new_reqs)
        new_blocks = new_requests or any(blocks is not None for blocks in scheduled.scheduled_cached_reqs.new_block_ids)
        self._blocks_changed |= new_blocks
        self._unchanged = set()
        if captured is not None:
            changed = {"sampler": new_requests or captured.tells_of_each_step, "block tables": new_blocks}
            self._unchanged = {owner for owner, changes in changed.items() if not changes}

    def apply_sampling(self, vllms: Callable[[], None]) -> None:
        """Apply the sampler's staged parameters, unless this step has none."""
        self._apply("sampler", vllms)

    def apply_blocks(self, vllms: Callable[[], None]) -> None:
        """Apply staged rows of the block tables, unless this step has none."""
        self._apply("block tables", vllms)

    def _apply(self, owner: str, vllms: Callable[[], None]) -> None:
        if owner in self._unchanged:
            self._unchanged.remove(owner)
        else:
            vllms()

    def steady(self, scheduled: Any, desc: Any) -> Any:
        """Return the step's `InputBatch` with inputs on the device, or None.

        None: vLLM must prepare the inputs. `scheduled` is the `SchedulerOutput`, `desc` the target's
        `BatchExecutionDescriptor`.
        """
        self._step = None
        covered = self._hold(scheduled, desc)
        if self._step_counts.missed(covered):
            # A step that computes a part of a video changes offsets of positions, if vLLM leaves out other parts.
            self._blocks_changed |= getattr(self._owner.model_state, "mm_pruner", None) is not None
            return None
        captured, held = covered
        runner = self._owner
        if self._blocks_changed:
            for moving, fixed in zip(captured.moving, captured.fixed, strict=True):
                fixed.copy_(moving.gpu, non_blocking=True)
            self._blocks_changed = False
        if held is not self._held:
            self._held, self._template = held, captured.base.batch_of(runner, held)
        captured.graphs[desc.uniform_token_count, desc.num_reqs].replay()
        tables = runner.block_tables
        if hasattr(tables, "_num_dirty_rows"):
            # From 0.33 vLLM clears rows that a larger batch wrote, and a replay does not count its rows.
            tables._num_dirty_rows = max(tables._num_dirty_rows, desc.num_reqs)
        computed = runner.req_states.num_computed_tokens_np[held.rows]
        upper = np.zeros(self._template.num_reqs_after_padding, dtype=np.int32)
        np.add(computed, desc.uniform_token_count, out=upper[: len(computed)])
        batch = dataclasses.replace(
            self._template,
            has_structured_output_reqs=scheduled.has_structured_output_requests,
            num_computed_tokens_np=computed,
            seq_lens_cpu_upper_bound=torch.from_numpy(upper),
        )
        self._step = _Step(captured, batch, captured.embeds and not scheduled.scheduled_encoder_inputs)
        return batch

    def _hold(self, scheduled: Any, desc: Any) -> tuple[_Captured, Held] | Reason:
        """Put this step's requests into the buffers, or return a reason."""
        self._tail.follow_weights()
        captured = self.captured
        if captured is None:
            return Reason.NOT_CAPTURED
        # vLLM sorts a batch by its requests' token counts, which are equal here.
        order, width = list(scheduled.num_scheduled_tokens), max(scheduled.num_scheduled_tokens.values())
        drafts, most_reqs = scheduled.scheduled_spec_decode_tokens, captured.base.most_reqs.get(width)
        if (
            most_reqs is None
            or scheduled.total_num_scheduled_tokens != len(order) * width
            or len(drafts) != (len(order) if width > 1 else 0)
            or sum(map(len, drafts.values())) != len(order) * (width - 1)
        ):
            return Reason.PROMPT if self._has_prompt(self._rows(order)) else Reason.FEWER_DRAFTS
        # From 0.33 vLLM skips drafts for requests that are sure to end. Its drafter then reads the step's attention
        # metadata on the host, and the graph does not write it there.
        if scheduled.num_spec_tokens_to_schedule != width - 1 or getattr(scheduled, "skip_drafts", False):
            return Reason.FEWER_DRAFTS
        if len(order) > most_reqs:
            return Reason.LARGER_BATCH
        shape = (desc.uniform_token_count, desc.num_reqs)
        if desc.cg_mode != CUDAGraphMode.FULL or shape[0] != width or shape not in captured.graphs:
            # The prefix cache may hold a prompt except for its last token.
            return Reason.PROMPT if self._has_prompt(self._rows(order)) else Reason.NO_FULL_GRAPH
        held = self._tail.held
        if held is not None and order == held.req_ids and not scheduled.scheduled_new_reqs:
            rows = held.rows
        else:
            rows = self._rows(order)
            if self._has_prompt(rows):
                return Reason.PROMPT
        held_or_reason = self._tail.hold(captured.base, order, rows, width, desc.num_tokens)
        if isinstance(held_or_reason, Reason):
            return held_or_reason
        drafting = held_or_reason.graphs.drafting
        if self._owner.speculator is not None and isinstance(drafting, Reason) and not captured.metadata_is_vllms:
            # vLLM's drafter reads the step's attention metadata, too.
            return drafting
        return captured, held_or_reason

    def _rows(self, req_ids: list[str]) -> np.ndarray:
        """Return the requests' rows in the runner's state, [number of requests]."""
        index = self._owner.req_states.req_id_to_index
        rows: np.ndarray = np.array([index[req_id] for req_id in req_ids], dtype=np.intp)
        return rows

    def _has_prompt(self, rows: np.ndarray) -> bool:
        states = self._owner.req_states
        return bool((states.num_computed_prefill_tokens[rows] < states.prefill_len.np[rows]).any())

    def prepare_metadata(self, vllms: Callable[..., Any], input_batch: Any, *arguments: Any, **settings: Any) -> Any:
        """Return the target's attention metadata, or None if a graph replaces it."""
        step = self._step_of(input_batch)
        if step is None or step.captured.metadata_is_vllms:
            return vllms(input_batch, *arguments, **settings)
        return None

    def prepare_embeddings(
        self, vllms: Callable[..., Any], scheduled_encoder_inputs: Any, input_batch: Any, *arguments: Any
    ) -> Any:
        """Return the target's embeddings, or None if a graph has made them."""
        step = self._step_of(input_batch)
        if step is None or not step.embedded:
            return vllms(scheduled_encoder_inputs, input_batch, *arguments)
        return None

    def prepare_model_inputs(self, vllms: Callable[..., Any], input_batch: Any, *arguments: Any) -> Any:
        """Return further inputs of the target; a graph reads none."""
        return vllms(input_batch, *arguments) if self._step_of(input_batch) is None else {}

    def _step_of(self, batch: Any) -> _Step | None:
        """Return the step of `batch`, or None if vLLM prepared it."""
        step = self._step
        return step if step is not None and step.batch is batch else None

    def attention_inputs(self, batch: Any) -> Any:
        """Return block tables and slots of a prepared batch, or None."""
        step = self._step_of(batch)
        if step is None:
            return None
        tables = self._owner.block_tables
        block_tables = tuple(table[: batch.num_reqs_after_padding] for table in tables.input_block_tables)
        # vLLM would make a dict of each layer's slots for metadata, which nothing builds here. With `ubatch_runner` it
        # builds metadata for each half of a batch. Up to 0.30 it also looks up the experts of each slot.
        readers = ("ubatch_runner", "routed_experts_capturer")
        reads_slots = step.captured.metadata_is_vllms or any(getattr(self._owner, name, None) for name in readers)
        return block_tables, tables.slot_mappings[:, : batch.num_tokens_after_padding] if reads_slots else ()
