# SPDX-License-Identifier: Apache-2.0
"""What vLLM 0.20 to 0.33 do differently where the MUSA platform meets them: in one place, each with its versions."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

logger = logging.getLogger("vllm.hwplugin")

# Up to 0.23 the kernels are `_C` and `_moe_C`; later ones are built on torch's stable interface. A build for MUSA may
# have any of them.
_KERNELS: Final = ("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C", "vllm._moe_C_stable_libtorch")

# Switches of vLLM's PassConfig that fuse operations of vllm._C, which a MUSA host does not have. Later versions add
# fusions under the same prefix.
_FUSION_PREFIX: Final = "fuse_"
_FUSIONS: Final = ("enable_sp", "enable_qk_norm_rope_fusion")


def import_kernels() -> tuple[str, ...]:
    """Import what this build of vLLM has of its compiled kernels, and say what."""
    found = []
    for name in _KERNELS:
        try:
            importlib.import_module(name)
        except ImportError as error:
            # Absent, or built for CUDA: vLLM then runs its native implementations.
            logger.debug("no %s on this host: %s", name, error)
        else:
            found.append(name)
    return tuple(found)


def switch_off_fusions(pass_config: Any) -> tuple[str, ...]:
    """Switch off the passes that fuse into kernels of ``vllm._C``, and return the names of those that were on."""
    on = tuple(
        name
        for name in vars(pass_config)
        if (name.startswith(_FUSION_PREFIX) or name in _FUSIONS) and getattr(pass_config, name) is True
    )
    for name in on:
        setattr(pass_config, name, False)
    return on


@contextmanager
def taken_for_cuda(device_config: Any, cuda: Any, musa: Any) -> Iterator[None]:
    """Let vLLM's GPU worker start its device: it does so only where the configuration says ``cuda``.

    That is the test in all versions; what follows it is the same for any device that answers to ``torch.cuda``, as MUSA
    does through torchada. 0.20 to 0.23 also count devices only where ``torch.cuda.is_available()``, which torchada
    leaves False.

    Args:
        device_config: vLLM's ``DeviceConfig``.
        cuda: ``torch.cuda``, as torchada has left it.
        musa: ``torch.musa``.
    """
    device_type, is_available = device_config.device_type, cuda.is_available
    device_config.device_type = "cuda"
    cuda.is_available = musa.is_available
    try:
        yield
    finally:
        device_config.device_type = device_type
        cuda.is_available = is_available
