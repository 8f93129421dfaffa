# SPDX-License-Identifier: Apache-2.0
"""Let a drafter that shares the target's head read fewer bytes.

It reads all rows in FP8, or FP8 rows of recent tokens. The drafter's `lm_head` becomes another module, which vLLM's
logits processor multiplies by. The target keeps its head and verifies, so only acceptance can change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_hwplugin.base import gates, run_records
from vllm_hwplugin.base.fallback import in_a_line, report_unused
from vllm_hwplugin.base.features import ENGINE_REPORT, V2_DRAFT_HEAD, gate_of

from .local_argmax import other_logits, whole_logits_needed
from .methods import put_before

try:
    from vllm.model_executor.layers.quantization.online.lm_head import (
        quantized_lm_head_copy,
        refresh_quantized_lm_heads,
    )
except ImportError:
    quantized_lm_head_copy = None

#: Bytes of a rank's head from which `auto` makes a copy. A copy takes half, and at most this share of the GPU's memory.
PAYS_FROM, MOST_MEMORY = 400_000_000, 0.02
#: Most rows of the form `rows`, of all ranks; it has a quarter of the vocabulary if that is less.
ROWS: Final = 65536
#: Prompts and answers after which all rows are copied again: a trainer may write weights and call nothing.
FEEDS: Final = 1000
#: Rows that are quantized together, to bound the float32 numbers between.
_CHUNK: Final = 4096
_WHOLE: Final = "drafts use the whole head"
#: A draft's `embed_tokens` may be the same module as its head, and stays.
_NAMES: Final = ("lm_head", "head")


def install(runner: Any) -> None:
    """Replace the draft's head as asked for, or report why not.

    Both models are loaded, and nothing is captured.
    """
    form = gates.read(gate_of(V2_DRAFT_HEAD)).text
    runner.draft_head = None
    if runner.speculator is None and form == "auto":
        return
    try:
        reason = obstacle(runner, form) or (why_not_by_default(runner) if form == "auto" else None)
        head = DraftHead(runner, form == "rows") if reason is None else None
    except Exception as error:  # A kernel that this GPU does not have, or a model of another shape.
        reason, head = f"the head cannot be quantized: {in_a_line(error)}", None
    if head is None:
        level = logging.DEBUG if form == "auto" else logging.INFO
        report_unused(V2_DRAFT_HEAD, _WHOLE, reason or "", level=level)
        return
    runner.draft_head = head
    run_records.use(V2_DRAFT_HEAD, True)
    head.note()
    if form == "auto":
        runner.leave_draft_head = head.leave
    put_before(runner, "add_requests", head.add_requests)
    if isinstance(head.head, Fp8Head):
        # vLLM copies to its own head then. Up to 0.31 no weight update resets the state of adapters.
        for name in ("reload_weights", "reset_lora_state"):
            if hasattr(runner, name):
                put_before(runner, name, head.refresh_after)
    if head.ring is not None:
        put_before(runner, "finish_requests", partial(head.finish_requests, head.ring))


def places(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, Any]]:
    """Return owner, name and module of each head in a draft model."""
    return [
        (owner, name, child)
        for owner in model.modules()
        for name, child in owner._modules.items()
        if name in _NAMES and isinstance(child, VocabParallelEmbedding)
    ]


def obstacle(runner: Any, form: str) -> str | None:
    """Return why this engine's draft keeps its head, or None."""
    speculator, config = runner.speculator, runner.speculative_config
    if speculator is None:
        return "this worker does not draft"
    ranks = runner.vllm_config.parallel_config.tensor_parallel_size
    if config.method not in ("eagle", "eagle3", "mtp"):
        return f"the drafter is {config.method}, and not Eagle or MTP"
    if type(speculator).__name__ in ("Gemma4Speculator", "MultiModuleMTPSpeculator"):
        return f"{type(speculator).__name__} drafts with several heads, or in another way"
    if getattr(config, "draft_lm_head_quantization", None) is not None:
        return "vLLM quantizes the draft's head already (draft_lm_head_quantization)"
    if type(speculator.model).__name__ == "InklingMTP":
        return "InklingMTP multiplies by the head's weight itself"
    if getattr(speculator.model, "draft_id_to_target_id", None) is not None:
        return "the drafter has its own vocabulary"
    heads = {head for *_, head in places(speculator.model)}
    if len(heads) != 1:
        return f"the draft model has {len(heads)} heads"
    head = heads.pop()
    if all(module is not head for module in runner.model.modules()):
        return "the drafter does not share the target's head"
    if not isinstance(head.quant_method, UnquantizedEmbeddingMethod | UnquantizedLinearMethod):
        return f"the head is quantized ({type(head.quant_method).__name__})"
    if getattr(head, "bias", None) is not None or head.shard_indices.num_added_elements:
        return "the head has a bias, or added words"
    model_dtype = runner.model_config.dtype
    if head.weight.dtype not in (torch.bfloat16, torch.float16) or runner.model_config.head_dtype != model_dtype:
        return f"the head is {head.weight.dtype} and computes in {runner.model_config.head_dtype}"
    if ranks > 2:
        return f"with tensor parallelism of {ranks} a rank's part of the head is small"
    if runner.vllm_config.weight_transfer_config is not None and (form == "rows" or quantized_lm_head_copy is None):
        return "an update of the draft's weights would not find the head"
    if form != "rows":
        return None
    if head.shard_indices.num_org_elements < 64:
        return "a rank has fewer than 64 words; use copy"
    reason = whole_logits_needed(speculator) or (other_logits(speculator) if ranks > 1 else None)
    return reason and f"{reason}; use copy"


