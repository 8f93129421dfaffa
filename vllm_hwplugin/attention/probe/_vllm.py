# SPDX-License-Identifier: Apache-2.0
"""One attention layer of the installed vLLM, run as a model runner runs it. All that differs between versions is here.

The layer is vLLM's own ``Attention`` in a ``VllmConfig`` of its own, so that impl, cache spec and metadata builder get
what they get in an engine; the cache has the shape and the strides that the backend asks for. Written for 0.20.0 to
0.33.0 from their sources; executed on 0.32.0 on a CPU. Not run on a GPU.
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
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import utils as backend_utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from ._cases import BLOCK_SIZES, DTYPES, Case, Plain, Request, Trial
from ._inputs import Inputs, make_inputs, poison
from ._reference import Measure, measure
from ._verdict import Declared

_PREFIX = "model.layers.0.self_attn.attn"
_MAX_MODEL_LEN = 4096
_LONGEST_ON_GPU = 2000
#: Head sizes that some backend of every kind declares, tried in this order for the plain batch.
_PLAIN_HEAD_SIZES = (64, 128, 256, 512)


class NoPlainBatch(RuntimeError):
    """A backend declares no usual head size and dtype, so that nothing can be tried on it."""


def device() -> Any:
    """The device that the platform's workers use."""
    return torch.device(current_platform.device_type)


def usable() -> dict[str, type[Any]]:
    """The registered backends that the platform would choose for a decoder's attention, by name."""
    found = {}
    for member in AttentionBackendEnum:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            asked = AttentionSelectorConfig(head_size=128, dtype=dtype, kv_cache_dtype="auto", block_size=None)
            try:
                path = member.get_path()
                if current_platform.get_attn_backend_cls(member, asked) != path:
                    continue
                found[member.name] = member.get_class()
                break
            except (ImportError, ValueError, NotImplementedError):
                # Not registered, a package is missing, or the platform says no: not a backend of this host.
                continue
    return found


