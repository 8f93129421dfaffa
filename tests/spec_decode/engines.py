# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler and a model runner, called as `EngineCore` calls them."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from vllm.config import (
    AttentionConfig,
    CacheConfig,
    LoadConfig,
    ObservabilityConfig,
    ParallelConfig,
    ProfilerConfig,
    SchedulerConfig,
)
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import override_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from .stand_in import StandIn

BLOCK, MAX_LEN, MAX_REQS, MAX_TOKENS, HIDDEN, VOCAB = 4, 48, 4, 24, 8, 17
NUM_BLOCKS, DRAFTS = 24, 2
#: With those that a layer with states adds: one for each token of a step.
MOST_BLOCKS = NUM_BLOCKS + MAX_REQS
#: Tokens back to which a token attends, itself included: in a layer, and in one with a window.
REACH, WINDOW = 13, 5
#: Tokens of a block of a layer with a window.
WINDOW_BLOCK = 2 * BLOCK
DEVICE = torch.device("cpu")
DROPS_STEPS = "async_tokens_to_discard" in inspect.getsource(AsyncScheduler)


class Backend(TritonAttentionBackend):
    """With small blocks, of which the requests here have several."""

    @staticmethod
    def get_supported_kernel_block_sizes(*_: Any) -> list[Any]:
        return [BLOCK, WINDOW_BLOCK]


class Layer(AttentionLayerBase):
    """Of the target, or of the draft.

    Args:
        window: whether it has a sliding window.
    """

    def __init__(self, window: bool = False) -> None:
        self.num_heads, self._window = 1, window
        # Up to 0.29 the number is read here.
        self.impl = self

    def get_attn_backend(self) -> type:
        return Backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        common: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        if self._window:
            return SlidingWindowSpec(block_size=WINDOW_BLOCK, sliding_window=WINDOW, **common)
        return FullAttentionSpec(block_size=BLOCK, **common)


class StateBuilder(GDNAttentionMetadataBuilder):
    """Of a recurrent layer, in tensors that a graph can hold. vLLM tells this class of accepted drafts."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
        self._blocks = torch.zeros((MAX_REQS, 1 + kv_cache_spec.num_speculative_blocks), dtype=torch.long)
        self._accepted, self._drafts = torch.zeros((2, MAX_REQS), dtype=torch.long).unbind()

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: Any = None,
        num_decode_draft_tokens_cpu: Any = None,
        **_: Any,
    ) -> Any:
        common, count = common_attn_metadata, common_attn_metadata.num_reqs
        self._blocks[:count] = common.block_table_tensor[:count, : self._blocks.shape[1]]
        self._accepted[:count] = 1 if num_accepted_tokens is None else num_accepted_tokens
        self._drafts[:count] = -1 if num_decode_draft_tokens_cpu is None else num_decode_draft_tokens_cpu
        return types.SimpleNamespace(
            blocks=self._blocks[:count],
            accepted=self._accepted[:count],
            drafts=self._drafts[:count],
            starts=common.query_start_loc[: count + 1],
            lengths=common.seq_lens[:count],
            most_tokens=common.max_query_len,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.build(0, common_attn_metadata)


class StateBackend(Backend):
    @staticmethod
    def get_builder_cls() -> Any:
        return StateBuilder


class StateLayer(Layer):
    """A recurrent layer of the target. It has a block for the state after each token that a step may accept."""

    def get_attn_backend(self) -> type:
        return StateBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        drafts = vllm_config.num_speculative_tokens
        return MambaSpec(
            block_size=MAX_LEN,
            shapes=((HIDDEN,),),
            dtypes=(torch.float32,),
            mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
            num_speculative_blocks=drafts,
        )


class Head(torch.nn.Module):
    """A linear layer; a module that is called, as that of vLLM's models."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ self.weight