def why_not_by_default(runner: Any) -> str | None:
    """Return why a head that can be copied stays, or None."""
    config, entry = runner.vllm_config, run_records.current()
    cache, model, parallel = config.cache_config, config.model_config, config.parallel_config
    ((*_, head), *_) = places(runner.speculator.model)
    if runner.speculative_config.num_speculative_tokens < 2:
        return "one draft reads the head once"
    if head.weight.nbytes < PAYS_FROM:
        return f"a head of {head.weight.nbytes / 1e6:.0f} MB takes little time"
    if max(parallel.world_size, parallel.data_parallel_size) > 1 or not current_platform.is_device_capability(90):
        return "only one GPU of compute capability 9.0 was measured"
    if head.weight.nbytes / 2 > MOST_MEMORY * torch.accelerator.get_memory_info(runner.device)[1]:
        return f"a copy takes more than {MOST_MEMORY:.0%} of the GPU's memory"
    if quantized_lm_head_copy is None:
        return "before 0.33 vLLM does not copy a head again that a weight update changes"
    if model.enable_sleep_mode or config.weight_transfer_config is not None or parallel.worker_extension_cls:
        return "weights may change"
    # The engine core asks for the memory only where it sizes the KV cache by what is free.
    fixed = cache.kv_cache_memory_bytes or cache.num_gpu_blocks_override or envs.VLLM_ENABLE_STARTUP_PLAN
    by_itself = parallel.distributed_executor_backend == "external_launcher"
    asks = entry is not None and ENGINE_REPORT in entry.live and model.original_max_model_len != -1
    return None if asks and not fixed and not by_itself else "a start with too little memory could not give it back"