class LayerHost:
    """Runs cases through one backend class on this process's device.

    Args:
        backend: a subclass of vLLM's ``AttentionBackend``.

    Raises:
        NoPlainBatch: see there.
    """

    def __init__(self, backend: type[Any]) -> None:
        self.backend = backend
        self.device = device()
        self.plain = self._plain()

    def declared(self, trial: Trial, case: Case) -> Declared:
        """What the class says about a trial; ``case`` is one of the trial's."""
        if trial.capability in ("group", "softcap", "alibi"):
            return Declared.UNASKED
        if trial.capability == "block_size":
            return _yes(self._kernel_takes(case.block_size))
        if trial.capability == "padded_batch":
            with self._layer(case) as (layer, config):
                builder = self.backend.get_builder_cls()
                support = builder.get_cudagraph_support(config, layer.get_kv_cache_spec(config))
            return _yes(support.name != "NEVER")
        if case.sliding_window is not None and "has_sliding_window" not in self._questions:
            return Declared.UNASKED
        return _yes(not self._reasons(case))

    def run(self, case: Case) -> Measure:
        """Run a case and measure its answer.

        Raises:
            Exception: whatever the backend refuses the case with.
        """
        inputs = make_inputs(case, self.device)
        with self._layer(case, inputs) as (layer, config):
            spec = layer.get_kv_cache_spec(config)
            cache = self._cache(case, inputs, spec, config)
            builder = self.backend.get_builder_cls()(spec, [_PREFIX], config, self.device)
            if self.backend.forward_includes_kv_cache_update:
                raise NotImplementedError(
                    f"{self.backend.get_name()} writes the KV cache inside forward; the probe runs backends that have "
                    "do_kv_cache_update"
                )
            keys, values, slots = (torch.cat(tensors) for tensors in (inputs.keys, inputs.values, inputs.slots))
            layer.impl.do_kv_cache_update(layer, keys, values, cache, slots)
            metadata = builder.build(0, self._metadata(case, inputs))
            query, quantized = self._query(layer, inputs)
            output = torch.full_like(inputs.query, math.nan)
            new = [_last(tensors, case.requests) for tensors in (inputs.keys, inputs.values)]
            layer.impl.forward(layer, query, *new, cache, metadata, output=output)
            self.check()
        return measure(case, inputs, output, quantized_query=quantized)

    def check(self) -> None:
        """Wait for the device; a fault of a kernel that ran before is raised here, and not in some later case."""
        if self.device.type != "cpu":
            torch.zeros(1, device=self.device).add_(1).item()

    @functools.cached_property
    def _questions(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.backend.validate_configuration).parameters)

    def _reasons(self, case: Case) -> list[str]:
        asked = {
            "head_size": case.head_size,
            "dtype": getattr(torch, case.dtype),
            "kv_cache_dtype": case.kv_cache_dtype,
            "block_size": None,
            "use_mla": False,
            "has_sink": case.sinks,
            "use_sparse": False,
            "use_mm_prefix": False,
            "use_per_head_quant_scales": False,
            "device_capability": current_platform.get_device_capability(),
            "attn_type": "decoder",
            "has_sliding_window": case.sliding_window is not None,
            "use_non_causal": not case.causal,
        }
        known = {name: value for name, value in asked.items() if name in self._questions}
        return list(self.backend.validate_configuration(**known))

    def _kernel_takes(self, block_size: int) -> bool:
        sizes = self.backend.get_supported_kernel_block_sizes()
        bases = [(getattr(size, "base", size), hasattr(size, "base")) for size in sizes]
        return any(block_size % base == 0 if multiple else block_size == base for base, multiple in bases)

    def _plain(self) -> Plain:
        blocks = [size for size in BLOCK_SIZES if size >= 16 and self._kernel_takes(size)]
        longest = Plain.longest if self.device.type == "cpu" else _LONGEST_ON_GPU
        for dtype in ("bfloat16", *DTYPES):
            for head_size in _PLAIN_HEAD_SIZES:
                for block_size in blocks[:1]:
                    one = (Request(1, 1),)
                    if not self._reasons(Case(one, dtype, "auto", head_size, 1, 1, block_size)):
                        return Plain(dtype, head_size, block_size, longest)
        raise NoPlainBatch(
            f"{self.backend.__qualname__} declares no plain decoder attention: head size one of {_PLAIN_HEAD_SIZES}, "
            f"dtype one of {DTYPES}, blocks of one of {BLOCK_SIZES[1:]} tokens"
        )

    @contextlib.contextmanager
    def _layer(self, case: Case, inputs: Inputs | None = None) -> Iterator[tuple[Any, Any]]:
        """vLLM's layer in a configuration that is the current one meanwhile."""
        dtype = getattr(torch, case.dtype)
        config = _config(case)
        extra = {} if inputs is None or inputs.sinks is None else {"sinks": inputs.sinks}
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with set_current_vllm_config(config), torch.device(self.device):
                layer = Attention(
                    case.num_heads,
                    case.head_size,
                    1 / math.sqrt(case.head_size),
                    case.num_kv_heads,
                    alibi_slopes=list(inputs.alibi_slopes) if inputs is not None and inputs.alibi_slopes else None,
                    cache_config=config.cache_config,
                    logits_soft_cap=case.softcap,
                    per_layer_sliding_window=case.sliding_window,
                    prefix=_PREFIX,
                    attn_backend=self.backend,
                    **extra,
                )
                layer.process_weights_after_loading(dtype)
                yield layer, config
        finally:
            torch.set_default_dtype(before)

    def _cache(self, case: Case, inputs: Inputs, spec: Any, config: Any) -> Any:
        if hasattr(backend_utils, "get_supported_kv_cache_layouts"):
            layout = next(
                one for one in backend_utils.get_supported_kv_cache_layouts([self.backend]) if one.is_layer_compact
            )
            backend_utils.record_kv_cache_layout(config.cache_config, layout.name)
            size = torch.empty((), dtype=spec.dtype).element_size()
            shape = (inputs.num_blocks, spec.num_heads, case.block_size, spec.state_content_size_bytes // size)
            order = layout.layer_view_order
        else:
            required = getattr(self.backend, "get_required_kv_cache_layout", lambda: None)()
            if required is not None:
                backend_utils.set_kv_cache_layout(required)
            shape = self.backend.get_kv_cache_shape(
                inputs.num_blocks,
                case.block_size,
                case.num_kv_heads,
                case.head_size,
                cache_dtype_str=case.kv_cache_dtype,
            )
            try:
                order = self.backend.get_kv_cache_stride_order()
            except (AttributeError, NotImplementedError):
                order = tuple(range(len(shape)))
        memory = torch.empty([shape[axis] for axis in order], dtype=spec.dtype, device=self.device)
        cache = memory.permute([order.index(axis) for axis in range(len(shape))])
        poison(cache, case.seed)
        return cache

    def _metadata(self, case: Case, inputs: Inputs) -> Any:
        rows = [*case.requests, *[Request(0, 0)] * case.padding]
        ends = torch.tensor([0, *(request.query for request in rows)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        lengths = torch.tensor([request.total for request in rows], dtype=torch.int32)
        contexts = torch.tensor([request.context for request in rows], dtype=torch.int32)
        positions = torch.cat([torch.arange(request.context, request.total) for request in rows])
        given = {
            "query_start_loc": ends.to(self.device),
            "query_start_loc_cpu": ends,
            "seq_lens": lengths.to(self.device),
            "num_reqs": len(rows),
            "num_actual_tokens": case.num_tokens,
            "max_query_len": max(request.query for request in rows),
            "max_seq_len": max(request.total for request in rows),
            "block_table_tensor": inputs.block_table,
            "slot_mapping": _last(inputs.slots, case.requests),
            "causal": case.causal,
            "positions": positions.to(self.device),
            "seq_lens_cpu_upper_bound": lengths,
            "_seq_lens_cpu": lengths,
            "_num_computed_tokens_cpu": contexts,
        }
        known = {one.name for one in dataclasses.fields(CommonAttentionMetadata)}
        return CommonAttentionMetadata(**{name: value for name, value in given.items() if name in known})

    def _query(self, layer: Any, inputs: Inputs) -> tuple[Any, bool]:
        """The query as ``Attention.forward`` hands it on, and whether that rounded it."""
        if getattr(layer, "query_quant", None) is None or not layer.impl.supports_quant_query_input:
            return inputs.query, False
        rounded, _ = layer.query_quant(inputs.query.flatten(1), layer._q_scale)
        return rounded.view(inputs.query.shape), True


def _yes(answer: bool) -> Declared:
    return Declared.YES if answer else Declared.NO


def _last(tensors: tuple[Any, ...], requests: tuple[Request, ...]) -> Any:
    """Of each request its new tokens."""
    return torch.cat([tensor[request.context :] for tensor, request in zip(tensors, requests, strict=True)])


def _config(case: Case) -> Any:
    """A configuration whose model has one layer of the case's shape."""
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": case.num_heads * case.head_size,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": case.num_heads,
        "num_key_value_heads": case.num_kv_heads,
        "head_dim": case.head_size,
        "vocab_size": 128,
        "max_position_embeddings": _MAX_MODEL_LEN,
    }
    with tempfile.TemporaryDirectory(prefix="hwplugin-probe-") as folder:
        Path(folder, "config.json").write_text(json.dumps(described), encoding="utf-8")
        model = ModelConfig(
            model=folder,
            tokenizer=folder,
            skip_tokenizer_init=True,
            dtype=case.dtype,
            max_model_len=_MAX_MODEL_LEN,
            seed=0,
        )
        cache = CacheConfig(block_size=case.block_size, cache_dtype=case.kv_cache_dtype)
        config = VllmConfig(model_config=model, cache_config=cache)
    # The platform may have chosen another block size for a whole engine.
    config.cache_config.block_size = case.block_size
    if hasattr(config.attention_config, "use_non_causal"):
        config.attention_config.use_non_causal = not case.causal
    return config
