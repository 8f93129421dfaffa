# SPDX-License-Identifier: Apache-2.0
"""vLLM's CUDA platform with hooks in the configuration and the choice of attention.

vLLM treats it as CUDA: ``_enum`` is inherited, so ``is_cuda()`` holds and ``is_out_of_tree()`` does not. A subclass
also works where vLLM uses the class: the global graph pool is an attribute of the current platform's class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms.cuda import CudaPlatform as _CudaPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig


class CudaPlatform(_CudaPlatform):  # type: ignore[misc]  # vLLM is not there where the types are checked
    """vLLM's CUDA platform (NVML or Jetson) with support for drafters and large heads."""

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        super().apply_config_platform_defaults(vllm_config)
        from ..spec_decode import capture_sizes

        capture_sizes.note_user_sizes(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        super().check_and_update_config(vllm_config)
        from .. import dflash
        from ..linear import compile_ranges
        from ..spec_decode import capture_sizes, draft_schedule
        from . import _flash_attn_version

        _flash_attn_version.check_and_update_config(vllm_config, cls.get_device_capability)
        dflash.check_and_update_config(vllm_config)
        unnamed = capture_sizes.check_and_update_config(vllm_config)
        draft_schedule.name_draft_counts(vllm_config, named=not unnamed)
        compile_ranges.check_and_update_config(vllm_config)

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        from . import _cuda_attention

        return _cuda_attention.choose(
            super().get_attn_backend_cls, selected_backend, attn_selector_config, num_heads, cls.get_device_capability()
        )