class Model(torch.nn.Module):
    """The target, or its draft: one layer of attention, and a target's second one.

    Args:
        layer: its name.
        context: where the modules that call it have their forward context.
        window: the name of a layer with a sliding window; None without.
        recurrent: that of a layer with a state; None without.
    """

    def __init__(self, layer: str, context: Context, window: str | None = None, recurrent: str | None = None) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(7)
        self.embed = torch.randn(VOCAB, HIDDEN, generator=chance)
        self.lm_head = Head(torch.randn(HIDDEN, VOCAB, generator=chance))
        self.mix = Head(torch.randn(HIDDEN, HIDDEN, generator=chance))
        # The last row takes what has no slot.
        self.kv = torch.zeros(MOST_BLOCKS * BLOCK + 1, HIDDEN)
        self.window_kv = torch.zeros(MOST_BLOCKS * WINDOW_BLOCK + 1, HIDDEN)
        # As in vLLM, a block is any group's, so a state that is written to another's block is in its keys.
        self.states = self.kv[:-1:BLOCK]
        self._layers, self._recurrent = {layer: (self.kv, BLOCK, REACH)}, recurrent
        if window is not None:
            self._layers[window] = self.window_kv, WINDOW_BLOCK, WINDOW
        self._context = context
        self._draft = layer == "draft"
        #: Whether the first that reads the metadata of several tokens a request puts its lengths into it, as the first
        #: kernel does with FlashMLA's plan.
        self.plans = False

    @property
    def head(self) -> torch.Tensor:
        return self.lm_head.weight

    def forward(
        self, input_ids: Any, positions: Any, hidden_states: Any = None, inputs_embeds: Any = None, **_: Any
    ) -> Any:
        embedded = self.embed[input_ids] if inputs_embeds is None else inputs_embeds
        key = embedded + torch.sin(positions[:, None] * (1 + torch.arange(HIDDEN)))
        hidden = key.clone()
        if self._draft:
            hidden = hidden + 0.1 * self.mix(hidden_states)
        for layer, (kv, block, reach) in self._layers.items():
            if (found := self._context.of(layer)) is not None:
                metadata, slots = found
                slots = slots[: len(key)]
                kv[torch.where(slots < 0, len(kv) - 1, slots)] = key
                hidden = hidden + self._attend(metadata, kv, block, reach, len(key))
        if self._recurrent is not None and (found := self._context.of(self._recurrent)) is not None:
            hidden = hidden + self._recur(found[0], key)
        hidden = torch.tanh(hidden)
        return (hidden, hidden) if self._draft else hidden

    def _recur(self, metadata: Any, key: torch.Tensor) -> torch.Tensor:
        """Of each token the state behind it. As kernels of vLLM, it goes on with padding's, unless that has block 0."""
        blocks, verifies = metadata.blocks, (metadata.drafts >= 0) | (metadata.lengths == 0)
        starts, counts = metadata.starts[:-1], metadata.starts[1:] - metadata.starts[:-1]
        if metadata.most_tokens * len(starts) == len(key):
            counts = torch.full_like(counts, metadata.most_tokens)
            starts = counts.cumsum(0) - counts
        # A draft that was rejected has left its state in a later block.
        # Older releases capture with no accepted token.
        first = torch.where(verifies, metadata.accepted - 1, 0).clamp(min=0)[:, None]
        state = self.states[blocks.gather(1, first).squeeze(1)]
        state = torch.where((metadata.lengths > counts)[:, None], state, 0.0)
        # The last row takes what is no token's.
        found = torch.zeros(1 + len(key), HIDDEN)
        for place in range(metadata.most_tokens):
            there = place < counts
            token = torch.where(there, starts + place, len(key))
            state = torch.where(there[:, None], 0.8 * state + key[token.clamp(max=len(key) - 1)], state)
            found[token] = state
            column = torch.where(verifies, min(place, blocks.shape[1] - 1), 0)[:, None]
            self.states[torch.where(there, blocks.gather(1, column).squeeze(1), 0)] = state
        return 0.3 * found[:-1]

    def _attend(self, metadata: Any, kv: torch.Tensor, block: int, reach: int, num_tokens: int) -> torch.Tensor:
        """Of each token to those before it in its request."""
        starts, places = metadata.query_start_loc, torch.arange(MAX_LEN)
        tokens, lengths = torch.arange(num_tokens), metadata.seq_lens
        if self.plans and metadata.max_query_len > 1:
            if not hasattr(metadata, "plan"):
                metadata.plan = lengths.clone()
            lengths = metadata.plan
        request = (torch.searchsorted(starts, tokens, right=True) - 1).clamp(0, len(lengths) - 1)
        last = lengths[request] - starts[request + 1] + tokens
        rows = metadata.block_table[request][:, places // block] * block + places % block
        age = last[:, None] - places
        # The newest keys count most, so that one that is missed shows.
        weight = torch.where((age < 0) | (age >= reach), 0.0, 0.7**age)
        return (kv[rows] * weight[..., None]).sum(1)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden_states)


