# SPDX-License-Identifier: Apache-2.0
"""Capture all draft steps after the first in one CUDA graph, where V2 launches a graph for each.

From 0.21.0 to 0.27.1 Model Runner V2 makes for each step slot mappings, the attention backend's metadata and the number
of the step on the host, and launches a graph. Here the decode graphs hold all of that for all steps, and a batch's
drafts are one launch. vLLM does so from 0.28.0 on, for backends that can change their metadata in place; here
`builders` says whose build may be captured.

A graph's shape may have more rows than the batch. Its launches have the shape's number of rows, and read on the device
which rows are real:

- `query_start_loc` ends with the number of real rows, repeated. So `compute_slot_mappings` finds no token in a padded
  row, never looks its request up (the row of `idx_mapping` may be stale, or -1), and its last program sets every slot
  from the first padded slot on to -1: nothing is written to the KV cache.
- The next step's `seq_lens` of padded rows start from 0 and count up with the others, as they do when vLLM replays a
  graph for each step; no query of a padded row reads them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.fallback import report_unused
from vllm_hwplugin.base.features import V2_FUSED_DRAFTS
from vllm_hwplugin.spec_decode.graph_recording import attempt_capture
from vllm_hwplugin.spec_decode.obstacles import Part, why_not
from vllm_hwplugin.spec_decode.step_counts import Reason, StepCounts

_STOCK: Final = "a graph is launched for each draft step"


class FusedDrafts:
    """The steps of an `EagleSpeculator` (from 0.23.0 on `AutoRegressiveSpeculator`), held as `fused_drafts`."""

    def __init__(self, speculator: Any) -> None:
        self._speculator = speculator
        self._generate_draft: Callable[..., None] | None = None
        self._step_counts = StepCounts(V2_FUSED_DRAFTS, "steps")

    def capture(self, manager: Any, generate_draft: Callable[..., None], *arguments: Any, **settings: Any) -> None:
        """Capture decode graphs of all steps, or of vLLM's single step.

        Raises:
            FeatureRequired: there are no graphs of all steps, and the switch is `on`.
        """
        routine = self._routine(generate_draft)
        if routine is not generate_draft:
            capture = partial(manager.capture, routine, *arguments, **settings)
            if attempt_capture(V2_FUSED_DRAFTS, _STOCK, capture, [manager], self._speculator.device):
                return
            self._generate_draft = None
        manager.capture(generate_draft, *arguments, **settings)

    def _routine(self, generate_draft: Callable[..., None]) -> Callable[..., None]:
        """Return the routine to capture: all steps, or vLLM's single step."""
        self._generate_draft = None
        if (reason := why_not(self._speculator, Part.V2_STEPS)) is not None:
            report_unused(V2_FUSED_DRAFTS, _STOCK, reason)
            return generate_draft
        self._generate_draft = generate_draft
        # The capture looks up slots by it, and -1 from an earlier batch would be a row before the first.
        self._speculator.idx_mapping.zero_()
        run_records.note(V2_FUSED_DRAFTS, f"{self._speculator.num_speculative_steps - 1} steps in one graph")
        run_records.use(V2_FUSED_DRAFTS, True)
        return self.generate

    def replay(self, batch_desc: Any) -> bool:
        """Draft every token after the first in one launch, or return False."""
        if self._generate_draft is None or batch_desc.cg_mode != CUDAGraphMode.FULL:
            self._step_counts.missed(Reason.NOT_CAPTURED if self._generate_draft is None else Reason.NO_FULL_GRAPH)
            return False
        self._step_counts.served()
        self._speculator.decode_cudagraph_manager.run_fullgraph(batch_desc)
        return True

    def generate(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        """Run each step after the first, as vLLM's `_multi_step_decode`; to be captured.

        Args:
            num_tokens_padded: tokens of the graph, one per row.
            attn_metadata: made for the capture, and not used: the graph makes the first step's, too.
            slot_mappings: made for the capture, and not used.
            num_tokens_across_dp: None; there is no data parallelism.
        """
        speculator = self._speculator
        assert self._generate_draft is not None
        positions = speculator.input_buffers.positions[:num_reqs]
        query_start_loc = speculator.input_buffers.query_start_loc[: num_reqs + 1]
        idx_mapping = speculator.idx_mapping[:num_reqs]
        for step in range(1, speculator.num_speculative_steps):
            slots = speculator.block_tables.compute_slot_mappings(
                idx_mapping, query_start_loc, positions, num_tokens_padded
            )
            metadata = self._build_metadata(num_reqs, num_tokens_padded, step)
            speculator.current_draft_step.fill_(step)
            self._generate_draft(
                num_reqs,
                num_tokens_padded,
                metadata,
                build_slot_mappings_by_layer(slots, speculator.kv_cache_config),
                num_tokens_across_dp,
                cudagraph_runtime_mode,
            )

    def _build_metadata(self, num_reqs: int, num_tokens: int, step: int) -> dict[str, Any] | None:
        build = self._speculator._build_draft_attn_metadata
        bounds: dict[str, Any] = {}
        if "seq_lens_cpu_upper_bound" in inspect.signature(build).parameters:  # from 0.27.0 on
            longest = torch.full((num_reqs,), self._speculator.max_model_len, dtype=torch.int32, device="cpu")
            bounds = {"seq_lens_cpu_upper_bound": longest, "step": step}
        with _longest_sequences(self._speculator):
            metadata: dict[str, Any] | None = build(
                num_reqs=num_reqs, num_reqs_padded=num_reqs, num_tokens_padded=num_tokens, **bounds
            )
        return metadata


@contextmanager
def _longest_sequences(speculator: Any) -> Iterator[None]:
    """Build metadata for the longest possible sequences: the graph keeps it."""
    # Before 0.23.0 they always are.
    of_batch = getattr(speculator, "draft_max_seq_len", None)
    if of_batch is None:
        yield
        return
    speculator.draft_max_seq_len = speculator.max_model_len
    try:
        yield
    finally:
        speculator.draft_max_seq_len = of_batch
