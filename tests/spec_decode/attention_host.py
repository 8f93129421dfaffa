# SPDX-License-Identifier: Apache-2.0
"""A host's attention backends and an engine's configuration, as far as the choice of a backend looks at them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Declared:
    """A backend by what it declares."""

    name: str
    non_causal: bool = False
    mm_prefix: bool = False

    def supports_non_causal(self) -> bool:
        return self.non_causal

    def get_required_kv_cache_layout(self) -> None:
        return None

    def validate_configuration(self, *, device_capability: Any, use_non_causal: bool, use_mm_prefix: bool, **_: Any):
        reasons = []
        if use_mm_prefix and not self.mm_prefix:
            reasons.append("partial multimodal token full attention not supported")
        if use_non_causal and not self.non_causal:
            reasons.append("non-causal attention not supported")
        return reasons


# Where the released ones are: file of vllm/v1/attention/backends, class.
BACKEND_CLASSES = {
    "FLASH_ATTN": ("flash_attn.py", "FlashAttentionBackend"),
    "FLEX_ATTENTION": ("flex_attention.py", "FlexAttentionBackend"),
    "TRITON_ATTN": ("triton_attn.py", "TritonAttentionBackend"),
    "FLASHINFER": ("flashinfer.py", "FlashInferBackend"),
}

# As released in 0.20 to 0.23; a test compares them.
DECLARED = {
    "FLASH_ATTN": Declared("FLASH_ATTN", non_causal=True),
    "FLASHINFER": Declared("FLASHINFER"),
    "TRITON_ATTN": Declared("TRITON_ATTN", mm_prefix=True),
    "FLEX_ATTENTION": Declared("FLEX_ATTENTION", non_causal=True, mm_prefix=True),
}


class Backend(enum.Enum):
    """Stands in for `AttentionBackendEnum`."""

    FLASH_ATTN = "FLASH_ATTN"
    FLASHINFER = "FLASHINFER"
    TRITON_ATTN = "TRITON_ATTN"
    FLEX_ATTENTION = "FLEX_ATTENTION"

    def get_class(self) -> Declared:
        return DECLARED[self.value]

    def get_path(self) -> str:
        return self.value


@dataclasses.dataclass
class AttentionConfig:
    backend: Backend | None = None
    flash_attn_version: int = 3


@dataclasses.dataclass
class NewAttentionConfig(AttentionConfig):
    use_non_causal: bool = False


@dataclasses.dataclass(frozen=True)
class Architecture:
    is_mm_prefix_lm: bool = False


@dataclasses.dataclass
class ModelConfig:
    model_arch_config: Architecture = dataclasses.field(default_factory=Architecture)


@dataclasses.dataclass
class KernelConfig:
    moe_backend: str = "auto"


@dataclasses.dataclass
class Speculative:
    method: str = "dflash"
    moe_backend: str | None = None
    attention_backend: Backend | None = None
    kv_cache_dtype: str | None = None
    draft_model_config: Any = "draft model"
    draft_load_config: Any = None


@dataclasses.dataclass
class Config:
    attention_config: AttentionConfig
    speculative_config: Speculative = dataclasses.field(default_factory=Speculative)
    model_config: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    kernel_config: KernelConfig = dataclasses.field(default_factory=KernelConfig)
    cache_config: Any = None
    kv_transfer_config: Any = None
    compilation_config: Any = dataclasses.field(default_factory=dict)


class Host:
    device_name = "a GPU"

    @classmethod
    def get_device_capability(cls) -> tuple[int, int]:
        return (9, 0)


class Silent:
    """A logger."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def old(named: Backend | None = None, **more: Any) -> Config:
    return Config(AttentionConfig(named), **more)


def new(named: Backend | None = None, **more: Any) -> Config:
    return Config(NewAttentionConfig(named), **more)


def seen_both_ways() -> ModelConfig:
    return ModelConfig(Architecture(is_mm_prefix_lm=True))
