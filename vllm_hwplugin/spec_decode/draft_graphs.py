# SPDX-License-Identifier: Apache-2.0
"""FULL CUDA graphs for the drafters of vLLM's V1 model runner.

No released vLLM captures a V1 drafter's whole forward: `SpecDecodeBaseProposer` dispatches PIECEWISE at best, and under
`cudagraph_mode=FULL` its graphs do not exist at all. The idea of what follows is that of vLLM PR 34880; the way differs
in four points, each of which made a hunk or a hazard unnecessary:

* Padding ends at the graph's edge. The PR pads the batch in the runner, the input batch and two kernels; here the host
  code keeps the real batch and only the captured forward sees padded rows (`draft_metadata`).
* The drafter owns every tensor its graphs read, so nothing is written in place into the target's metadata.
* The graph goes around the *call* of the draft model, not around `proposer.model`: class tests on the model need no
  unwrapping, and a wrapper that the runner adds later nests inside.
* The drafter captures into a memory pool of its own. In the shared pool its replays may overwrite the target's output,
  which the runner reads once more, after drafting, for prompt logprobs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphOptions, CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.platforms import current_platform

from vllm_hwplugin import record
from vllm_hwplugin.spec_decode.draft_builders import builder_classes
from vllm_hwplugin.spec_decode.draft_keys import DraftKeys, DraftShape, request_ladder, uniform_shape
from vllm_hwplugin.spec_decode.draft_metadata import PassBuffers, full_block_table, rows_held, unmanaged_field
from vllm_hwplugin.spec_decode.draft_obstacles import facts_of, obstacle
from vllm_hwplugin.spec_decode.fallback import stays_stock
from vllm_hwplugin.spec_decode.first_pass import FirstPass, first_pass_of

logger = logging.getLogger("vllm.hwplugin")

_FEATURE = "draft-full-graph"
_GATE = "VLLM_HWPLUGIN_DRAFT_FULL_GRAPH"
_STOCK = "the drafter runs as in stock vLLM"
_NO_SIZE = "no capture size holds a whole batch of the drafter"
_NO_GRAPH = 0  # as a query length: this batch may not use a FULL graph
_NOT_PLANNED = FirstPass(query_len=_NO_GRAPH, max_tokens=0)
_STEP_QUERY_LEN = 1
_PADDING_SLOT_ID = -1  # vllm.v1.spec_decode.utils.PADDING_SLOT_ID; importing it here would be a cycle


def plan_keys(
    target_mode: CUDAGraphMode,
    capture_sizes: list[int],
    *,
    num_speculative_tokens: int,
    first: FirstPass,
    max_first_query_len: int | None,
    max_num_seqs: int,
    parallel_drafting: bool = False,
) -> DraftKeys:
    """The shapes to capture for a drafter whose target resolved to `target_mode`.

    Args:
        capture_sizes: the target's `cudagraph_capture_sizes`, in tokens.
        first: the drafter's first pass.
        max_first_query_len: the longest query that every draft attention backend treats as decode; None for no limit.
        max_num_seqs: requests in a batch, at most.
        parallel_drafting: the first pass drafts every token, so there are no one-token steps.
    """
    ladder = request_ladder(capture_sizes, 1 + num_speculative_tokens, max_num_seqs)
    uniform: dict[int, tuple[int, ...]] = {}
    if num_speculative_tokens > 1 and not parallel_drafting:
        uniform[_STEP_QUERY_LEN] = ladder
    if max_first_query_len is None or first.query_len <= max_first_query_len:
        uniform[first.query_len] = tuple(rung for rung in ladder if rung * first.query_len <= first.max_tokens)
    mixed: tuple[int, ...] = ()
    if target_mode.mixed_mode() == CUDAGraphMode.FULL and not first.always_uniform:
        mixed = tuple(sorted(size for size in capture_sizes if size <= first.max_tokens))
    return DraftKeys(uniform=uniform, mixed=mixed, max_num_seqs=max_num_seqs)


def capture_draft_graphs(drafter: Any, template: Any) -> None:
    """Capture every graph of `drafter` while the runner captures the target's FULL graphs.

    Called by the patched `GPUModelRunner._dummy_run`. Proposers without graphs (n-gram, medusa, ...) pass through.

    Args:
        drafter: any proposer of vLLM.
        template: the `CommonAttentionMetadata` that the runner built for the drafter's KV-cache group.
    """
    graphs = getattr(drafter, "draft_graphs", None)
    if graphs is not None:
        graphs.capture(template)


class DraftGraphs:
    """The FULL graphs of one `SpecDecodeBaseProposer`, which holds it as `draft_graphs` and calls it as its model.

    vLLM names the target's mode first, makes the drafter's attention groups after that, and then captures. It goes
    through all three once or, where it profiles graph memory, twice. What depends on the attention groups is therefore
    decided at capture, each time anew. The buffers are made there, too: all that a runner allocates with its KV cache
    loses its contents when vLLM sleeps.
    """

    def __init__(self, proposer: Any):
        self._proposer = proposer
        self._target_mode: CUDAGraphMode | None = None
        self._decision = ""
        self._forget()

    # -- keys ---------------------------------------------------------------------------------------------------------

    def initialize_keys(self, target_mode: CUDAGraphMode) -> None:
        """Begin anew with a target that resolved to `target_mode`; what needs no attention group is decided here."""
        self._forget()
        first = first_pass_of(self._proposer)
        reason = obstacle(facts_of(self._proposer, target_mode, first))
        if reason is None and not self._plan(target_mode, first, max_first_query_len=None).all():
            reason = _NO_SIZE
        if reason is not None:
            self._stay_stock(reason)
            return
        self._target_mode = target_mode
        self._note("no drafter graph before the target's are captured")

    def _forget(self) -> None:
        """Have no graph, and nothing that was made for one."""
        self._target_mode = None
        self._keys: DraftKeys | None = None
        self._graphs: CUDAGraphWrapper | None = None
        self._buffers: dict[int | None, PassBuffers] = {}
        self._table: torch.Tensor | None = None
        self._first = _NOT_PLANNED
        self._step_shape: DraftShape | None = None
        self._passed_over: set[str] = set()
        self._proposer.cudagraph_dispatcher.draft_keys = None
        for _, companion in self._companions():
            companion.forget()

    def _plan(self, target_mode: CUDAGraphMode, first: FirstPass, max_first_query_len: int | None) -> DraftKeys:
        proposer, config = self._proposer, self._proposer.vllm_config
        return plan_keys(
            target_mode,
            config.compilation_config.cudagraph_capture_sizes or [],
            num_speculative_tokens=proposer.speculative_config.num_speculative_tokens,
            first=first,
            max_first_query_len=max_first_query_len,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            parallel_drafting=proposer.parallel_drafting,
        )

    def _decide(self, target_mode: CUDAGraphMode, first: FirstPass, template: Any) -> DraftKeys | str:
        """What to capture, or why nothing."""
        reason = obstacle(facts_of(self._proposer, target_mode, first, builder_classes(self._proposer)))
        if reason is not None:
            return reason
        keys = self._plan(target_mode, first, self._decode_threshold())
        if not keys.all():
            return _NO_SIZE
        if template is None:
            return "the runner built no attention metadata for the drafter's KV-cache group while capturing"
        rows, held = max(shape.num_reqs for shape in keys.all()), rows_held(template.block_table_tensor)
        if rows > held:
            return f"the largest graph has {rows} rows, and the drafter's block table holds {held}"
        return keys

    def _decode_threshold(self) -> int | None:
        thresholds = [
            group.get_metadata_builder().reorder_batch_threshold for group in self._proposer.draft_attn_groups
        ]
        return min((threshold for threshold in thresholds if threshold is not None), default=None)

    def _companions(self) -> list[tuple[int, Any]]:
        """Further graphs that other features gave this proposer, each with the query length whose ladder it takes."""
        found = [
            (_STEP_QUERY_LEN, getattr(self._proposer, "draft_loop", None)),
            (self._first.query_len, getattr(self._proposer, "draft_context", None)),
        ]
        return [(query_len, companion) for query_len, companion in found if companion is not None]

    def _stay_stock(self, reason: str) -> None:
        self._forget()
        stays_stock(_FEATURE, _GATE, _STOCK, reason)
        for _, companion in self._companions():
            companion.leave(f"it needs {_FEATURE}'s graphs, and {reason}")

    def _note(self, decision: str) -> None:
        self._decision = decision
        record.note(_FEATURE, decision)

    def _turn_off(self, reason: str) -> None:
        """Give the graphs up while serving: requests are under way, so no gate makes this an error."""
        record.use(_FEATURE, False, reason)
        self._keys = None
        self._proposer.cudagraph_dispatcher.draft_keys = None
        self._note(f"{_STOCK}: {reason}")
        logger.warning("%s: from now on %s: %s", _FEATURE, _STOCK, reason)

    def _pass_over(self, field: str) -> None:
        """Say, once for each field, that batches with it run without graphs."""
        if field in self._passed_over:
            return
        self._passed_over.add(field)
        self._note(f"{self._decision}; a batch with '{field}', which has no fixed address, runs as in stock vLLM")
        logger.info("%s: a batch with '%s', which has no fixed address, runs as in stock vLLM", _FEATURE, field)

    # -- one draft phase: first pass, then one-token steps ------------------------------------------------------------

    def first_query_len(self, metadata: Any) -> int | None:
        """Query length of the first pass's batch, as `DraftKeys.find` takes it."""
        if not self.may_replay(metadata):
            return _NO_GRAPH
        width = self._first.query_len
        uniform = metadata.max_query_len == width and metadata.num_actual_tokens == width * metadata.num_reqs
        return width if uniform else None

    def step_query_len(self, metadata: Any) -> int:
        return _STEP_QUERY_LEN if self.may_replay(metadata) else _NO_GRAPH

    @property
    def ready(self) -> bool:
        """Whether graphs are captured and in use."""
        return self._keys is not None

    def may_replay(self, metadata: Any) -> bool:
        """Whether this batch is where the captured kernels look for it.

        A batch that is not is left alone; a block table that moved stays where it is, so that turns the graphs off.
        """
        table, captured = metadata.block_table_tensor, self._table
        if captured is None or not self.ready:
            return False
        if table.data_ptr() != captured.data_ptr() or table.stride(0) != captured.stride(0):
            self._turn_off("the drafter's block table moved after the graphs were captured")
            return False
        field = unmanaged_field(metadata)
        if field is not None:
            self._pass_over(field)
            return False
        return True

    @property
    def step_buffers(self) -> PassBuffers:
        return self._buffers[_STEP_QUERY_LEN]

    def block_table(self, num_reqs: int) -> torch.Tensor:
        """int32 [num_reqs, blocks]: the captured block table's leading rows."""
        assert self._table is not None
        return full_block_table(self._table, num_reqs)

    def first_pass_metadata(self, metadata: Any, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> Any:
        """`metadata` for the first pass: itself, or the graph's buffers holding it."""
        if mode != CUDAGraphMode.FULL:
            return metadata
        shape = _shape_of(descriptor)
        buffers = self._buffers_of(shape)
        buffers.write(metadata, shape)
        return buffers.view(metadata, shape, self._proposer._slot_mapping_buffer)

    def begin_steps(self, metadata: Any, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """Let the one-token steps that follow count sequence lengths in the graph's buffer.

        `metadata.seq_lens` becomes a view of it, so the kernel that advances the batch advances what the graph reads.
        A batch above the one-token ladder may get a mixed graph, which reads the buffers of mixed batches.
        """
        self._step_shape = None
        if mode != CUDAGraphMode.FULL:
            return
        shape = _shape_of(descriptor)
        buffers = self._buffers_of(shape)
        buffers.write(metadata, shape)
        metadata.seq_lens = buffers.seq_lens[: metadata.num_reqs]
        self._step_shape = shape

    def step_metadata(self, metadata: Any) -> Any:
        """`metadata` for one step: itself, or the graph's buffers, which `begin_steps` filled."""
        if self._step_shape is None:
            return metadata
        buffers = self._buffers_of(self._step_shape)
        return buffers.view(metadata, self._step_shape, self._proposer._slot_mapping_buffer)

    def _buffers_of(self, shape: DraftShape) -> PassBuffers:
        """The buffers that the graph of `shape` was captured with."""
        return self._buffers[_query_len(shape)]

    # -- the model, captured ------------------------------------------------------------------------------------------

    def __call__(self, **inputs: Any) -> Any:
        """Call the draft model, through its graph where the forward context says FULL."""
        return self._call_model(**inputs) if self._graphs is None else self._graphs(**inputs)

    def _call_model(self, **inputs: Any) -> Any:
        return self._proposer.model(**inputs)

    def capture(self, template: Any) -> None:
        """Decide, then capture every planned shape, largest first; later calls return at once.

        Each shape runs once without a graph first: kernels that compile or tune themselves at their first call may not
        do so while a graph is being captured.
        """
        target_mode = self._target_mode
        if target_mode is None or (self._graphs is not None and self._graphs.concrete_cudagraph_entries):
            return
        self._forget()
        first = first_pass_of(self._proposer)
        keys = self._decide(target_mode, first, template)
        if isinstance(keys, str):
            self._stay_stock(keys)
            return
        lengths: list[int | None] = [*keys.uniform]
        if keys.mixed:
            lengths.append(None)
        config, device = self._proposer.vllm_config, self._proposer.device
        self._target_mode, self._first, self._table = target_mode, first, template.block_table_tensor
        self._buffers = {length: PassBuffers(keys.max_num_seqs, length, device) for length in lengths}
        # A pool of its own each time: one whose graphs are all gone may not be captured into again.
        self._graphs = full_graphs(self._call_model, config, current_platform.graph_pool_handle())
        for shape in keys.all():
            for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL):
                self._run_dummy(template, shape, mode)
        for query_len, companion in self._companions():
            companion.capture(keys.uniform.get(query_len, ()), self._graphs.graph_pool, template)
        self._keys = self._proposer.cudagraph_dispatcher.draft_keys = keys
        self._note(f"FULL drafter graphs for {type(self._proposer).__name__}: {_describe(keys)}")
        logger.info("%s: FULL drafter graphs for %s", _FEATURE, _describe(keys))

    def capture_metadata(self, template: Any, shape: DraftShape) -> dict[str, Any]:
        """Per-layer metadata of a dummy batch that fills `shape`; its slots are all padding."""
        proposer = self._proposer
        buffers = self._buffers_of(shape)
        batch = buffers.batch_for_capture(template, shape, proposer.max_model_len, causal=self._first.causal)
        buffers.write(batch, shape)
        proposer._slot_mapping_buffer[: shape.num_tokens].fill_(_PADDING_SLOT_ID)
        _, per_layer = proposer.build_per_group_and_layer_attn_metadata(
            buffers.view(batch, shape, proposer._slot_mapping_buffer),
            draft_index=int(_query_len(shape) == _STEP_QUERY_LEN),
        )
        return per_layer  # type: ignore[no-any-return]

    def _run_dummy(self, template: Any, shape: DraftShape, mode: CUDAGraphMode) -> None:
        proposer, count = self._proposer, shape.num_tokens
        multimodal = proposer.supports_mm_inputs and not self._first.tokens_only
        inputs = {
            "input_ids": None if multimodal else proposer.input_ids[:count],
            "positions": proposer._get_positions(count),
            "inputs_embeds": proposer.inputs_embeds[:count] if multimodal else None,
        }
        if proposer.pass_hidden_states_to_model and not self._first.tokens_only:
            inputs["hidden_states"] = proposer.hidden_states[:count]
        # Built for each run: the first kernel that reads FlashMLA's metadata plans into it, and a captured one must.
        with self.forward_context(self.capture_metadata(template, shape), shape, mode):
            self(**inputs)

    def forward_context(
        self, per_layer_metadata: dict[str, Any], shape: DraftShape, mode: CUDAGraphMode
    ) -> AbstractContextManager[None]:
        """vLLM's forward context for a pass over the drafter's own buffers, under the key of `shape`."""
        return set_forward_context(  # type: ignore[no-any-return]
            per_layer_metadata,
            self._proposer.vllm_config,
            num_tokens=shape.num_tokens,
            cudagraph_runtime_mode=mode,
            batch_descriptor=descriptor_of(shape),
            slot_mapping=self._proposer._get_slot_mapping(shape.num_tokens),
        )


def full_graphs(call: Callable[..., Any], config: Any, graph_pool: Any) -> CUDAGraphWrapper:
    """`call`, captured whole under runtime mode FULL, in a memory pool that the target does not use.

    Without a garbage collection before each capture: there are hundreds of shapes, and nothing to collect between them.
    """
    graphs = CUDAGraphWrapper(
        call,
        config,
        runtime_mode=CUDAGraphMode.FULL,
        cudagraph_options=CUDAGraphOptions(debug_log_enable=False, gc_disable=True),
    )
    graphs.graph_pool = graph_pool
    return graphs


def descriptor_of(shape: DraftShape) -> BatchDescriptor:
    """The key under which vLLM's `CUDAGraphWrapper` keeps the graph of `shape`."""
    return BatchDescriptor(num_tokens=shape.num_tokens, num_reqs=shape.num_reqs, uniform=shape.uniform)


def find_draft_graph(keys: DraftKeys, num_tokens: int, query_len: int | None) -> BatchDescriptor | None:
    """What the patched `CudagraphDispatcher.dispatch` asks first: the drafter's FULL graph for this batch, if any."""
    shape = keys.find(num_tokens, query_len)
    return None if shape is None else descriptor_of(shape)


def _shape_of(descriptor: BatchDescriptor) -> DraftShape:
    if descriptor.uniform:
        return uniform_shape(descriptor.num_tokens // descriptor.num_reqs, descriptor.num_reqs)
    return DraftShape(num_tokens=descriptor.num_tokens, num_reqs=descriptor.num_reqs, uniform=False)


def _query_len(shape: DraftShape) -> int | None:
    return shape.num_tokens // shape.num_reqs if shape.uniform else None


def _describe(keys: DraftKeys) -> str:
    parts = [f"{length} tokens x {list(ladder)} requests" for length, ladder in keys.uniform.items() if ladder]
    if keys.mixed:
        parts.append(f"mixed batches up to {keys.mixed[-1]} tokens")
    return "; ".join(parts)
