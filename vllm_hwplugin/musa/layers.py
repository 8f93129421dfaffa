# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton kernels for layers without one on an out-of-tree platform. Not run on MUSA hardware."""

from __future__ import annotations

import contextlib
import math
from typing import Any, ClassVar

import torch
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

from .self_test import find_wrong
from .self_test_checks import DOTS, SCALED

_triton: Any = backend_to_kernel_cls(UnquantizedMoeBackend.TRITON)
# A class up to 0.25, a list of classes later.
_EXPERTS: Any = _triton[0] if isinstance(_triton, list) else _triton


def _supports_current_device() -> bool:
    return find_wrong(*DOTS) is None


# vLLM's check demands CUDA, ROCm or XPU, but the kernel needs only Triton.
_EXPERTS._supports_current_device = staticmethod(_supports_current_device)


@UnquantizedFusedMoEMethod.register_oot
class MusaUnquantizedFusedMoEMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]  # no vLLM where types are checked
    """Unquantized experts on vLLM's ``TritonExperts``: vLLM has no kernel for an out-of-tree platform."""

    def __init__(self, moe: Any) -> None:
        """Choose the Triton kernel, or raise ValueError with vLLM's reason."""
        super().__init__(moe)
        if reason := find_wrong(*DOTS):
            raise ValueError(f"experts refused on MUSA: {reason}")
        served, reason = _EXPERTS.is_supported_config(_EXPERTS, moe, None, None, FusedMoEActivationFormat.Standard)
        if not served:
            raise ValueError(f"no kernel on MUSA for these unquantized experts: {_EXPERTS.__name__} refuses: {reason}")
        self.unquantized_backend, self.experts_cls = UnquantizedMoeBackend.TRITON, _EXPERTS


class _OnMusa:
    """Accept the device for a kernel whose check demands CUDA or ROCm but which needs only Triton or torch."""

    #: Of the self-test.
    checks: ClassVar[tuple[str, ...]] = DOTS

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        reason = find_wrong(*cls.checks)
        return reason is None, reason


class _ScaledMM(_OnMusa):
    """``torch._scaled_mm`` where it is right on this device, else a product of dequantized numbers."""

    checks = ()
    result_bits = 16

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)  # type: ignore[call-arg]
        divisible = all(size % 32 == 0 for size in config.weight_shape)
        self.trouble = find_wrong(SCALED[self.result_bits, divisible])

    def apply_scaled_mm(self, *, A: Any, As: Any, Bs: Any, output_shape: list[int], **more: Any) -> Any:
        if not self.trouble:
            return super().apply_scaled_mm(A=A, As=As, Bs=Bs, output_shape=output_shape, **more)  # type: ignore[misc]
        # Rows behind the batch are padding.
        rows = math.prod(output_shape[:-1])
        scale = As if As.numel() == 1 else As[:rows]
        # Scaled before the product, which float16 may not hold otherwise.
        left = (A[:rows].float() * scale.reshape(-1, 1)).to(more["out_dtype"])
        product = left @ (more["B"].float() * Bs.reshape(1, -1)).to(more["out_dtype"])
        return (product if more["bias"] is None else product + more["bias"]).view(*output_shape)


class MusaFp8TensorKernel(_ScaledMM, PerTensorTorchFP8ScaledMMLinearKernel):  # type: ignore[misc]
    """FP8 with one scale for weights and one for activations, by ``torch._scaled_mm``."""


class MusaFp8ChannelKernel(_ScaledMM, ChannelWiseTorchFP8ScaledMMLinearKernel):  # type: ignore[misc]
    """FP8 with a scale per output channel or token, applied to the float32 result of ``torch._scaled_mm``."""

    result_bits = 32


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
        if reason := find_wrong(*DOTS):
            return False, reason
        # vLLM checks the platform (ROCm, in every version) before the layer.
        current_platform.is_rocm = _supports_current_device
        try:
            return super().can_implement(c)  # type: ignore[no-any-return]
        finally:
            del current_platform.is_rocm

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        # GPTQ's checkpoints have zero points also where they are symmetric, and mean one more than they say.
        if self.config.weight_type.has_bias():
            self.w_zp_name = None
        super().process_weights_after_loading(layer)


# As vLLM does from 0.24 on; before, a platform without a capability counts as too old for FP8.
CompressedTensorsConfig._check_scheme_supported = staticmethod(
    lambda min_capability, error=True, match_exact=False: not match_exact
)

# GPTQ (from 0.22 on) and AWQ (0.24) ask the table of kernels, but vLLM checks before whether Marlin can serve the
# layer, and lets AWQ ask on some devices only.
with contextlib.suppress(ImportError):
    from vllm.model_executor.layers.quantization import auto_gptq

    auto_gptq.verify_marlin_supported = lambda **_: None
with contextlib.suppress(ImportError):
    from vllm.model_executor.layers.quantization import auto_awq

    auto_awq.verify_marlin_supported = lambda **_: None
    _get_quant_method = auto_awq.AutoAWQConfig.get_quant_method

    def _ask_the_table(self: Any, layer: torch.nn.Module, prefix: str) -> Any:
        method = _get_quant_method(self, layer, prefix)
        return auto_awq.AutoAWQMarlinLinearMethod(self) if type(method) is auto_awq.AutoAWQLinearMethod else method

    auto_awq.AutoAWQConfig.get_quant_method = _ask_the_table

linear.register_linear_kernel(MusaFp8TensorKernel, PlatformEnum.OOT, "fp8")
linear.register_linear_kernel(MusaFp8ChannelKernel, PlatformEnum.OOT, "fp8")
linear.register_linear_kernel(MusaInt8Kernel, PlatformEnum.OOT, "int8")
linear.register_linear_kernel(MusaW4A16Kernel, PlatformEnum.OOT, "mp")
# vLLM registers none for blocks.
linear._POSSIBLE_FP8_BLOCK_KERNELS.setdefault(PlatformEnum.OOT, []).append(MusaFp8BlockKernel)