class BlockModel(Model):
    """A DFlash draft: it also has keys of the target's states, of each token of a batch."""

    combine_hidden_states = staticmethod(torch.tanh)

    def precompute_and_store_context_kv(self, states: Any, positions: Any, slots: Any = None) -> None:
        if slots is not None:
            key = self.mix(states) + torch.sin(positions[:, None] * (1 + torch.arange(HIDDEN)))
            self.kv[torch.where(slots < 0, len(self.kv) - 1, slots)] = key

    def forward(self, input_ids: Any, positions: Any, **_: Any) -> Any:
        return super().forward(input_ids, positions, torch.zeros(len(input_ids), HIDDEN))[0]


class BlockTarget(Model):
    """Its target, which has states of a layer for it."""

    # Which layer, Model Runner V1 asks and says.
    get_eagle3_default_aux_hidden_state_layers = set_aux_hidden_state_layers = lambda *_: (0,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = super().forward(*args, **kwargs)
        return hidden, [hidden.flip(1)]


class Context:
    """vLLM's `set_forward_context`, for the models here and for vLLM's wrapper of graphs."""

    def __init__(self) -> None:
        self._current: tuple[dict[str, Any], dict[str, Any]] = {}, {}

    @contextlib.contextmanager
    def __call__(
        self,
        attn_metadata: Any,
        vllm_config: Any,
        *_: Any,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
        batch_descriptor: Any = None,
        slot_mapping: Any = None,
        **__: Any,
    ) -> Iterator[None]:
        before, self._current = self._current, (attn_metadata or {}, slot_mapping or {})
        given = types.SimpleNamespace(batch_descriptor=batch_descriptor, cudagraph_runtime_mode=cudagraph_runtime_mode)
        with override_forward_context(given):
            yield
        self._current = before

    def of(self, layer: str) -> tuple[Any, torch.Tensor] | None:
        metadata, slots = self._current
        return (metadata[layer], slots[layer]) if layer in metadata else None


def config_of(
    layers: dict[str, Any],
    *,
    asynchronous: bool,
    drawn: bool,
    mode: CUDAGraphMode,
    largest: int,
    drafts: int,
    schedule: Sequence[Sequence[int]] | None,
    blocks: bool,
) -> Any:
    """What scheduler and runner ask of vLLM's `VllmConfig`.

    Args:
        layers: by name.
        asynchronous: whether the scheduler runs ahead of the device.
        drawn: whether drafts are drawn by temperature.
        mode: of CUDA graphs.
        largest: tokens of the largest graph.
        drafts: of a request in a step; 0 without speculation.
        schedule: of numbers of drafts.
        blocks: whether the drafter is DFlash.
    """

    def no(*_: Any) -> bool:
        return False

    draft = StandIn(
        "draft_model_config",
        model="draft",
        get_hidden_size=lambda: HIDDEN,
        get_vocab_size=lambda: VOCAB,
        get_inputs_embeds_size=lambda: HIDDEN,
        hf_config=types.SimpleNamespace(num_hidden_layers=0, mask_token_id=VOCAB - 1, ptd_token_id=VOCAB - 1),
        architectures=[],
        max_model_len=None,
        uses_mrope=False,
        uses_xdrope_dim=0,
    )
    speculative = StandIn(
        "speculative_config",
        method="dflash" if blocks else "eagle",
        num_speculative_tokens=drafts,
        num_speculative_tokens_per_batch_size=schedule,
        draft_model_config=draft,
        target_model_config=None,
        attention_backend=None,
        rejection_sample_method="standard" if drawn else "strict",
        draft_sample_method="probabilistic" if drawn else "greedy",
        draft_lm_head_quantization=None,
        max_num_new_slots_for_drafting=0,
        use_local_argmax_reduction=False,
        enable_adaptive_verification=False,
        use_eagle=lambda: True,
        use_eagle_block_drop=lambda: True,
        needs_eagle_block_drop=lambda: True,
        disable_eagle_block_drop=False,
        fly_entropy_threshold=None,
        fly_entropy_top_k=None,
        uses_dynamic_speculative_decoding=lambda: schedule is not None,
        parallel_drafting=blocks,
        disable_padded_drafter_batch=False,
        use_heterogeneous_vocab=False,
        enforce_eager=False,
        # Up to 0.20: one draft after the other.
        speculative_token_tree=str([(0,) * count for count in range(1, 1 + drafts)]),
        **dict.fromkeys(
            (
                *("use_ngram", "use_ngram_gpu", "use_dspark", "use_gemma4_mtp", "use_step3p5_mtp"),
                *("use_multi_module_mtp", "uses_draft_model", "uses_extract_hidden_states"),
            ),
            no,
        ),
        use_dflash=lambda: blocks,
    )
    compilation = StandIn(
        "compilation_config",
        static_forward_context=layers,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=[(1 + drafts) * count for count in (1, 2, MAX_REQS)],
        max_cudagraph_capture_size=largest,
        resolve_cudagraph_mode_and_sizes=lambda *_, **__: mode,
        mode=0,
        cudagraph_num_of_warmups=1,
        pass_config=StandIn("pass_config", enable_sp=False),
        compile_sizes=[],
        **dict.fromkeys(("cudagraph_mm_encoder", "cudagraph_specialize_lora", "fast_moe_cold_start"), False),
    )
    return StandIn(
        "vllm_config",
        speculative_config=speculative if drafts else None,
        num_speculative_tokens=drafts,
        num_lookahead_tokens=drafts + blocks,
        num_prefill_lookahead_tokens=1,
        num_hash_lookahead_tokens=1,
        compilation_config=compilation,
        scheduler_config=SchedulerConfig(
            max_num_seqs=MAX_REQS,
            max_num_batched_tokens=MAX_TOKENS,
            max_model_len=MAX_LEN,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
        ),
        cache_config=CacheConfig(block_size=BLOCK),
        parallel_config=ParallelConfig(),
        model_config=StandIn(
            "model_config",
            model="target",
            runner_type="generate",
            dtype=torch.float32,
            head_dtype=torch.float32,
            max_model_len=MAX_LEN,
            use_fp64_gumbel=False,
            logits_processors=None,
            logprobs_mode="raw_logprobs",
            generation_config="vllm",
            override_generation_config={"top_k": 9, "top_p": 0.7},
            enable_trace_replay=False,
            multimodal_config=None,
            rswa_window=None,
            hf_text_config=None,
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
                    *("is_multimodal_raw_input_only_model", "is_multimodal_model", "mrope_num_dims"),
                ),
                False,
            ),
        ),
        observability_config=ObservabilityConfig(),
        attention_config=AttentionConfig(),
        aux_output_config=StandIn("aux_output_config", enabled=False),
        ec_manager_config=StandIn("ec_manager_config", get_encoder_cache_manager_obj=lambda: None),
        load_config=LoadConfig(load_format="dummy", use_tqdm_on_load=False),
        max_in_flight_tokens=2 * MAX_TOKENS,
        max_concurrent_batches=1 + asynchronous,
        use_v2_model_runner=True,
        use_cumem_cudagraph_pool=False,
        _hwplugin_graphs_left=False,
        mamba_config=None,
        offload_config=None,
        **dict.fromkeys(
            (
                *("diffusion_config", "lora_config", "kv_events_config", "kv_transfer_config", "ec_transfer_config"),
                *("watermark_config", "reasoning_config"),
            )
        ),
        profiler_config=ProfilerConfig(),
        is_encoder_only=False,
        is_mm_encoder_only=False,
    )


