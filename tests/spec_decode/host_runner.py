"""vLLM's own start of a drafter, as its V1 runner does it: `GPUModelRunner.initialize_kv_cache`, then capture.

The runner's methods are vLLM's text, with the hunks or without, and so are the drafter's, the attention groups and the
dispatchers. Only what needs a device or a checkpoint is left out: the KV cache itself, the input batch, and what an
attention metadata builder's constructor and `build_for_drafting` do.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionMetadataBuilder
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

#: What the runner's module calls the classes that it takes for a drafter.
PROPOSERS = ("EagleProposer", "DFlashProposer", "DraftModelProposer", "Gemma4Proposer")


BACKENDS = "vllm.v1.attention.backends"
FLASH_MLA = f"{BACKENDS}.mla.flashattn_mla.FlashAttnMLAMetadataBuilder"
FLASHINFER = f"{BACKENDS}.flashinfer.FlashInferMetadataBuilder"
FLEX = f"{BACKENDS}.flex_attention.FlexAttentionMetadataBuilder"


def builder(path: str) -> type:
    """vLLM's class, or one of its name where its module needs what this host lacks."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AssertionError):
        return type(name, (AttentionMetadataBuilder,), {"__module__": module, "build": lambda *_, **__: None})


def backend_of(builder_class: type, block_size: int, build: Callable[..., Any]) -> type:
    """A backend whose builders are of a subclass of `builder_class`, with `build` as what drafting calls.

    `build` is an attribute of the builder, not of its class: the class makes its metadata as `builder_class` does.
    """

    def construct(self: Any, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
        self.build_for_drafting = build

    body = {"__init__": construct, "_cudagraph_support": AttentionCGSupport.ALWAYS}
    builder = type(builder_class.__name__, (builder_class,), body)

    class Backend(FlashAttentionBackend):
        @staticmethod
        def get_builder_cls() -> type:
            return builder

        @staticmethod
        def get_supported_kernel_block_sizes(*_: Any) -> list[int]:
            return [block_size]

    return Backend


class Layer(AttentionLayerBase):
    """An attention layer of the drafter."""

    def __init__(self, backend: type) -> None:
        self.backend = backend

    def get_attn_backend(self) -> type:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        raise NotImplementedError


def make_host(module: types.ModuleType, proposer: Any, layer: str, **sizes: Any) -> Any:
    """A `GPUModelRunner` of `module` (vLLM's, or its patched text) around `proposer`.

    Args:
        layer: the name of the drafter's attention layer.
        sizes: `block_size`, `build` (what a builder does for drafting).
    """
    block_size, build = sizes["block_size"], sizes["build"]

    class Host(module.GPUModelRunner):
        def __init__(self) -> None:
            self.vllm_config, self.drafter = proposer.vllm_config, proposer
            self.compilation_config = self.vllm_config.compilation_config
            self.parallel_config = self.vllm_config.parallel_config
            self.speculative_config, self.device = proposer.speculative_config, proposer.device
            self.cudagraph_dispatcher = CudagraphDispatcher(self.vllm_config)
            self.uniform_decode_query_len = 1 + self.speculative_config.num_speculative_tokens
            self.max_num_reqs = self.vllm_config.scheduler_config.max_num_seqs
            self.attn_groups: list[Any] = []
            self.kv_sharing_fast_prefill_eligible_layers: set[str] = set()
            self.jit_warmup_registry = types.SimpleNamespace(activate=nullcontext)
            self.kv_tensors: list[torch.Tensor] = []
            self.use(FlashAttentionMetadataBuilder)

        def use(self, builder_class: type, kernel_block_size: int = block_size) -> None:
            """Give the draft layer an attention backend with builders of this class, and kernels for such blocks."""
            layers = self.compilation_config.static_forward_context
            layers[layer] = Layer(backend_of(builder_class, kernel_block_size, build))

        def may_add_encoder_only_layers_to_kv_cache_config(self) -> None: ...

        def maybe_add_kv_sharing_layers_to_kv_cache_groups(self, *_: Any) -> None: ...

        def may_reinitialize_input_batch(self, *_: Any) -> None: ...

        def initialize_kv_cache_tensors(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:
            self.kv_tensors = [torch.zeros(8)]
            return {}

        def start(
            self,
            mode: CUDAGraphMode,
            template: Any,
            *,
            profile: bool = False,
            kv_pool: AbstractContextManager | None = None,
        ) -> None:
            """Initialise the KV cache inside `kv_pool` and capture; with `profile` on a small cache before that."""
            from vllm_hwplugin.spec_decode.v1.draft_full_graph import capture_draft_graphs

            from .recorded_graph import RecordedGraphs

            self.compilation_config.cudagraph_mode = mode
            if profile:
                self.initialize_kv_cache(self.kv_cache_config_of(1), is_profiling=True)
                capture_draft_graphs(proposer, template, profiling=True)
                # Of the second graph that is measured, whose requests have no given lengths.
                capture_draft_graphs(proposer, template)
                # What `profile_cudagraph_memory` leaves: no graphs of the target or the drafter, no attention groups.
                for graphs in RecordedGraphs.instances:
                    graphs.clear_graphs()
                self.attn_groups.clear()
                self.cudagraph_dispatcher = CudagraphDispatcher(self.vllm_config)
            self.compilation_config.cudagraph_mode = mode
            with kv_pool or nullcontext():
                self.initialize_kv_cache(self.kv_cache_config_of(16))
            # The runner calls it in each capture of a FULL graph of the target, and only there.
            if self.compilation_config.cudagraph_mode.has_full_cudagraphs():
                capture_draft_graphs(proposer, template)

        def kv_cache_config_of(self, num_blocks: int) -> KVCacheConfig:
            spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
            groups = [KVCacheGroupSpec([layer], kv_cache_spec=spec)]
            return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)

    return Host()


class Pool(TorchDispatchMode):
    """vLLM's `kv_cache` memory pool: holds what is allocated inside it, and loses its contents in sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)}
        for one in tree_leaves(result):
            if torch.is_tensor(one) and one.untyped_storage().data_ptr() not in known:
                self.held[one.untyped_storage().data_ptr()] = one
        return result

    def sleep(self) -> None:
        assert self.held, "the KV cache at least is allocated here"
        for one in self.held.values():
            one.view(torch.uint8).fill_(0xA5)
