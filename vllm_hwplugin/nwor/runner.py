# SPDX-License-Identifier: Apache-2.0
"""Hooks of the patched model runners: `attach` after the KV cache is made, `restore` after sampling.

A hook before the target's forward pass saves what draft tokens overwrite, as the first node of a captured FULL graph or
in one launch. Rejected drafts are taken out as soon as the sampler has counted them, before the drafter writes into the
same blocks and before a step's results are passed on.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from vllm_hwplugin.base import gates, run_records
from vllm_hwplugin.base.errors import HwpluginError
from vllm_hwplugin.base.fallback import report_unused
from vllm_hwplugin.base.features import NWOR, gate_of
from vllm_hwplugin.nwor import obstacles
from vllm_hwplugin.nwor.layout import ModelCaches, UnknownLayout, rows_of
from vllm_hwplugin.nwor.reference import ReferenceRows
from vllm_hwplugin.nwor.rows import Batch, KernelRows, Rejected, as_int32, kernels_for
from vllm_hwplugin.ops.overrides import is_capturing

logger = logging.getLogger("vllm.hwplugin")

MODE: Final = gate_of(NWOR)
DEBUG_SYNC: Final = "VLLM_HWPLUGIN_NWOR_DEBUG_SYNC"


class NotRestored(HwpluginError, RuntimeError):
    """The KV cache has wrong bytes at the slot of a rejected draft."""


class NoRoom(HwpluginError, RuntimeError):
    """The device has too little memory to save what drafts overwrite."""


def attach(runner: Any, is_profiling: bool = False) -> None:
    """Take rejected drafts out of a new KV cache, if asked for.

    vLLM also makes KV caches only to measure graphs (`is_profiling`).
    """
    nwor = getattr(runner, "nwor", None)
    if nwor is None:
        nwor = runner.nwor = RejectedDrafts(runner)
    nwor.begin(is_profiling)


def restore(runner: Any, *, num_rejected: Any, num_draft_tokens: int) -> None:
    """Take rejected drafts out, [requests] integers, after V2 has sampled."""
    if num_draft_tokens and (nwor := getattr(runner, "nwor", None)) is not None:
        nwor.restore(Rejected(num_rejected=as_int32(num_rejected)))


@contextmanager
def deferred(runner: Any) -> Iterator[None]:
    """Skip :func:`restore` within: chunks are sampled, the batch is restored."""
    attached = vars(runner).pop("nwor", None)
    try:
        yield
    finally:
        if attached is not None:
            runner.nwor = attached


def replayed(runner: Any, num_rejected: torch.Tensor) -> None:
    """Check the KV cache after replaying a V2 graph with a restore."""
    if (nwor := getattr(runner, "nwor", None)) is not None:
        nwor.check(Rejected(num_rejected=num_rejected))


def restore_sampled(runner: Any, metadata: Any, sampler_output: Any) -> None:
    """Take rejected drafts out after V1 has sampled; unsampled tokens are -1."""
    if (nwor := getattr(runner, "nwor", None)) is not None:
        nwor.restore(
            Rejected(
                sampled_token_ids=as_int32(sampler_output.sampled_token_ids),
                cu_num_draft_tokens=as_int32(metadata.cu_num_draft_tokens),
            )
        )


class RejectedDrafts:
    """The rejected drafts of one `GPUModelRunner`, which holds this object as `nwor`.

    The first forward pass allocates the buffers: with the KV cache they would lose their contents when vLLM sleeps.
    """

    def __init__(self, runner: Any):
        # The model holds the hook and may outlive the runner.
        self._runner = weakref.proxy(runner)
        self._mode = "scrub" if gates.read(MODE).text == "scrub" else "restore"
        self._checks = gates.read(DEBUG_SYNC).flag
        self._hook: Any = None
        self._caches: ModelCaches | None = None
        self._rows: KernelRows | ReferenceRows | None = None
        # A second copy of the rows, to check the first.
        self._witness: ReferenceRows | None = None
        # Which of the two keep overwritten bytes.
        self._keepers: tuple[KernelRows | ReferenceRows, ...] = ()

    def begin(self, is_profiling: bool) -> None:
        """Find the KV cache's rows; see :func:`attach`."""
        self._caches = self._rows = self._witness = None
        self._keepers = ()
        if is_profiling:
            return
        config, model = self._runner.vllm_config, self._runner.get_model()
        reason = obstacles.of_config(config, obstacles.vllm_version()) or obstacles.of_model(model)
        if reason is None:
            try:
                caches = rows_of(
                    self._runner.kv_cache_config,
                    config.compilation_config.static_forward_context,
                    config.cache_config.cache_dtype,
                    model.modules(),
                )
                reason = None if caches.rows else "the target's KV cache has no row for each token"
            except UnknownLayout as error:
                reason = str(error)
        if reason is not None:
            report_unused(NWOR, "rejected drafts stay in the KV cache", reason)
            return
        self._caches = caches
        if self._hook is None:
            # The hook belongs to the innermost module, because vLLM's wrappers capture what they call.
            self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        left = f"; left out, without a row for each token: {', '.join(caches.left_out)}" if caches.left_out else ""
        run_records.note(NWOR, f"{self._mode} of {len({cache.layer for cache in caches.rows})} layers{left}")
        run_records.use(NWOR, True)
        if caches.left_out:
            logger.warning("%s: left out %d layers without a row for each token", NWOR, len(caches.left_out))

    def _make(self, model_caches: ModelCaches) -> None:
        batch, caches = _batch_of(self._runner, model_caches.groups), model_caches.rows
        assert all(slots.dtype == torch.int64 for slots in batch.slot_mappings.values())
        keep, kernels = self._mode == "restore", kernels_for(batch.query_start_loc.device)
        try:
            rows = self._rows = (KernelRows if kernels else ReferenceRows)(caches, batch, keep)
            if self._checks:
                self._witness = ReferenceRows(caches, batch, keep=True)
        except torch.OutOfMemoryError as error:
            num_bytes = batch.max_num_reqs * batch.drafts * sum(cache.num_bytes for cache in caches)
            times = "twice " if keep and self._checks else ""
            raise NoRoom(
                f"{NWOR}: {batch.max_num_reqs} requests with {batch.drafts} drafts each overwrite "
                f"{num_bytes / 2**20:.1f} MiB, which are kept {times}outside the KV cache, and the device has less "
                f"memory; lower gpu_memory_utilization or max_num_seqs, or set {MODE}=scrub without {DEBUG_SYNC}"
            ) from error
        keepers = (rows if keep else None, self._witness)
        self._keepers = tuple(keeper for keeper in keepers if keeper is not None)
        how = "kernels" if kernels else "PyTorch operations"
        run_records.note(f"{NWOR} rows", f"by {how}, with {rows.num_bytes / 2**20:.1f} MiB")

    def _before_forward(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if self._caches is not None:
            self._make(self._caches)
            self._caches = None
        if not self._keepers:
            return
        # A request has at least one token. Some models have several positions per token, in the first dimension.
        num_reqs = min(kwargs["positions"].shape[-1], self._runner.max_num_reqs)
        for rows in self._keepers:
            rows.log(num_reqs)

    def restore(self, rejected: Rejected) -> None:
        """Take the rejected drafts of a batch out of the KV cache.

        Raises:
            NotRestored: with `VLLM_HWPLUGIN_NWOR_DEBUG_SYNC`, if the cache has wrong bytes.
        """
        if self._rows is None:
            return
        self._rows.restore(rejected)
        # A capture executes nothing, so there is nothing to check.
        if self._witness is not None and not is_capturing(self._runner.device):
            self.check(rejected)

    def check(self, rejected: Rejected) -> None:
        """Wait for the device and compare, if `VLLM_HWPLUGIN_NWOR_DEBUG_SYNC` asks for it."""
        if self._witness is None:
            return
        wrong = self._witness.differing(self._witness.rejected_slots(rejected), zeros=self._mode == "scrub")
        if wrong:
            expected = "what it held before the draft was written" if self._mode == "restore" else "zeros"
            cache, slot, count = wrong[0]
            block, token = divmod(slot, cache.block_size)
            raise NotRestored(
                f"{NWOR}: {cache.layer} does not hold {expected} at slot {slot} (block {block}, token {token}): "
                f"{count} of {cache.num_bytes} bytes differ, and {len(wrong) - 1} other rows are wrong; set "
                f"{DEBUG_SYNC}=0 to continue without this check, or {MODE}=off"
            )


def _batch_of(runner: Any, groups: Iterable[int]) -> Batch:
    """Return a runner's batch tensors, for the KV cache groups `groups`."""
    drafts = runner.vllm_config.speculative_config.num_speculative_tokens
    if hasattr(runner, "input_buffers"):
        slots, starts = runner.block_tables.slot_mappings, runner.input_buffers.query_start_loc
    else:
        slots = [table.slot_mapping.gpu for table in runner.input_batch.block_table.block_tables]
        starts = runner.query_start_loc.gpu
    return Batch(starts, {group: slots[group] for group in groups}, runner.max_num_reqs, drafts)