class Grammars:
    """vLLM's `StructuredOutputManager` for one grammar: the tokens below a limit, in any order."""

    def __init__(self, limit: int, drafts: int) -> None:
        self._limit, self._drafts = limit, drafts
        allowed = np.arange(-(-VOCAB // 32) * 32) < limit
        self._mask = np.packbits(allowed, bitorder="little").view(np.int32)

    def grammar_bitmask(self, requests: Any, names: Sequence[str], drafts: dict[str, list[int]]) -> np.ndarray:
        # Each request has a row for each position that it may have, or for those that it has.
        in_blocks = "mask_stride" in inspect.getsource(StructuredOutputManager.grammar_bitmask)
        rows = sum(1 + (self._drafts if in_blocks else len(drafts.get(name, ()))) for name in names)
        return np.tile(self._mask, (rows, 1))

    def validate_tokens(self, request: Any, tokens: list[int]) -> list[int]:
        if not request.use_structured_output:
            return tokens
        fitting = [0 <= token < self._limit for token in tokens]
        return tokens[: (*fitting, False).index(False)]

    def accept_tokens(self, request: Any, tokens: list[int]) -> bool:
        return not request.use_structured_output or self.validate_tokens(request, tokens) == tokens

    def should_advance(self, request: Any, new_token_ids: Any = None) -> bool:
        return False


class Engine:
    """A scheduler and a runner, which a subclass makes.

    Args:
        asynchronous: whether the scheduler runs ahead of the device.
        drawn: whether drafts are drawn by temperature.
        mode: of CUDA graphs.
        largest: tokens of the largest graph; vLLM's own sizes end at the fullest decode batch.
        drafts: of a request in a step; 0 without speculation.
        schedule: vLLM's `num_speculative_tokens_per_batch_size`.
        rank: of data parallelism, and of how many.
        window: whether the target has a layer with a sliding window, whose keys are in a group of blocks of their own.
        recurrent: whether it has one with a state, likewise; "alone": vLLM takes it for a model without attention.
        blocks: whether the drafter is DFlash.

    Attributes:
        runner: a `GPUModelRunner` that has its KV cache.
        models: target and draft; without speculation the target alone.
        drafts: of a request in a step.
        scheduled: the last step's `SchedulerOutput`, and None where there was nothing to schedule.
        executed: what `execute_model` left for `sample_tokens` in it; None where there was nothing to compute.
        given: what the target was given.
        sampled: the tokens of each request in the order in which they came.
    """

    runner: Any

    def __init__(
        self,
        *,
        asynchronous: bool = True,
        drawn: bool = False,
        mode: CUDAGraphMode = CUDAGraphMode.FULL_DECODE_ONLY,
        largest: int | None = None,
        drafts: int = DRAFTS,
        schedule: list[list[int]] | None = None,
        rank: tuple[int, int] = (0, 1),
        window: bool = False,
        recurrent: bool | Literal["alone"] = False,
        blocks: bool = False,
    ) -> None:
        names = ("target", "draft") if drafts else ("target",)
        more = {
            **({"window": Layer(window=True)} if window else {}),
            **({"recurrent": StateLayer()} if recurrent else {}),
        }
        layers = {name: Layer() for name in names} | more
        self.drafts = drafts
        self.context = Context()
        kinds = (BlockTarget, BlockModel) if blocks else (Model, Model)
        self.models = [kind(name, self.context) for kind, name in zip(kinds, names, strict=False)]
        if more:
            self.models[0] = Model("target", self.context, **{name: name for name in more})
        choices: dict[str, Any] = {"asynchronous": asynchronous, "drawn": drawn, "mode": mode, "drafts": drafts}
        choices["largest"] = (1 + drafts) * MAX_REQS if largest is None else largest
        self.config = config_of(layers, **choices, schedule=schedule, blocks=blocks)
        parallel = self.config.parallel_config
        parallel.data_parallel_rank, parallel.data_parallel_size = rank
        self.config.scheduler_config.scheduler_reserve_full_isl = False
        self.config.model_config.is_hybrid = recurrent is True
        self.config.model_config.is_attention_free = recurrent == "alone"
        # As vLLM does where states are not kept for prefixes.
        self.config.cache_config.enable_prefix_caching = not recurrent
        groups = [KVCacheGroupSpec(list(names), layers["target"].get_kv_cache_spec(self.config))]
        groups += [KVCacheGroupSpec([name], layer.get_kv_cache_spec(self.config)) for name, layer in more.items()]
        num_blocks = MOST_BLOCKS if recurrent else NUM_BLOCKS
        self.config.cache_config.num_gpu_blocks = num_blocks
        self.kv_cache_config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self._asynchronous, self._grammars = asynchronous, Grammars(VOCAB // 2, drafts)
        kv_cache_utils.init_none_hash(_hashed)
        self._begin()

    def _begin(self) -> None:
        self.scheduler: Any = (AsyncScheduler if self._asynchronous else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=self._grammars,
            # The least that holds whole blocks of each group.
            block_size=max(group.kv_cache_spec.block_size for group in self.kv_cache_config.kv_cache_groups),
            hash_block_size=BLOCK,
            mm_registry=types.SimpleNamespace(supports_multimodal_inputs=lambda config: False),
        )
        # Steps whose output has not been seen.
        self._under_way: deque[tuple[Any, Any]] = deque()
        self.scheduled: Any = None
        self.executed: Any = None
        self.given: dict[str, Any] | None = None
        self.sampled: dict[str, list[int]] = {}

    def inputs(self) -> dict[str, Any]:
        """What the target is given in this step."""
        raise NotImplementedError

    def restart(self) -> None:
        """Have no requests, wherever they are."""
        self._begin()
        self.runner.execute_model_state = None
        for model in self.models:
            model.kv.zero_()
            model.window_kv.zero_()

    def zero_block_ids(self, blocks: Sequence[int]) -> None:
        """vLLM's `KVBlockZeroer`, which an engine with states has."""
        for model in self.models:
            model.kv[:-1].unflatten(0, (MOST_BLOCKS, BLOCK))[blocks] = 0

    def draft(self, count: int) -> None:
        """Have each step ask for so many drafts from now on."""
        self.scheduler.dynamic_sd_lookup = [count] * (1 + MAX_REQS)

    def add(self, name: str, prompt: Sequence[int], **params: Any) -> None:
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(ignore_eos=True, **params),
            pooling_params=None,
            block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, _hashed),
        )
        if request.structured_output_request is not None:
            request.structured_output_request.grammar = self._grammars
        self.scheduler.add_request(request)
        self.sampled[name] = []

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def preempt(self) -> None:
        """Take all requests out of the batch and their KV cache from them; they come back."""
        # Up to 0.26 vLLM then drops as many steps as tokens are under way, later steps too: it waits for them, as its
        # `pause_generation` does.
        if DROPS_STEPS:
            while self._under_way:
                self._update(*self._under_way.popleft())
        self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def step(self) -> None:
        """`EngineCore.step_with_batch_queue`, or `step` and `post_step`."""
        self.scheduled = self.executed = self.given = deferred = None
        if self.scheduler.has_requests():
            scheduled = self.scheduled = self.scheduler.schedule()
            output = self.runner.execute_model(scheduled)
            self.executed = self.runner.execute_model_state
            # Drafting writes where they are.
            self.given = None if self.executed is None else self.inputs()
            runs = scheduled.total_num_scheduled_tokens > 0
            if runs and scheduled.pending_structured_output_tokens:
                deferred = scheduled
            else:
                self._under_way.append((scheduled, self._sample(scheduled) if runs else output))
                waits = len(self._under_way) < self.config.max_concurrent_batches
                if waits and (runs or self.scheduler.has_requests()):
                    return
        if self._under_way:
            self._update(*self._under_way.popleft())
        if deferred is not None:
            drafts = self.runner.take_draft_token_ids()
            if drafts is not None:
                self.scheduler.update_draft_token_ids_in_output(drafts, deferred)
            self._under_way.append((deferred, self._sample(deferred)))

    def _sample(self, scheduled: Any) -> Any:
        return self.runner.sample_tokens(self.scheduler.get_grammar_bitmask(scheduled))

    def _update(self, scheduled: Any, output: Any) -> None:
        output = output.get_output() if hasattr(output, "get_output") else output
        for name, tokens in zip(output.req_ids, output.sampled_token_ids or (), strict=False):
            self.sampled[name].extend(tokens)
        self.scheduler.update_from_output(scheduled, output)
        if not self._asynchronous and scheduled.total_num_scheduled_tokens:
            drafts = self.runner.take_draft_token_ids()
            if drafts is not None:
                self.scheduler.update_draft_token_ids(drafts)


def _hashed(value: Any) -> bytes:
    return repr(value).encode()
