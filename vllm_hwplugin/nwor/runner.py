# SPDX-License-Identifier: Apache-2.0
"""What the patched model runners call: `attach` when their KV cache is there, `restore` when a step has been sampled.

A hook before the target's forward pass keeps what draft tokens overwrite. So it is the first node of a captured FULL
graph, and one launch without a graph. Rejected drafts are taken out as soon as the sampler has counted them: before the
drafter writes into the same blocks, and before a step's work is handed on.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from vllm_hwplugin import gates, journal
from vllm_hwplugin.errors import HwpluginError
from vllm_hwplugin.fallback import stays_stock
from vllm_hwplugin.features import NWOR, gate_of
from vllm_hwplugin.nwor import obstacles
from vllm_hwplugin.nwor.layout import ModelCaches, UnknownLayout, rows_of
from vllm_hwplugin.nwor.reference import ReferenceRows
from vllm_hwplugin.nwor.rows import Batch, DraftRows, KernelRows, Rejected, as_int32, kernels_for

logger = logging.getLogger("vllm.hwplugin")

MODE: Final = gate_of(NWOR)
DEBUG_SYNC: Final = "VLLM_HWPLUGIN_NWOR_DEBUG_SYNC"


class NotRestored(HwpluginError, RuntimeError):
    """The KV cache does not hold what it should where a draft was rejected."""


class NoRoom(HwpluginError, RuntimeError):
    """The device has no memory left for what drafts overwrite."""


def attach(runner: Any, is_profiling: bool = False) -> None:
    """Take rejected drafts out of a runner's KV cache from now on, if the mode says so and nothing is against it.

    Args:
        runner: a `GPUModelRunner` of V1 or V2, whose KV cache was just made.
        is_profiling: whether that is one that vLLM measures graphs with and gives up again.
    """
    nwor = getattr(runner, "nwor", None)
    if nwor is None:
        nwor = runner.nwor = RejectedDrafts(runner)
    nwor.begin(is_profiling)


def restore(runner: Any, *, num_rejected: Any, num_draft_tokens: int) -> None:
    """Called by Model Runner V2 when it has sampled.

    Args:
        runner: a `GPUModelRunner`.
        num_rejected: [requests] integers on the device.
        num_draft_tokens: of the batch.
    """
    if num_draft_tokens and (nwor := getattr(runner, "nwor", None)) is not None:
        nwor.restore(Rejected(num_rejected=as_int32(num_rejected)))


@contextmanager
def deferred(runner: Any) -> Iterator[None]:
    """Have :func:`restore` do nothing within, for a batch that is sampled in chunks and restored as a whole."""
    attached = vars(runner).pop("nwor", None)
    try:
        yield
    finally:
        if attached is not None:
            runner.nwor = attached


def replayed(runner: Any, num_rejected: torch.Tensor) -> None:
    """Called when a graph with a restore in it was replayed.

    Args:
        runner: a `GPUModelRunner` of V2.
        num_rejected: [requests] integers on the device.

    Raises:
        NotRestored: see :meth:`RejectedDrafts.restore`.
    """
    if (nwor := getattr(runner, "nwor", None)) is not None:
        nwor.check(Rejected(num_rejected=num_rejected))


def restore_sampled(runner: Any, metadata: Any, sampler_output: Any) -> None:
    """Called by the V1 runner when it has sampled a batch with drafts.

    Args:
        runner: a `GPUModelRunner`.
        metadata: the batch's `SpecDecodeMetadata`.
        sampler_output: `SamplerOutput`, with -1 for what was not sampled.
    """
    if (nwor := getattr(runner, "nwor", None)) is not None:
        nwor.restore(
            Rejected(
                sampled_token_ids=as_int32(sampler_output.sampled_token_ids),
                cu_num_draft_tokens=as_int32(metadata.cu_num_draft_tokens),
            )
        )


class RejectedDrafts:
    """Of one `GPUModelRunner`, which holds it as `nwor`.

    Buffers are made before the first forward pass and not with the KV cache: what is allocated with that loses its
    contents when vLLM sleeps.
    """

    def __init__(self, runner: Any):
        # The model, which may outlive it, has the hook.
        self._runner = weakref.proxy(runner)
        self._mode = "scrub" if gates.read(MODE).text == "scrub" else "restore"
        self._checks = gates.read(DEBUG_SYNC).flag
        self._hook: Any = None
        self._found: ModelCaches | None = None
        self._rows: DraftRows | None = None
        # Keeps the same rows apart from what is checked.
        self._witness: ReferenceRows | None = None
        # Those of both that keep what is overwritten.
        self._keepers: tuple[DraftRows, ...] = ()

    def begin(self, is_profiling: bool) -> None:
        """Find where the KV cache has its rows; see :func:`attach`."""
        self._found = self._rows = self._witness = None
        self._keepers = ()
        if is_profiling:
            return
        config, model = self._runner.vllm_config, self._runner.get_model()
        reason = obstacles.of_config(config, obstacles.vllm_version()) or obstacles.of_model(model)
        if reason is None:
            try:
                found = rows_of(
                    self._runner.kv_cache_config,
                    config.compilation_config.static_forward_context,
                    config.cache_config.cache_dtype,
                    model.modules(),
                )
                reason = None if found.rows else "the target keeps no row for each token in its KV cache"
            except UnknownLayout as error:
                reason = str(error)
        if reason is not None:
            stays_stock(NWOR, "rejected drafts stay in the KV cache", reason)
            return
        self._found = found
        if self._hook is None:
            # The innermost module: vLLM's wrappers capture what is called inside them.
            self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        left = f"; left out, without a row for each token: {', '.join(found.left_out)}" if found.left_out else ""
        journal.note(NWOR, f"{self._mode} of {len({cache.layer for cache in found.rows})} layers{left}")
        journal.use(NWOR, True)
        if found.left_out:
            logger.warning("%s: %d layers are left out, which have no row for each token", NWOR, len(found.left_out))

    def _make(self, found: ModelCaches) -> None:
        batch, caches = _batch_of(self._runner, found.groups), found.rows
        assert all(slots.dtype == torch.int64 for slots in batch.slot_mappings.values())
        keep, kernels = self._mode == "restore", kernels_for(batch.query_start_loc.device)
        try:
            rows = self._rows = (KernelRows if kernels else ReferenceRows)(caches, batch, keep)
            if self._checks:
                self._witness = ReferenceRows(caches, batch, keep=True)
        except torch.OutOfMemoryError as error:
            kept = batch.max_num_reqs * batch.drafts * sum(cache.num_bytes for cache in caches)
            times = "twice " if keep and self._checks else ""
            raise NoRoom(
                f"{NWOR}: {batch.max_num_reqs} requests with {batch.drafts} drafts each overwrite "
                f"{kept / 2**20:.1f} MiB, which are kept {times}beside the KV cache, and the device has less; lower "
                f"gpu_memory_utilization or max_num_seqs, or set {MODE}=scrub without {DEBUG_SYNC}, which keeps nothing"
            ) from error
        keepers = (rows if keep else None, self._witness)
        self._keepers = tuple(one for one in keepers if one is not None)
        how = "kernels" if kernels else "PyTorch operations"
        journal.note(f"{NWOR} rows", f"by {how}, with {rows.num_bytes / 2**20:.1f} MiB")

    def _before_forward(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if self._found is not None:
            self._make(self._found)
            self._found = None
        if not self._keepers:
            return
        # A request has a token at least. Some models have several positions for each.
        num_reqs = min(kwargs["positions"].shape[-1], self._runner.max_num_reqs)
        for rows in self._keepers:
            rows.log(num_reqs)

    def restore(self, rejected: Rejected) -> None:
        """Take the rejected drafts of a batch out of the KV cache.

        Raises:
            NotRestored: with `VLLM_HWPLUGIN_NWOR_DEBUG_SYNC`, where the cache does not hold what it should.
        """
        if self._rows is None:
            return
        self._rows.restore(rejected)
        # While a graph is captured nothing has happened yet.
        if self._witness is not None and not _is_capturing(self._runner.device):
            self.check(rejected)

    def check(self, rejected: Rejected) -> None:
        """Wait for the device and compare, where that was asked for. See :meth:`restore`."""
        if self._witness is None:
            return
        wrong = self._witness.differing(self._witness.rejected_slots(rejected), zeros=self._mode == "scrub")
        if wrong:
            expected = "what it held before the draft was written" if self._mode == "restore" else "zeros"
            cache, slot, count = wrong[0]
            block, token = divmod(slot, cache.block_size)
            raise NotRestored(
                f"{NWOR}: {cache.layer} does not hold {expected} at slot {slot} (block {block}, token {token}): "
                f"{count} of {cache.num_bytes} bytes differ; so do {len(wrong) - 1} other rows. Set {DEBUG_SYNC}=0 to "
                f"go on without this check, or {MODE}=off"
            )


def _is_capturing(device: torch.device) -> bool:
    # A CPU build of torch does not have the question.
    return device.type != "cpu" and bool(torch.cuda.is_current_stream_capturing())


def _batch_of(runner: Any, groups: Iterable[int]) -> Batch:
    """What a runner's steps are read from, for the KV cache groups that are of interest."""
    drafts = runner.vllm_config.speculative_config.num_speculative_tokens
    if hasattr(runner, "input_buffers"):
        slots, starts = runner.block_tables.slot_mappings, runner.input_buffers.query_start_loc
    else:
        slots = [table.slot_mapping.gpu for table in runner.input_batch.block_table.block_tables]
        starts = runner.query_start_loc.gpu
    return Batch(starts, {group: slots[group] for group in groups}, runner.max_num_reqs, drafts)
