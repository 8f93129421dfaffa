# SPDX-License-Identifier: Apache-2.0
"""FULL CUDA graphs for the drafters of vLLM's V1 model runner.

There are three parts: what to capture (`draft_decision`), the tensors that graphs read (`draft_buffers`) and the graphs
(`pass_graphs`). This module ties them to a proposer: its `propose` asks `DraftGraphs` before vLLM's own dispatcher. The
idea is from vLLM PR 34880, which pads the batch in the runner, the input batch and two kernels. Here the host code
keeps the real batch, and only the captured forward sees padded rows (docs/drafter-graphs.md).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.fallback import gives_up
from vllm_hwplugin.base.features import DFLASH_FULL_GRAPH, DRAFT_FULL_GRAPH
from vllm_hwplugin.spec_decode.decode_batch import MAX_NUM_REQS, GraphShape
from vllm_hwplugin.spec_decode.drafters import MASK_METHODS
from vllm_hwplugin.spec_decode.graph_recording import Graphs
from vllm_hwplugin.spec_decode.step_counts import Reason, StepCounts
from vllm_hwplugin.spec_decode.v1.draft_buffers import DraftBuffers, unmanaged_field
from vllm_hwplugin.spec_decode.v1.draft_decision import (
    STEP_QUERY_LEN,
    DraftKeys,
    first_pass_of,
    plan_at_capture,
    plan_before_capture,
)
from vllm_hwplugin.spec_decode.v1.pass_graphs import PassGraphs, descriptor_of
from vllm_hwplugin.spec_decode.weights import Parameters, around_graphs

logger = logging.getLogger("vllm.hwplugin")


def capture_draft_graphs(drafter: Any, template: Any, *, profiling: bool = False) -> None:
    """Capture the drafter's graphs while the runner captures the target's FULL graphs.

    The patched `GPUModelRunner._dummy_run` calls this. Proposers without graphs (n-gram, medusa, ...) pass through.
    `template` is the `CommonAttentionMetadata` that the runner built for the drafter's KV-cache group. With `profiling`
    vLLM measures the memory of graphs, and gives them up again; only the largest are captured then.
    """
    graphs = getattr(drafter, "draft_graphs", None)
    if graphs is not None:
        graphs.capture(template, profiling=profiling)


class DraftGraphs(Graphs[PassGraphs]):
    """The FULL graphs of one `SpecDecodeBaseProposer`, which holds it as `draft_graphs` and calls it as its model.

    vLLM names the target's mode first, makes the drafter's attention groups after that, and then captures. It does all
    three once, or twice if it profiles graph memory. So what depends on the attention groups is decided at each
    capture. The buffers are also made there: memory that a runner allocates with its KV cache loses its contents when
    vLLM sleeps.
    """

    feature, effect = DRAFT_FULL_GRAPH, "the drafter runs as in unpatched vLLM"
    needed = f"it needs {DRAFT_FULL_GRAPH}'s graphs, and {{reason}}"

    def __init__(self, proposer: Any):
        super().__init__(proposer)
        self._decision = ""
        feature = DFLASH_FULL_GRAPH if proposer.method in MASK_METHODS else DRAFT_FULL_GRAPH
        self._step_counts = StepCounts(feature, "first-pass")

    def forget(self) -> None:
        super().forget()
        self._target_mode: CUDAGraphMode | None = None
        # None if no graph may be replayed; there may still be some then.
        self._keys: DraftKeys | None = None
        self._first_query_len = 0
        self._parameters = Parameters()
        self._shape: GraphShape | None = None
        self._passed_over: set[str] = set()

    # -- a start ------------------------------------------------------------------------------------------------------

    def initialize_keys(self, target_mode: CUDAGraphMode) -> None:
        """Plan for a target in `target_mode`, before attention groups exist.

        Raises:
            FeatureRequired: nothing can be captured, and a switch is `on`.
        """
        self.forget()
        if self.failed:
            return
        keys = plan_before_capture(self._owner, target_mode)
        if isinstance(keys, str):
            self.stay_stock(keys)
            return
        self._target_mode = target_mode
        self._note("no drafter graph before the target's are captured")

    def capture(self, template: Any, *, profiling: bool = False) -> None:
        """Decide, then capture every planned shape; later calls return immediately.

        Raises:
            FeatureRequired: nothing can be captured, and a switch is `on`.
        """
        target_mode = self._target_mode
        if target_mode is None or self.num_captured:
            return
        self.forget()
        keys = plan_at_capture(self._owner, target_mode, template)
        if isinstance(keys, str):
            self.stay_stock(keys)
            return
        self._target_mode = target_mode
        if not self._capture(keys.largest(MAX_NUM_REQS) if profiling else keys, template) or profiling:
            return
        shapes = _describe(keys)
        self._note(f"FULL drafter graphs for {type(self._owner).__name__}: {shapes}")
        logger.info("%s: FULL drafter graphs for %s", DRAFT_FULL_GRAPH, shapes)

    def _capture(self, keys: DraftKeys, template: Any) -> bool:
        proposer, first = self._owner, first_pass_of(self._owner)
        table, slots = template.block_table_tensor, proposer._slot_mapping_buffer

        def record(shape: GraphShape | None) -> None:
            passes = self.captured or PassGraphs(proposer, first, DraftBuffers(keys, table, slots, proposer.device))
            self.captured = passes
            if shape is not None:
                passes.capture(shape, template)

        # The buffers by themselves first: ranks agree after each call, before they talk to each other in the next.
        for shape in (None, *keys.all()):
            if not self.attempt(partial(record, shape), self.captured and self.captured.graph_pool):
                return False
        for companion in self._companions:
            if not companion.failed:
                companion.capture(self.captured, keys, template)
        self._keys, self._first_query_len = keys, first.query_len
        # Without graphs vLLM reads each weight where it is now.
        graphed = self._target_mode is not None and self._target_mode.has_piecewise_cudagraphs()
        self._parameters = Parameters(None if graphed else proposer.model, places=around_graphs(proposer.model))
        return True

    def _note(self, decision: str) -> None:
        self._decision = decision
        run_records.note(DRAFT_FULL_GRAPH, decision)

    # -- one draft phase: first pass, then one-token steps ------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether graphs are captured and active."""
        return self._keys is not None

    @property
    def num_captured(self) -> int:
        """How many passes are captured."""
        return 0 if self.captured is None else self.captured.num_captured

    def may_replay(self, metadata: Any) -> bool:
        """Whether this batch is where the captured kernels read it.

        A batch that lies elsewhere is passed over. A block table or a weight that moved stays there, so it turns the
        graphs off.
        """
        if self.captured is None or self._keys is None:
            return False
        reason = self._parameters.moved()
        if self.captured.buffers.block_table_moved(metadata):
            reason = "the drafter's block table moved after the graphs were captured"
        if reason is not None:
            self.give_up(reason)
            return False
        field = unmanaged_field(metadata)
        if field is not None:
            self._pass_over(field)
            return False
        return True

    def begin_first_pass(self, num_tokens: int, metadata: Any) -> None:
        """Choose the first pass's graph, if any; copy `metadata` into its buffers."""
        width = self._first_query_len
        uniform = metadata.max_query_len == width and metadata.num_actual_tokens == width * metadata.num_reqs
        self._shape = self._find(num_tokens, width if uniform else None, metadata)
        if self.captured is None or self._shape is None:
            self._step_counts.missed(self._why_not(uniform, metadata))
        else:
            self._step_counts.served()
            self.captured.buffers.of(self._shape).write(metadata, self._shape)

    def begin_steps(self, metadata: Any) -> None:
        """Choose the graph of the one-token steps, if any.

        `metadata.seq_lens` becomes a view of the graph's buffers. So the code that subtracts rejected tokens and
        advances the batch writes what the graph reads. A batch above the one-token ladder may get a mixed graph, which
        reads the buffers of mixed batches.
        """
        self._shape = self._find(metadata.num_reqs, STEP_QUERY_LEN, metadata)
        if self.captured is not None and self._shape is not None:
            buffers = self.captured.buffers.of(self._shape)
            buffers.write_seq_lens(metadata.seq_lens, self._shape.num_reqs)
            buffers.write_even_starts(metadata.num_reqs, self._shape.num_reqs)
            metadata.seq_lens = buffers.seq_lens[: metadata.num_reqs]

    def _find(self, num_tokens: int, query_len: int | None, metadata: Any) -> GraphShape | None:
        if self._keys is None or not self.may_replay(metadata):
            return None
        return self._keys.find(num_tokens, query_len)

    def _why_not(self, uniform: bool, metadata: Any) -> Reason:
        if self._keys is None:
            return Reason.NOT_CAPTURED
        if not self.may_replay(metadata):
            return Reason.MOVED
        if uniform or self._keys.mixed:
            return Reason.LARGER_BATCH
        return Reason.PROMPT if metadata.max_query_len > self._first_query_len else Reason.FEWER_DRAFTS

    def padded(self, metadata: Any) -> Any:
        """Return `metadata` as the pass's graph reads it, or unchanged without."""
        if self.captured is None or self._shape is None:
            return metadata
        return self.captured.buffers.view(metadata, self._shape)

    def determine_batch_execution_and_padding(self, num_tokens: int) -> tuple[CUDAGraphMode, int, torch.Tensor | None]:
        """Return runtime mode, padded tokens and other ranks', else vLLM's answer."""
        if self._shape is None:
            return self._owner._determine_batch_execution_and_padding(num_tokens)  # type: ignore[no-any-return]
        return CUDAGraphMode.FULL, self._shape.num_tokens, None

    @property
    def batch_descriptor(self) -> BatchDescriptor | None:
        """The key of the pass's graph; None lets vLLM make one from the number of tokens, as for a piecewise graph."""
        return None if self._shape is None else descriptor_of(self._shape)

    def __call__(self, **inputs: Any) -> Any:
        """Call the draft model, by its graph if the context says FULL."""
        return self._owner.model(**inputs) if self.captured is None else self.captured(**inputs)

    # -- graphs that cannot be used -----------------------------------------------------------------------------------

    def give_up(self, reason: str) -> None:
        # The graphs stay: a pass may have left its output in their memory in this step.
        self._keys, self._decision = None, f"{self.effect}: {reason}"
        gives_up(self.feature, self.effect, reason)
        for companion in self._companions:
            companion.give_up(reason)

    def _pass_over(self, field: str) -> None:
        """Report, once for each field, that batches with it run without graphs."""
        if field in self._passed_over:
            return
        self._passed_over.add(field)
        text = f"a batch with '{field}', which has no fixed address, runs as in unpatched vLLM"
        self._note(f"{self._decision}; {text}")
        logger.info("%s: %s", DRAFT_FULL_GRAPH, text)


def _describe(keys: DraftKeys) -> str:
    parts = [f"{length} tokens x {list(ladder)} requests" for length, ladder in keys.uniform.items() if ladder]
    if keys.mixed:
        parts.append(f"mixed batches up to {keys.mixed[-1]} tokens")
    return "; ".join(parts)
