# SPDX-License-Identifier: Apache-2.0
"""What is looked at of vLLM's configuration, where its classes have it, and as they have it by default."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.config import CacheConfig, CompilationConfig, CompilationMode, ModelConfig, ParallelConfig

_PARALLEL = (
    "use_ubatching",
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "prefill_context_parallel_size",
)


def config(**changed: Any) -> SimpleNamespace:
    """A `VllmConfig` with these attributes changed, each in its own part."""
    parallel = ParallelConfig()
    parts = {
        "parallel_config": (ParallelConfig, {name: getattr(parallel, name) for name in _PARALLEL}),
        "model_config": (
            ModelConfig,
            {
                "disable_cascade_attn": ModelConfig.__dataclass_fields__["disable_cascade_attn"].default,
                "is_encoder_decoder": False,
            },
        ),
        "compilation_config": (
            CompilationConfig,
            {"mode": CompilationMode.VLLM_COMPILE, "static_forward_context": {}},
        ),
        "cache_config": (CacheConfig, {"cache_dtype": "auto"}),
    }
    made = {"speculative_config": SimpleNamespace(num_speculative_tokens=3), "kv_transfer_config": None}
    left = dict(changed)
    for part, (cls, defaults) in parts.items():
        assert all(hasattr(cls, name) or name in cls.__dataclass_fields__ for name in defaults)
        made[part] = SimpleNamespace(**{name: left.pop(name, value) for name, value in defaults.items()})
    made |= {name: left.pop(name) for name in made.keys() & left.keys()}
    assert not left, f"no part of the configuration has {sorted(left)}"
    return SimpleNamespace(**made)
