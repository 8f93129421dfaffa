# SPDX-License-Identifier: Apache-2.0
"""vLLM's CUDA platform with two more steps in the making of a configuration.

It stays CUDA for every test that vLLM makes: ``_enum`` is inherited, so ``is_cuda()`` holds and ``is_out_of_tree()``
does not. Where vLLM reads the class itself a subclass is as good: the global graph pool is kept on the class of the
current platform, and two messages name it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms.cuda import CudaPlatform as _CudaPlatform

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CudaPlatform(_CudaPlatform):  # type: ignore[misc]  # vLLM is not there where the types are checked
    """vLLM's CUDA platform (with NVML, or without it on Jetson) that also looks after DFlash's configuration."""

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        super().apply_config_platform_defaults(vllm_config)
        from . import dflash

        dflash.note_user_sizes(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        super().check_and_update_config(vllm_config)
        from . import dflash

        dflash.check_and_update_config(vllm_config)
