# SPDX-License-Identifier: Apache-2.0
"""An attention layer of the installed vLLM, made as in an engine; has the differences between versions.

The layer is vLLM's ``Attention`` in its own ``VllmConfig``, so impl, cache spec and metadata builder get the same
arguments as in an engine; the cache has the backend's shape and strides. Written for 0.20.0 to 0.33.0 from their
sources; run on a GPU with 0.20.2, 0.24.0 and 0.26.0, and on a CPU with 0.32.0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from vllm.config import CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backends import utils as backend_utils
from vllm.version import __version__

from ._cases import Case
from ._refusals import Refused, refusals
from .inputs import Inputs
from .reference import Measure, measure

PREFIX = "model.layers.0.self_attn.attn"
MAX_MODEL_LEN = 16384


def device() -> Any:
    """Return the device of the platform's workers."""
    kind = current_platform.device_type
    # With its index, as in workers: tensors are on cuda:0, and vLLM compares devices.
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def measured(case: Case, inputs: Inputs, output: Any, quantized_query: bool) -> Measure:
    """Measure an output against the case's meaning in this vLLM.

    If the meaning is ambiguous, the better fit counts. A sliding window in non-causal attention reaches to both sides;
    in vLLM's FlashAttention before 0.24.0 only back.
    """
    if case.sliding_window is None or case.causal:
        return measure(case, inputs, output, quantized_query=quantized_query)
    both, back = (
        measure(dataclasses.replace(case, window_ahead=ahead), inputs, output, quantized_query=quantized_query)
        for ahead in (case.sliding_window - 1, 0)
    )
    if Version(__version__).release >= (0, 24):
        return both
    back = dataclasses.replace(back, note="the window looks back only")
    return min(both, back, key=lambda measure: measure.ratio)


@dataclass(frozen=True)
class Layer:
    """A layer of a backend with its KV cache, metadata builder and configuration."""

    backend: type[Any]
    config: Any
    layer: Any
    spec: Any
    builder: Any
    cache: Any

    def write(self, keys: Any, values: Any, slots: Any) -> None:
        """Write tokens into the cache."""
        if self.backend.forward_includes_kv_cache_update:
            raise NotImplementedError(
                f"{self.backend.get_name()} writes the KV cache inside forward; the probe runs backends that have "
                "do_kv_cache_update"
            )
        self.layer.impl.do_kv_cache_update(self.layer, keys, values, self.cache, slots)

    @property
    def rounds_query(self) -> bool:
        """Whether the layer converts the query to the cache's dtype."""
        return getattr(self.layer, "query_quant", None) is not None and self.layer.impl.supports_quant_query_input

    def forward(self, query: Any, keys: Any, values: Any, metadata: Any, output: Any) -> None:
        """Compute attention of new tokens, as ``Attention.forward`` does."""
        if self.rounds_query:
            rounded, _ = self.layer.query_quant(query.flatten(1), self.layer._q_scale)
            query = rounded.view(query.shape)
        self.layer.impl.forward(self.layer, query, keys, values, self.cache, metadata, output=output)


@contextlib.contextmanager
def configuration(backend: type[Any], case: Case) -> Iterator[Any]:
    """Make a one-layer model's configuration vLLM's current one."""
    shape = (case.num_heads, case.num_kv_heads, case.head_size)
    config = _config(backend.__qualname__, case.dtype, case.kv_cache_dtype, *shape)
    # The constructor accepts only sizes that users may choose, and the platform would change the size.
    config.cache_config.block_size = case.block_size
    if hasattr(config.attention_config, "use_non_causal"):
        config.attention_config.use_non_causal = not case.causal
    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config):
        yield config