class Fp8Head(torch.nn.Module):  # type: ignore[misc]
    """The first rows of a head, quantized by vLLM's FP8 method.

    Args:
        source: the rank's part of the head.
        rows: None: all, with the padding of `source`.

    Raises:
        ValueError: there is no FP8 kernel, or it keeps weights in another layout.
    """

    def __init__(self, source: Any, rows: int | None):
        super().__init__()
        count, self.width = rows or source.weight.shape[0], source.weight.shape[1]
        self.tp_size = source.tp_size
        self.shard_indices = source.shard_indices
        if rows is not None:
            self.shard_indices = type(source.shard_indices)(0, rows, rows, rows, 0, rows, rows, rows)
        # vLLM's method looks at these for shards along the width.
        self.input_size = self.input_size_per_partition = self.width
        self.output_size = count
        with set_default_torch_dtype(source.weight.dtype):
            self.quant_method = Fp8PtpcOnlineLinearMethod()
            self.quant_method.create_weights(
                *(self, self.width, [count], self.width, count, source.weight.dtype),
                weight_loader=default_weight_loader,
            )
            # Nothing loads this module: a reload of weights must leave it out.
            get_layerwise_info(self).reset()
            self.weight = torch.nn.Parameter(source.weight.data[:count], requires_grad=False)
            self.quant_method.process_weights_after_loading(self)
        if (*self.weight.shape, *self.weight.stride()) != (self.width, count, 1, self.width):
            raise ValueError(f"{type(self.quant_method.fp8_linear).__name__} keeps weights in its own layout")

    def write(self, source: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Quantize rows of `source` into the rows `slots`, where graphs read."""
        # No kernel copies FP8 by an index, so bytes are copied.
        weight = self.weight.data.t().view(torch.uint8)
        scales = self.weight_scale.data.view(-1, 1)
        most = torch.finfo(self.weight.dtype).max
        for at in range(0, len(slots), _CHUNK):
            values = source.index_select(0, rows[at : at + _CHUNK]).float()
            scale = (values.abs().amax(1, keepdim=True) / most).clamp_min(1 / (512 * most))
            quantized = (values / scale).clamp(-most, most).to(self.weight.dtype)
            weight.index_copy_(0, slots[at : at + _CHUNK], quantized.view(torch.uint8))
            scales.index_copy_(0, slots[at : at + _CHUNK], scale)


class Ring:
    """Which token of a rank's vocabulary each row has, on the host.

    A quarter of the rows have the lowest ids; the others follow the traffic.
    """

    def __init__(self, vocabulary: int, rows: int):
        self.fixed, self._next = rows // 4, 0
        self.token_of = np.arange(rows)
        self.slot_of: Any = np.full(vocabulary, -1)
        self.slot_of[:rows] = self.token_of
        self.sampled = self.inside = 0

    def count(self, sampled: np.ndarray) -> None:
        sampled = self._known(sampled)
        self.sampled += len(sampled)
        self.inside += int((self.slot_of[sampled] >= 0).sum())

    def take(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give tokens without a row the oldest rows; return both."""
        size = len(self.token_of) - self.fixed
        tokens = self._known(tokens)
        new = np.unique(tokens[self.slot_of[tokens] < 0])[:size]
        slots: Any = self.fixed + (self._next + np.arange(len(new))) % size
        self._next = (self._next + len(new)) % size
        self.slot_of[self.token_of[slots]] = -1
        self.token_of[slots], self.slot_of[new] = new, slots
        return slots, new

    def _known(self, tokens: np.ndarray) -> np.ndarray:
        known: np.ndarray = tokens[(tokens >= 0) & (tokens < len(self.slot_of))]
        return known


class DraftHead:
    """The draft's head. With all rows `ring` is None."""

    def __init__(self, runner: Any, with_rows: bool):
        self._runner, self.model = runner, runner.speculator.model
        self._heads = places(self.model)
        self.source = self._heads[0][2]
        self.ring: Ring | None = None
        self._feeds = self._noted = self._turn = 0
        #: By request, the tokens that were looked at.
        self._seen: dict[str, int] = {}
        self._ranks, shard = self.source.tp_size, self.source.shard_indices
        # With tensor parallelism a rank has rows of its part of the vocabulary.
        self._first, vocabulary = shard.org_vocab_start_index, shard.num_org_elements
        rows = min(ROWS // self._ranks, vocabulary // 64 * 16) if with_rows else None
        with set_current_vllm_config(runner.vllm_config):
            self.head = Fp8Head(self.source, rows) if with_rows else _copy_of(self.source)
        if rows is not None:
            self.ring = Ring(vocabulary, rows)
            # vLLM saves a draft's buffers before a sleep that discards them: an id out of range would read anywhere.
            self.head.register_buffer("ids", self._first + torch.arange(rows, device=self.source.weight.device))
            self._own_top_tokens = getattr(type(self.model), "get_top_tokens", None)
            self.model.get_top_tokens = self.top_tokens
            # vLLM then asks the model for `get_top_tokens`; its checks of the option are done.
            runner.speculator.use_local_argmax_reduction = True
        for owner, name, _ in self._heads:
            delattr(owner, name)
            setattr(owner, name, self.head)

    def top_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the best rows' token ids, (tokens,) int64, in graphs too."""
        if self._ranks > 1:
            return self._best_of_ranks(hidden_states)
        if self._own_top_tokens is not None:
            return self.head.ids[self._own_top_tokens(self.model, hidden_states)]
        return self.head.ids[self.model.compute_logits(hidden_states).argmax(dim=-1)]

    def _best_of_ranks(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # As vLLM's `LogitsProcessor.get_top_tokens`, which would add the rank's first token to the place of a row.
        values, rows = self.head.quant_method.apply(self.head, hidden_states).max(dim=-1)
        pairs = torch.stack((values.float(), self.head.ids[rows].float()), dim=-1)
        values, tokens = tensor_model_parallel_all_gather(pairs, dim=-1).unflatten(-1, (self._ranks, 2)).unbind(-1)
        return tokens.gather(-1, values.argmax(-1, keepdim=True)).squeeze(-1).long()

    def note(self) -> None:
        """Describe the head in the run record."""
        size = sum(tensor.nbytes for tensor in self.head.parameters(recurse=False))
        text = f"{self.head.weight.shape[1]} rows in FP8, {size / 1e6:.1f} MB per rank"
        if self.ring is not None and self.ring.sampled:
            text += f"; of {self.ring.sampled} sampled tokens {self.ring.inside / self.ring.sampled:.1%} had a row"
        run_records.note(V2_DRAFT_HEAD, text)

    def leave(self) -> int:
        """Give the draft the whole head again; return the copy's bytes."""
        if self.head is None:
            return 0
        for owner, name, head in self._heads:
            setattr(owner, name, head)
        size: int = sum(tensor.nbytes for tensor in self.head.parameters(recurse=False))
        self.head = self._runner.draft_head = None
        reason = "with a copy the KV cache would be too small for the engine to start"
        report_unused(V2_DRAFT_HEAD, _WHOLE, reason, level=logging.WARNING)
        return size

    def refresh(self) -> None:
        """Copy all rows and ids again: weights or memory may have changed."""
        if self.head is None:
            return
        if not isinstance(self.head, Fp8Head):
            with set_current_vllm_config(self._runner.vllm_config):
                refresh_quantized_lm_heads(self.model)
            return
        rows = np.arange(self.head.weight.shape[1])
        self._write(rows, rows if self.ring is None else self.ring.token_of)

    def _write(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        pair = torch.from_numpy(np.stack((slots, tokens))).to(self.source.weight.device, non_blocking=True)
        self.head.write(self.source.weight.data, pair[0], pair[1])
        if self.ring is not None:
            self.head.ids.index_copy_(0, pair[0], self._first + pair[1])

    def _feed(self, ring: Ring, tokens: np.ndarray) -> None:
        slots, new = ring.take(tokens - self._first)
        if len(new):
            # Before the step's drafts, on their stream.
            self._write(slots, new)

    def _refresh_at_times(self) -> None:
        """Count a prompt or an answer; after `FEEDS`, refresh."""
        self._feeds += 1
        if self._feeds % FEEDS == 0:
            self.refresh()

    def refresh_after(self, vllms: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        result = vllms(*arguments, **settings)
        self.refresh()
        return result

    def add_requests(self, vllms: Callable[..., Any], scheduler_output: Any) -> None:
        vllms(scheduler_output)
        if vars(self._runner).pop("hwplugin_woken", False):
            self.refresh()
        if self.ring is None:
            return
        for request in scheduler_output.scheduled_new_reqs:
            self._feed(self.ring, np.asarray(request.prefill_token_ids, dtype=np.int64))
            self._refresh_at_times()

    def finish_requests(self, ring: Ring, vllms: Callable[..., Any], scheduler_output: Any) -> None:
        states = self._runner.req_states
        for name in sorted(scheduler_output.finished_req_ids):
            if name in states.req_id_to_index:
                # The last step's tokens may be missing, or old: nothing waits for the device.
                self._look(ring, name, spare=0)
                self._refresh_at_times()
            self._seen.pop(name, None)
        # Each note writes a file.
        if ring.sampled > 2 * self._noted:
            self._noted = ring.sampled
            self.note()
        vllms(scheduler_output)
        # A long answer repeats words that its prompt does not have. Each step looks at the next request.
        names = list(states.req_id_to_index)
        if names and hasattr(states.all_token_ids, "_uva_buf"):
            self._turn += 1
            # The GPU may still compute the last two steps.
            self._look(ring, names[self._turn % len(names)], spare=2 * self._runner.decode_query_len)

    def _look(self, ring: Ring, name: str, spare: int) -> None:
        """Count a request's new tokens, and give them rows.

        Args:
            spare: how many of its last tokens wait for another look.
        """
        states = self._runner.req_states
        row = states.req_id_to_index[name]
        seen = self._seen.get(name) or int(states.prompt_len.np[row])
        end = int(states.num_computed_tokens_np[row]) - spare
        if end <= seen:
            return
        memory = getattr(states.all_token_ids, "_uva_buf", None)
        # Without host memory for them vLLM has them on the device, and this waits.
        on_host = memory.np[row] if memory is not None else states.all_token_ids.gpu[row, :end].cpu().numpy()
        tokens = on_host[seen:end].astype(np.int64)
        self._seen[name] = end
        ring.count(tokens - self._first)
        self._feed(ring, tokens)


def _copy_of(source: Any) -> torch.nn.Module:
    """Return vLLM's FP8 copy of a head; up to 0.32 the plugin's."""
    return Fp8Head(source, None) if quantized_lm_head_copy is None else quantized_lm_head_copy(source, "fp8")
