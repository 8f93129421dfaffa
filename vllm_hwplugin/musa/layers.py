# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton kernels for layers that have no kernel on an out-of-tree platform.

A worker imports this module before it loads a model. Not run on MUSA hardware.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.mixed_precision.triton_w4a16 import TritonW4A16LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import (
    ChannelWiseTorchFP8ScaledMMLinearKernel,
    PerTensorTorchFP8ScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.triton import (
    TritonFp8BlockScaledMMKernel,
    TritonInt8ScaledMMLinearKernel,
)
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend, backend_to_kernel_cls
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum

_triton: Any = backend_to_kernel_cls(UnquantizedMoeBackend.TRITON)
# A class up to 0.25, a list of classes later.
_EXPERTS: Any = _triton[0] if isinstance(_triton, list) else _triton


def _supports_current_device() -> bool:
    return True


# vLLM's check demands CUDA, ROCm or XPU, but the kernel needs only Triton.
_EXPERTS._supports_current_device = staticmethod(_supports_current_device)


@UnquantizedFusedMoEMethod.register_oot
class MusaUnquantizedFusedMoEMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]  # no vLLM where types are checked
    """Unquantized experts on vLLM's ``TritonExperts``: vLLM has no kernel for an out-of-tree platform."""

    def __init__(self, moe: Any) -> None:
        """Choose the Triton kernel for a layer.

        Args:
            moe: vLLM's ``FusedMoEConfig``.

        Raises:
            ValueError: The kernel does not support the layer, for example its activation; with vLLM's reason.
        """
        super().__init__(moe)
        served, reason = _EXPERTS.is_supported_config(_EXPERTS, moe, None, None, FusedMoEActivationFormat.Standard)
        if not served:
            raise ValueError(f"no kernel on MUSA for these unquantized experts: {_EXPERTS.__name__} refuses: {reason}")
        self.unquantized_backend, self.experts_cls = UnquantizedMoeBackend.TRITON, _EXPERTS


class _OnMusa:
    """Accept the device for a kernel whose check demands CUDA or ROCm but which needs only Triton or torch."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None


class MusaFp8TensorKernel(_OnMusa, PerTensorTorchFP8ScaledMMLinearKernel):  # type: ignore[misc]
    """FP8 with one scale for weights and one for activations, by ``torch._scaled_mm``."""


class MusaFp8ChannelKernel(_OnMusa, ChannelWiseTorchFP8ScaledMMLinearKernel):  # type: ignore[misc]
    """FP8 with a scale per output channel or token, applied to the float32 result of ``torch._scaled_mm``."""


class MusaFp8BlockKernel(_OnMusa, TritonFp8BlockScaledMMKernel):  # type: ignore[misc]
    """FP8 with a scale per block of weights, in Triton."""


class MusaInt8Kernel(_OnMusa, TritonInt8ScaledMMLinearKernel):  # type: ignore[misc]
    """INT8 weights and activations, in Triton."""

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        # The kernel rounds its zero-point correction to the type of the activations: infinite in float16.
        return c.input_symmetric, None if c.input_symmetric else "zero points of activations are not supported"


class MusaW4A16Kernel(TritonW4A16LinearKernel):  # type: ignore[misc]
    """4-bit weights in groups and 16-bit activations, in Triton."""

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        # vLLM checks the platform (ROCm, in every version) before the layer.
        current_platform.is_rocm = _supports_current_device
        try:
            return super().can_implement(c)  # type: ignore[no-any-return]
        finally:
            del current_platform.is_rocm


def _check_scheme_supported(min_capability: int, error: bool = True, match_exact: bool = False) -> bool:
    return not match_exact


# As vLLM does from 0.24 on; before, a platform without a capability counts as too old for FP8.
CompressedTensorsConfig._check_scheme_supported = staticmethod(_check_scheme_supported)

linear.register_linear_kernel(MusaFp8TensorKernel, PlatformEnum.OOT, "fp8")
linear.register_linear_kernel(MusaFp8ChannelKernel, PlatformEnum.OOT, "fp8")
linear.register_linear_kernel(MusaInt8Kernel, PlatformEnum.OOT, "int8")
linear.register_linear_kernel(MusaW4A16Kernel, PlatformEnum.OOT, "mp")
# vLLM registers none for blocks.
linear._POSSIBLE_FP8_BLOCK_KERNELS.setdefault(PlatformEnum.OOT, []).append(MusaFp8BlockKernel)