@contextlib.contextmanager
def layer_of(
    backend: type[Any], case: Case, place: Any, inputs: Inputs | None = None, num_blocks: int = 1
) -> Iterator[Layer]:
    """Make a backend's layer on a device; its KV cache is uninitialized.

    Args:
        inputs: The source of sinks and ALiBi slopes; None: neither.

    Raises:
        Refused: The backend refuses the layer.
    """
    with configuration(backend, case) as config:
        with refusals():
            layer = _attention(backend, case, place, inputs, config)
            spec = dataclasses.replace(layer.get_kv_cache_spec(config), block_size=case.block_size)
            cache = _cache(backend, case, place, num_blocks, spec, config)
            builder = backend.get_builder_cls()(spec, [PREFIX], config, place)
        yield Layer(backend, config, layer, spec, builder, cache)


def _attention(backend: type[Any], case: Case, place: Any, inputs: Inputs | None, config: Any) -> Any:
    extra = {}
    if inputs is not None and inputs.sinks is not None:
        # The signature of __init__, because a class may have a __new__ that accepts everything.
        parameters = inspect.signature(backend.get_impl_cls().__init__).parameters.values()
        if not any(parameter.name == "sinks" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            raise Refused(f"{backend.get_impl_cls().__name__} takes no sinks")
        extra["sinks"] = inputs.sinks
    dtype, before = getattr(torch, case.dtype), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        # vLLM loads models in this context, and makes batches outside of it.
        with place:
            layer = Attention(
                case.num_heads,
                case.head_size,
                1 / math.sqrt(case.head_size),
                case.num_kv_heads,
                alibi_slopes=list(inputs.alibi_slopes) if inputs is not None and inputs.alibi_slopes else None,
                cache_config=config.cache_config,
                logits_soft_cap=case.softcap,
                per_layer_sliding_window=case.sliding_window,
                prefix=PREFIX,
                attn_backend=backend,
                **extra,
            )
            layer.process_weights_after_loading(dtype)
    finally:
        torch.set_default_dtype(before)
    return layer


def _cache(backend: type[Any], case: Case, place: Any, num_blocks: int, spec: Any, config: Any) -> Any:
    if hasattr(backend_utils, "get_supported_kv_cache_layouts"):
        layouts = backend_utils.get_supported_kv_cache_layouts([backend])
        layout = next(layout for layout in layouts if layout.is_layer_compact)
        backend_utils.record_kv_cache_layout(config.cache_config, layout.name)
        size = torch.empty((), dtype=spec.dtype).element_size()
        shape = (num_blocks, spec.num_heads, case.block_size, spec.state_content_size_bytes // size)
        order = layout.layer_view_order
    else:
        # Also without a required layout: an earlier backend of this process may have set one.
        required = getattr(backend, "get_required_kv_cache_layout", lambda: None)()
        backend_utils.set_kv_cache_layout(required)
        sizes = (num_blocks, case.block_size, case.num_kv_heads, case.head_size)
        shape = backend.get_kv_cache_shape(*sizes, cache_dtype_str=case.kv_cache_dtype)
        try:
            order = backend.get_kv_cache_stride_order()
        except (AttributeError, NotImplementedError):
            order = tuple(range(len(shape)))
    memory = torch.empty([shape[axis] for axis in order], dtype=spec.dtype, device=place)
    return memory.permute([order.index(axis) for axis in range(len(shape))])


@functools.cache
def _config(backend: str, dtype: str, kv_cache_dtype: str, num_heads: int, num_kv_heads: int, head_size: int) -> Any:
    # One per backend, because some backends modify it.
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": num_heads * head_size,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size,
        "vocab_size": 128,
        "max_position_embeddings": MAX_MODEL_LEN,
    }
    with tempfile.TemporaryDirectory(prefix="hwplugin-probe-") as folder:
        Path(folder, "config.json").write_text(json.dumps(described), encoding="utf-8")
        model = ModelConfig(
            model=folder,
            tokenizer=folder,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=MAX_MODEL_LEN,
            seed=0,
        )
        return VllmConfig(model_config=model, cache_config=CacheConfig(cache_dtype=kv_cache_dtype))
