# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with Model Runner V2 on the host.

All of it is vLLM's own but the models, what samples, and what takes a device. Target and draft write a key of each
token to the slot that they are given, and read as many keys as the batch's metadata say. So a row, a token, a length,
a slot or a block that is not the request's changes what is sampled or drafted for it.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from vllm_hwplugin.spec_decode.v2 import recording, step_inputs, tail_graphs, tail_obstacles

from .. import streams
from ..engines import Engine
from . import released_modules
from .released_modules import RUNNER, ReleasedModules

BLOCK, MAX_LEN, MAX_REQS, MAX_TOKENS, HIDDEN, VOCAB = 4, 48, 4, 24, 8, 17
NUM_BLOCKS = 24
DEVICE = torch.device("cpu")


class Backend(TritonAttentionBackend):
    """With small blocks, of which the requests here have several."""

    @staticmethod
    def get_supported_kernel_block_sizes(*_: Any) -> list[Any]:
        return [BLOCK]


class Layer(AttentionLayerBase):
    """Of the target, or of the draft."""

    def __init__(self) -> None:
        self.num_heads = 1

    def get_attn_backend(self) -> type:
        return Backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)


class Model(torch.nn.Module):
    """The target, or its draft: one layer of attention.

    Args:
        layer: its name.
        context: where the modules that call it have their forward context.
    """

    def __init__(self, layer: str, context: Context) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(7)
        self.embed = torch.randn(VOCAB, HIDDEN, generator=chance)
        self.head = torch.randn(HIDDEN, VOCAB, generator=chance)
        self.mix = torch.randn(HIDDEN, HIDDEN, generator=chance)
        # The last row takes what has no slot.
        self.kv = torch.zeros(NUM_BLOCKS * BLOCK + 1, HIDDEN)
        self._layer, self._context = layer, context
        self._draft = layer == "draft"

    def forward(
        self, input_ids: Any, positions: Any, hidden_states: Any = None, inputs_embeds: Any = None, **_: Any
    ) -> Any:
        key = self.embed[input_ids] + torch.sin(positions[:, None] * (1 + torch.arange(HIDDEN)))
        hidden = key.clone()
        if self._draft:
            hidden = hidden + 0.1 * hidden_states @ self.mix
        found = self._context.of(self._layer)
        if found is not None:
            metadata, slots = found
            slots = slots[: len(key)]
            self.kv[torch.where(slots < 0, len(self.kv) - 1, slots)] = key
            hidden = hidden + self._attend(metadata, len(key))
        hidden = torch.tanh(hidden)
        return (hidden, hidden) if self._draft else hidden

    def _attend(self, metadata: Any, num_tokens: int) -> torch.Tensor:
        """Of each token to those before it in its request."""
        starts, places = metadata.query_start_loc, torch.arange(MAX_LEN)
        tokens = torch.arange(num_tokens)
        request = (torch.searchsorted(starts, tokens, right=True) - 1).clamp(0, len(metadata.seq_lens) - 1)
        last = metadata.seq_lens[request] - starts[request + 1] + tokens
        rows = metadata.block_table[request][:, places // BLOCK] * BLOCK + places % BLOCK
        age = last[:, None] - places
        # The newest keys count most, so that one that is missed shows.
        weight = torch.where((age < 0) | (age > 12), 0.0, 0.7**age)
        return (self.kv[rows] * weight[..., None]).sum(1)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ self.head


class Context:
    """vLLM's forward context."""

    def __init__(self) -> None:
        self._current: tuple[dict[str, Any], dict[str, Any]] = {}, {}

    @contextlib.contextmanager
    def set(self, attn_metadata: Any, vllm_config: Any, slot_mapping: Any = None, **_: Any) -> Iterator[None]:
        before, self._current = self._current, (attn_metadata or {}, slot_mapping or {})
        yield
        self._current = before

    def of(self, layer: str) -> tuple[Any, torch.Tensor] | None:
        metadata, slots = self._current
        return (metadata[layer], slots[layer]) if layer in metadata else None


def config_of(layers: dict[str, Any], k: int) -> Any:
    """What scheduler and runner ask of vLLM's `VllmConfig`."""

    def no(*_: Any) -> bool:
        return False

    draft = types.SimpleNamespace(
        get_hidden_size=lambda: HIDDEN, get_vocab_size=lambda: VOCAB, hf_config=types.SimpleNamespace()
    )
    speculative = types.SimpleNamespace(
        method="eagle",
        num_speculative_tokens=k,
        num_speculative_tokens_per_batch_size=None,
        draft_model_config=draft,
        rejection_sample_method="strict",
        draft_sample_method="greedy",
        max_num_new_slots_for_drafting=0,
        use_local_argmax_reduction=False,
        enable_adaptive_verification=False,
        use_eagle=lambda: True,
        use_eagle_block_drop=lambda: True,
        uses_dynamic_speculative_decoding=no,
        **dict.fromkeys(("use_ngram", "use_dspark", "use_gemma4_mtp", "use_multi_module_mtp"), no),
    )
    compilation = types.SimpleNamespace(
        static_forward_context=layers,
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
        cudagraph_capture_sizes=[(1 + k) * count for count in (1, 2, MAX_REQS)],
        max_cudagraph_capture_size=(1 + k) * MAX_REQS,
        resolve_cudagraph_mode_and_sizes=lambda *_, **__: CUDAGraphMode.FULL_DECODE_ONLY,
        mode=0,
    )
    return types.SimpleNamespace(
        speculative_config=speculative,
        num_speculative_tokens=k,
        num_lookahead_tokens=k,
        num_prefill_lookahead_tokens=1,
        compilation_config=compilation,
        scheduler_config=types.SimpleNamespace(
            max_num_seqs=MAX_REQS,
            max_num_active_seqs=None,
            max_num_scheduled_tokens=None,
            max_num_batched_tokens=MAX_TOKENS,
            policy="fcfs",
            scheduler_reserve_full_isl=False,
            long_prefill_token_threshold=0,
            long_prefill_token_threshold_adaptive=False,
            enable_chunked_prefill=True,
            disable_chunked_mm_input=False,
            async_scheduling=True,
            watermark=0.0,
            prefill_schedule_interval=1,
        ),
        cache_config=types.SimpleNamespace(
            num_gpu_blocks=NUM_BLOCKS,
            cache_dtype="auto",
            enable_prefix_caching=True,
            mamba_cache_mode="none",
            block_size=BLOCK,
            kv_sharing_fast_prefill=False,
            enable_mamba_shared_prefix_checkpoint=False,
            use_kda_recoverssm=False,
            use_replayssm=False,
        ),
        parallel_config=types.SimpleNamespace(
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank=0,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            enable_batch_sharded_sampling=False,
            enable_eplb=False,
            use_ubatching=False,
            num_ubatches=1,
        ),
        model_config=types.SimpleNamespace(
            runner_type="generate",
            dtype=torch.float32,
            head_dtype=torch.float32,
            max_model_len=MAX_LEN,
            use_fp64_gumbel=False,
            logits_processors=None,
            logprobs_mode="raw_logprobs",
            enable_trace_replay=False,
            multimodal_config=None,
            rswa_window=None,
            get_vocab_size=lambda: VOCAB,
            get_num_attention_heads=lambda parallel: 1,
            get_num_kv_heads=lambda parallel: 1,
            get_head_size=lambda: 8,
            get_inputs_embeds_size=lambda: HIDDEN,
            **dict.fromkeys(
                (
                    *("is_encoder_decoder", "is_moe", "is_diffusion", "is_hybrid", "is_attention_free"),
                    *("supports_multimodal_inputs", "enable_prompt_embeds", "uses_mrope", "uses_xdrope_dim"),
                    *("enable_return_routed_experts", "return_sampling_mask", "is_mm_prefix_lm"),
                ),
                False,
            ),
        ),
        observability_config=types.SimpleNamespace(
            kv_cache_metrics=False,
            enable_mfu_metrics=False,
            enable_logging_iteration_details=False,
            per_request_spec_decode_metrics="none",
            cudagraph_metrics=False,
        ),
        attention_config=types.SimpleNamespace(hisparse_config=None),
        aux_output_config=types.SimpleNamespace(enabled=False),
        ec_manager_config=types.SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
        load_config=types.SimpleNamespace(load_format="dummy"),
        max_in_flight_tokens=2 * MAX_TOKENS,
        max_concurrent_batches=2,
        use_v2_model_runner=True,
        use_cumem_cudagraph_pool=False,
        mamba_config=None,
        offload_config=None,
        **dict.fromkeys(
            (
                *("diffusion_config", "lora_config", "kv_events_config", "kv_transfer_config", "ec_transfer_config"),
                *("watermark_config", "reasoning_config"),
            )
        ),
        is_encoder_only=False,
        is_mm_encoder_only=False,
    )


def pick(
    logits: torch.Tensor, rows: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, pos: Any, **_: Any
) -> torch.Tensor:
    """`gumbel_sample`, with other noise: the best token, or one that goes by a request's seed and the position."""
    phase = (seeds[rows] % 1009)[:, None] + 31 * pos[:, None] + 7 * torch.arange(logits.shape[-1])
    noise = 3 * torch.sin(phase * 12.9898)
    return (logits + torch.where(temperature[rows][:, None] == 0, 0.0, noise)).argmax(-1)


def verify(
    logits: torch.Tensor,
    draft_logits: None,
    drafts: torch.Tensor,
    starts: torch.Tensor,
    pos: torch.Tensor,
    rows: torch.Tensor,
    expanded_rows: torch.Tensor,
    local_pos: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    num_speculative_steps: int,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rejection_sample`: a draft is right if it is the token that would be picked."""
    picked, last = pick(logits, expanded_rows, temperature, seeds, pos), len(logits) - 1
    columns, counts = torch.arange(1 + num_speculative_steps), (starts[1:] - starts[:-1])[:, None]
    places = starts[:-1, None] + columns
    tokens = picked[places.clamp(max=last)]
    right = (tokens == drafts[(places + 1).clamp(max=last)]) & (columns + 1 < counts)
    return tokens, (1 + right.int().cumprod(1).sum(1)).int()


def best(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    """`apply_top_k_top_p`."""
    ordered, order = logits.sort(-1, descending=True)
    ranks, probs = torch.arange(logits.shape[-1]), ordered.softmax(-1)
    left_out = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k is not None:
        left_out |= ranks >= top_k[:, None]
    if top_p is not None:
        left_out |= probs.cumsum(-1) - probs >= top_p[:, None]
    return torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(left_out, -torch.inf))


#: What takes a device or a checkpoint, beside what `released_modules` has.
STAND_INS: dict[str, Any] = {
    **released_modules.STAND_INS,
    "create_offloader": lambda config: None,
    "set_offloader": lambda offloader: None,
    "DeviceMemoryProfiler": lambda: contextlib.nullcontext(types.SimpleNamespace(consumed_memory=0)),
    "get_model_loader": lambda config: None,
    "freeze_gc_for_cudagraph_capture": contextlib.nullcontext,
    "lock_workspace": lambda: None,
    "use_workspace_lane": lambda lane: contextlib.nullcontext(),
    "init_kv_cache": lambda *_, **__: {},
    "gumbel_sample": pick,
    "rejection_sample": verify,
    "apply_top_k_top_p": best,
    "async_copy_to_np": lambda tensor: streams.copied(tensor).numpy(),
}


def read_by_the_plugin(modules: ReleasedModules, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the plugin's modules use what `modules` have of Model Runner V2, not the installed vLLM's."""
    for module in (recording, step_inputs, tail_graphs, tail_obstacles):
        for name, value in list(vars(module).items()):
            origin = getattr(value, "__module__", None) or ""
            if origin.startswith(f"{RUNNER}."):
                monkeypatch.setattr(module, name, getattr(modules.load(origin), name))
    monkeypatch.setattr(tail_graphs, "graph_capture", STAND_INS["graph_capture"])


class Side(Engine):
    """vLLM of `modules` with its models, its KV cache and its graphs."""

    def __init__(self, modules: ReleasedModules, k: int) -> None:
        context, layers = Context(), {name: Layer() for name in ("target", "draft")}
        config, self.models = config_of(layers, k), [Model(name, context) for name in layers]
        for name in ("model_runner", "cudagraph_utils", "spec_decode.target_dependent_ar.speculator"):
            vars(modules(name))["set_forward_context"] = context.set
        runner = modules("model_runner").GPUModelRunner(config, DEVICE)
        runner.speculator.load_draft_model = lambda *_: self.models[1]
        runner.load_model(model=self.models[0])
        runner.speculator.draft_attn_layer_names = {"draft"}
        groups = [KVCacheGroupSpec(list(layers), layers["target"].get_kv_cache_spec(None))]
        kv_cache_config = KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        runner.initialize_kv_cache(kv_cache_config)
        runner.capture_model()
        super().__init__(config, runner, kv_cache_config, VOCAB)

    def draft(self, count: int) -> None:
        """Have each step ask for so many drafts from now on."""
        self.scheduler.dynamic_sd_lookup = [count] * (1 + MAX_REQS)

    @contextlib.contextmanager
    def without_graphs(self) -> Iterator[None]:
        """While it lasts the target has none, as after a change of the ranks of experts."""
        manager = self.runner.cudagraph_manager
        graphs = dict(manager.graphs)
        manager.release_graphs()
        try:
            yield
        finally:
            manager.graphs.update(graphs)
            manager._graphs_captured = True

    def restart(self) -> None:
        """Forget all requests, wherever they are."""
        super().restart()
        states = self.runner.req_states
        for name in list(states.req_id_to_index):
            self.runner._remove_request(name)
        states.free_indices.sort()
        self.runner.execute_model_state = None
        for model in self.models:
            model.kv.zero_()

    def inputs(self) -> dict[str, Any]:
        """What the target was given in the last step."""
        buffers, tables, batch = self.runner.input_buffers, self.runner.block_tables, self.batch
        padded, blocks = batch.num_reqs_after_padding, tables.num_blocks.np[0, batch.idx_mapping_np]
        return {
            "scheduled": self.scheduled.num_scheduled_tokens,
            "verified": self.scheduled.scheduled_spec_decode_tokens,
            "token ids": buffers.input_ids[: batch.num_tokens].tolist(),
            "positions": buffers.positions[: batch.num_tokens].tolist(),
            # Padding has no length and no slots.
            "lengths": buffers.seq_lens[:padded].tolist(),
            "starts": buffers.query_start_loc[: padded + 1].tolist(),
            "blocks": [row[:count].tolist() for row, count in zip(tables.input_block_tables[0], blocks, strict=False)],
            "slots": tables.slot_mappings[:, : batch.num_tokens_after_padding].tolist(),
        }

    def state(self) -> dict[str, dict[str, Any]]:
        """What the runner holds of each request: its row, and its keys of the tokens that are computed."""
        states, found = self.runner.req_states, {}
        table = self.runner.block_tables.block_tables[0].gpu
        for name, row in states.req_id_to_index.items():
            computed, length = (int(one.gpu[row]) for one in (states.num_computed_tokens, states.total_len))
            places = torch.arange(computed)
            slots = table[row, places // BLOCK] * BLOCK + places % BLOCK
            found[name] = {
                "computed": computed,
                "tokens": states.all_token_ids.gpu[row, :length].tolist(),
                "last": states.last_sampled_tokens[row].tolist(),
                "drafts": states.draft_tokens[row].tolist(),
                "keys": [model.kv[slots].tolist() for model in self.models],
            }
        return found
