# SPDX-License-Identifier: Apache-2.0
"""Make a V1 decode step's inputs from the inputs of the step before, by one CUDA graph.

V1 makes each batch again: two dozen copies to the device, as many kernels, index arrays by the token, attention
metadata. Where requests are decoded, each with all its drafts, the index arrays depend on how many they are. The rest
follows on the device from what was sampled and drafted there: how many tokens are computed, token ids, positions,
lengths and slots. A graph makes these, from the rows that the requests had in the step before; block tables are copied
when a request has new blocks, or another row. Attention metadata is kept while the requests stay the same.

The first step with a number of requests takes vLLM's own way, as does each step with a new request. Later steps build
on what they leave on the host and the device.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.features import V1_STEP_INPUTS
from vllm_hwplugin.spec_decode.decode_batch import MAX_NUM_REQS, has_prompt
from vllm_hwplugin.spec_decode.graph_recording import Graphs, record_graph
from vllm_hwplugin.spec_decode.obstacles import Part, why_not
from vllm_hwplugin.spec_decode.step_counts import Reason, StepCounts


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """A graph, and whether it makes attention metadata too."""

    graph: torch.cuda.CUDAGraph
    metadata: bool


@dataclasses.dataclass(frozen=True)
class _Metadata:
    """Attention metadata that vLLM has made.

    Attributes:
        asked: the arguments that it was made for.
        layers: by the layer's name.
        distinct: the metadata objects of all layers, each once.
        common: vLLM's `CommonAttentionMetadata` for the drafter, of a batch without prompts, before the drafter changes
            it.
    """

    asked: Mapping[str, Any]
    layers: Mapping[str, Any]
    distinct: tuple[Any, ...]
    common: Any

    @classmethod
    def of(cls, asked: Mapping[str, Any], layers: Mapping[str, Any], common: Any) -> _Metadata:
        distinct = tuple({id(metadata): metadata for metadata in layers.values()}.values())
        # Caches that were derived from the lengths of this step.
        changes: dict[str, Any] = {
            field.name: None for field in dataclasses.fields(common) if field.name.endswith("_cache")
        }
        if getattr(common, "is_prefilling", None) is not None:
            # In this step a prompt's last token may have been computed, in later steps none is.
            changes["is_prefilling"] = torch.zeros_like(common.is_prefilling)
        return cls(asked, layers, distinct, dataclasses.replace(common, **changes))

    def of_length(self, max_seq_len: int) -> tuple[Mapping[str, Any], Any]:
        """Return the metadata for longer sequences, as `_build_attention_metadata` does."""
        for metadata in self.distinct:
            metadata.max_seq_len = max_seq_len
        return self.layers, dataclasses.replace(self.common, max_seq_len=max_seq_len)


@dataclasses.dataclass
class _Kept:
    """What vLLM has made for a decode batch; a step with the same requests gets it again.

    Attributes:
        req_ids: in the order of the batch.
        inputs: the result of `_prepare_inputs`; its draft token ids are where the graph writes them.
        slots: the arguments and the result of `_get_slot_mappings`.
        metadata: the result of `_build_attention_metadata`, if the graph makes its changing parts.
    """

    req_ids: list[str]
    inputs: tuple[Any, ...]
    slots: tuple[dict[str, Any], Any] | None = None
    metadata: _Metadata | None = None


class StepInputs(Graphs[dict[int, _Recorded]]):
    """The input graphs of one V1 `GPUModelRunner`, which holds them as `step_inputs`.

    In each step `execute_model` calls `update_states`, `prepare_inputs`, `get_slot_mappings` and
    `build_attention_metadata`, in this order, in place of the runner's methods with these names.
    """

    feature, effect = V1_STEP_INPUTS, "vLLM prepares every step"

    def __init__(self, runner: Any):
        super().__init__(runner)
        self._step_counts = StepCounts(V1_STEP_INPUTS, "inputs")

    def forget(self) -> None:
        super().forget()
        # `_Kept.inputs` by the number of requests, on which they depend.
        self._inputs: dict[int, tuple[Any, ...]] = {}
        # Of the step before, if that was a decode batch.
        self._kept: _Kept | None = None
        # Whether the buffers on the host and the device are the step before's; and each row is where it was there.
        self._follows, self._in_place = False, True
        # The graph that has prepared this step, or None if vLLM has; and the host's bound of the longest sequence then.
        self._step: _Recorded | None = None
        self._max_seq_len = 0

    @property
    def _query_len(self) -> int:
        """Tokens of a request in a decode batch: 1 + num_speculative_tokens."""
        return int(self._owner.uniform_decode_query_len)

    # -- a start ------------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Capture a graph per request count, after `capture_model` captured the target's.

        Raises:
            FeatureRequired: nothing can be captured, and the feature's switch is `on`.
        """
        self.forget()
        if (reason := why_not(self._owner, Part.V1_INPUTS)) is not None:
            self.stay_stock(reason)
            return
        started = time.perf_counter()
        reason = why_not(self._owner, Part.V1_METADATA)

        def record_all() -> None:
            most, pool = self._make_buffers(), torch.cuda.graph_pool_handle()
            self.captured = {size: self._record(size, reason is None, pool) for size in range(most, 0, -1)}

        with torch.inference_mode(), graph_capture(device=self._owner.device):
            # Requests may be running: when ranks of data parallelism come or go, vLLM captures again.
            computed = self._owner.num_computed_tokens.clone()
            self.attempt(record_all)
            self._owner.num_computed_tokens.copy_(computed)
        torch.accelerator.synchronize()
        if self.captured is None:
            return
        run_records.note(
            V1_STEP_INPUTS,
            f"graphs of 1 to {len(self.captured)} requests, captured in {time.perf_counter() - started:.1f} s, "
            + (f"without attention metadata: {reason}" if reason else "with attention metadata"),
        )
        run_records.use(V1_STEP_INPUTS, True)

    def _make_buffers(self) -> int:
        """Allocate what graphs read and the drafts; return for how many requests."""
        runner, query_len, device = self._owner, self._query_len, self._owner.device
        most: int = min(MAX_NUM_REQS, runner.max_num_reqs, runner.max_num_tokens // query_len)
        self._offsets = torch.arange(query_len, dtype=torch.int64, device=device)
        self._starts: np.ndarray = np.arange(runner.query_start_loc.np.size, dtype=np.int32) * query_len
        self._draft_ids = torch.zeros(most * (query_len - 1), dtype=torch.int32, device=device)
        if runner.use_async_spec_decode:
            # The step before leaves its results elsewhere each time.
            self._counts = torch.zeros(runner.max_num_reqs, dtype=torch.int32, device=device)
            self._tokens = torch.zeros(runner.max_num_reqs, query_len, dtype=torch.int32, device=device)
            # Each request's row in the step before; and its computed tokens if it verified no drafts there, else -1.
            self._rows = runner._make_buffer(2, most, dtype=torch.int32)
            self._stage(np.arange(most), -1)
        else:
            # How many tokens of each request are computed, then the token ids.
            self._from_host = runner._make_buffer(most * (1 + query_len), dtype=torch.int32)
        return most

    def _record(self, num_reqs: int, with_metadata: bool, pool: Any) -> _Recorded:
        runner = self._owner
        # Fill the buffers as vLLM would for such a batch: capturing also runs the kernels once.
        self._write_starts(num_reqs)
        runner.num_computed_tokens.zero_()
        # What depends on the length of sequences on the host must hold for the longest.
        runner.optimistic_seq_lens_cpu[:num_reqs].fill_(runner.max_model_len)
        desc = self._graph_of_target(num_reqs) if with_metadata else None

        def prepare() -> None:
            self._advance(num_reqs)
            if desc is not None:
                self._make_metadata(num_reqs, desc)

        return _Recorded(record_graph(prepare, pool, runner.vllm_config), metadata=desc is not None)

    def _graph_of_target(self, num_reqs: int) -> Any:
        """Return the `BatchDescriptor` of the target's FULL decode graph, or None."""
        mode, desc = self._owner._determine_batch_execution_and_padding(
            num_tokens=num_reqs * self._query_len,
            num_reqs=num_reqs,
            num_scheduled_tokens_np=np.full(num_reqs, self._query_len, dtype=np.int32),
            max_num_scheduled_tokens=self._query_len,
            use_cascade_attn=False,
        )[:2]
        return desc if mode == CUDAGraphMode.FULL else None

    def _advance(self, num_reqs: int) -> None:
        """Do the device work of `_prepare_inputs` for an unchanged decode batch."""
        runner, query_len = self._owner, self._query_len
        num_tokens = num_reqs * query_len
        computed = runner.num_computed_tokens[:num_reqs]
        token_ids = runner.input_ids.gpu[:num_tokens].view(num_reqs, query_len)
        if runner.use_async_spec_decode:
            rows, known = self._rows.gpu[:, :num_reqs]
            # A request without drafts has one token.
            counts = runner.num_accepted_tokens.gpu[:num_reqs]
            torch.index_select(self._counts, 0, rows, out=counts)
            torch.index_select(self._tokens, 0, rows, out=token_ids)
            verified = runner.num_computed_tokens.index_select(0, rows).add_(counts)
            torch.where(known < 0, verified, known, out=computed)
        else:
            from_host = self._from_host.gpu
            computed.copy_(from_host[:num_reqs])
            token_ids.copy_(from_host[num_reqs : num_reqs + num_tokens].view(num_reqs, query_len))
        positions = runner.positions[:num_tokens]
        torch.add(computed[:, None], self._offsets, out=positions.view(num_reqs, query_len))
        torch.add(computed, query_len, out=runner.seq_lens[:num_reqs])
        runner.seq_lens[num_reqs:].fill_(0)
        runner.input_batch.block_table.compute_slot_mapping(
            num_reqs, runner.query_start_loc.gpu[: num_reqs + 1], positions
        )
        self._draft_ids[: num_tokens - num_reqs].view(num_reqs, query_len - 1).copy_(token_ids[:, 1:])

    def _make_metadata(self, num_reqs: int, desc: Any) -> None:
        """Launch vLLM's kernels for a decode batch's attention metadata in graph `desc`."""
        runner, query_len = self._owner, self._query_len
        num_reqs_padded = num_reqs if desc.num_reqs is None else desc.num_reqs
        slot_mappings, _ = runner._get_slot_mappings(
            num_tokens_padded=desc.num_tokens, num_reqs_padded=num_reqs_padded, num_tokens_unpadded=num_reqs * query_len
        )
        runner._build_attention_metadata(
            num_tokens=num_reqs * query_len,
            num_tokens_padded=desc.num_tokens,
            num_reqs=num_reqs,
            num_reqs_padded=num_reqs_padded,
            max_query_len=query_len,
            use_spec_decode=True,
            slot_mappings=slot_mappings,
        )

    # -- a step -------------------------------------------------------------------------------------------------------

    def forget_step(self) -> None:
        """Make vLLM prepare the next step.

        `_dummy_run` overwrites the last step's batch with its own. A rank of data parallelism runs it while its
        requests are paused, and these go on unchanged.
        """
        self._kept, self._follows = None, False

    def update_states(self, scheduled: Any) -> Any:
        if not scheduled.total_num_scheduled_tokens:
            # All requests leave the batch; when they come back, none has a step before.
            self.forget_step()
        return self._owner._update_states(scheduled)

    def prepare_inputs(self, scheduled: Any, num_scheduled_tokens: np.ndarray) -> tuple[Any, ...]:
        """Do `_prepare_inputs`; `num_scheduled_tokens` is int32 [number of requests]."""
        mixed = self._not_uniform(scheduled, num_scheduled_tokens)
        step = mixed or self._step_for(scheduled)
        if self._step_counts.missed(step):
            self._step = None
            made: tuple[Any, ...] = self._owner._prepare_inputs(scheduled, num_scheduled_tokens)
            self._kept, self._follows = self._keep(made) if mixed is None else None, True
            return made
        count, changed = len(num_scheduled_tokens), step[1] is not self._kept
        self._step, self._kept = step
        self._write_starts(count)
        if changed or any(blocks is not None for blocks in scheduled.scheduled_cached_reqs.new_block_ids):
            self._owner.input_batch.block_table.commit_block_table(count)
        if changed:
            self._change(count)
        self._hand_over(count)
        self._step.graph.replay()
        return self._kept.inputs

    def get_slot_mappings(self, **asked: Any) -> Any:
        """Do `_get_slot_mappings`; the tensors are right once inputs are prepared."""
        batch = self._kept
        if self._step is not None and batch is not None and batch.slots is not None and batch.slots[0] == asked:
            return batch.slots[1]
        made = self._owner._get_slot_mappings(**asked)
        if batch is not None and not asked.get("ubatch_slices"):
            batch.slots = asked, made
        return made

    def build_attention_metadata(self, **asked: Any) -> Any:
        """Do `_build_attention_metadata`.

        A target in a FULL graph reads the tensors of the metadata, and these are the same in each step.
        """
        batch = self._kept
        metadata = None if batch is None or self._step is None else batch.metadata
        if metadata is not None and _alike(metadata.asked, asked):
            return metadata.of_length(self._max_seq_len)
        made = self._owner._build_attention_metadata(**asked)
        if self.captured is not None and batch is not None and self.captured[asked["num_reqs"]].metadata:
            layers, common = made
            in_one_graph = asked["num_tokens_padded"] is not None and asked["ubatch_slices"] is None
            batch.metadata = _Metadata.of(asked, layers, common) if in_one_graph and common is not None else None
        return made

    # -- which steps --------------------------------------------------------------------------------------------------

    def _not_uniform(self, scheduled: Any, num_scheduled_tokens: np.ndarray) -> Reason | None:
        """Return why no graph fits (draft count, too many requests), or None."""
        if self.captured is None:
            return Reason.NOT_CAPTURED
        count, query_len = len(num_scheduled_tokens), self._query_len
        drafts = scheduled.scheduled_spec_decode_tokens
        if (
            scheduled.total_num_scheduled_tokens != count * query_len
            or len(drafts) != count
            or any(len(tokens) != query_len - 1 for tokens in drafts.values())
            or (num_scheduled_tokens != query_len).any()
        ):
            return Reason.PROMPT if has_prompt(self._owner.input_batch, count) else Reason.FEWER_DRAFTS
        return None if count in self.captured else Reason.LARGER_BATCH

    def _keep(self, made: tuple[Any, ...]) -> _Kept | None:
        """Return the uniform batch to keep, or None if it lacks data."""
        runner = self._owner
        num_reqs = runner.input_batch.num_reqs
        logits_indices, metadata, *others = made
        if (
            metadata is None
            or runner.discard_request_mask.np[:num_reqs].any()
            or (runner.num_decode_draft_tokens.np[:num_reqs] != self._query_len - 1).any()
        ):
            return None
        draft_ids = self._draft_ids[: num_reqs * (self._query_len - 1)]
        spec_decode = dataclasses.replace(metadata, draft_token_ids=draft_ids)
        inputs = self._inputs[num_reqs] = (logits_indices, spec_decode, *others)
        return _Kept(list(runner.input_batch.req_ids), inputs)

    def _step_for(self, scheduled: Any) -> tuple[_Recorded, _Kept] | Reason:
        """Return this batch's graph and the step before, or a reason."""
        runner, batch = self._owner, self._owner.input_batch
        if self.captured is None or not self._follows:
            return Reason.STEP_BEFORE
        if scheduled.scheduled_new_reqs or scheduled.scheduled_cached_reqs.resumed_req_ids:
            return Reason.REQUESTS_CHANGED
        num_reqs, latest = len(batch.req_ids), self._kept
        if latest is None or batch.req_ids != latest.req_ids:
            inputs = self._inputs.get(num_reqs)
            if inputs is None or (not runner.use_async_spec_decode and runner.model_config.is_hybrid):
                # The host has the numbers of accepted tokens, and moves them with the rows.
                return Reason.REQUESTS_CHANGED
            latest = _Kept(list(batch.req_ids), inputs)
        if runner.use_async_spec_decode and not self._has_drafted():
            return Reason.STEP_BEFORE
        lengths = runner.optimistic_seq_lens_cpu.numpy()[:num_reqs]
        np.add(batch.num_computed_tokens_cpu[:num_reqs], self._query_len, out=lengths)
        self._max_seq_len = int(lengths.max())
        known = [runner.requests[req_id].num_tokens for req_id in batch.req_ids]
        if (lengths < known).any() or has_prompt(batch, num_reqs):
            # vLLM throws away what is sampled for such a request.
            return Reason.PROMPT
        if runner.use_async_spec_decode and not self._find_rows(num_reqs):
            return Reason.REQUESTS_CHANGED
        return self.captured[num_reqs], latest

    def _has_drafted(self) -> bool:
        """Whether the last step left, row by row, what the graph needs."""
        runner, batch = self._owner, self._owner.input_batch
        counts, sampled = runner.valid_sampled_token_count_gpu, batch.prev_sampled_token_ids
        drafts = runner._draft_token_ids
        return (
            counts is not None
            and sampled is not None
            and isinstance(drafts, torch.Tensor)
            and sampled.shape == (counts.shape[0], 1)
            and drafts.shape == (counts.shape[0], self._query_len - 1)
        )

    def _find_rows(self, num_reqs: int) -> bool:
        """Stage the requests' rows in the step before, if all had one."""
        runner, batch = self._owner, self._owner.input_batch
        drafted = runner.prev_num_draft_tokens.np
        if batch.prev_req_id_to_index == batch.req_id_to_index and drafted[:num_reqs].all():
            if not self._in_place:
                self._stage(np.arange(self._rows.np.shape[1]), -1)
                self._in_place = True
            return True
        runner._compute_prev_positions(num_reqs)
        rows = runner.prev_positions.np[:num_reqs]
        if (rows < 0).any():
            return False
        self._stage(rows, np.where(drafted[rows] > 0, -1, batch.num_computed_tokens_cpu[:num_reqs]))
        self._in_place = False
        return True

    def _stage(self, rows: np.ndarray, known: Any) -> None:
        staged = self._rows.np
        staged[0, : len(rows)], staged[1, : len(rows)] = rows, known
        self._rows.copy_to_gpu()

    def _write_starts(self, num_reqs: int) -> None:
        """Write a decode batch's row starts on the host."""
        # In each step: a drafter may have overwritten them.
        np.minimum(self._starts, num_reqs * self._query_len, out=self._owner.query_start_loc.np)

    def _change(self, num_reqs: int) -> None:
        """Write what `_prepare_inputs` does for other requests."""
        runner, drafts = self._owner, self._owner.num_decode_draft_tokens.np
        runner.query_start_loc.copy_to_gpu()
        runner.optimistic_seq_lens_cpu[num_reqs:].fill_(0)
        runner.discard_request_mask.np[:num_reqs] = False
        runner.discard_request_mask.gpu[:num_reqs].fill_(False)
        runner.num_accepted_tokens.gpu[num_reqs:].fill_(1)
        drafts[:num_reqs], drafts[num_reqs:] = self._query_len - 1, -1

    def _hand_over(self, num_reqs: int) -> None:
        """Copy the last step's results to where the graph reads them."""
        runner, batch = self._owner, self._owner.input_batch
        if runner.use_async_spec_decode:
            counts = runner.valid_sampled_token_count_gpu
            tokens = self._tokens[: len(counts)]
            self._counts[: len(counts)].copy_(counts)
            tokens[:, 0].copy_(batch.prev_sampled_token_ids[:, 0])
            tokens[:, 1:].copy_(runner._draft_token_ids)
            return
        query_len = self._query_len
        computed, count = batch.num_computed_tokens_cpu[:num_reqs], num_reqs * (1 + query_len)
        columns = computed[:, None] + np.arange(query_len)
        staged = self._from_host.np
        staged[:num_reqs] = computed
        staged[num_reqs:count] = batch.token_ids_cpu[np.arange(num_reqs)[:, None], columns].ravel()
        self._from_host.copy_to_gpu(count)


def _alike(before: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Whether two `_build_attention_metadata` calls ask for one undivided batch shape."""
    shape = ("num_tokens", "num_tokens_padded", "num_reqs", "num_reqs_padded", "max_query_len")
    return (
        all(before[name] == asked[name] for name in shape)
        and before["slot_mappings"] is asked["slot_mappings"]
        and asked["ubatch_slices"] is None
        and asked.get("cascade_attn_prefix_lens") is None
        and before.get("cascade_attn_prefix_lens") is None
    )
