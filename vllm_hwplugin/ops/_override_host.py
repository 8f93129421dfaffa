# SPDX-License-Identifier: Apache-2.0
"""What a process knows of its vLLM, and of its GPUs before it starts one: PyTorch's kind, and what the driver names.

A process that forks others must not start CUDA, and vLLM loads plugins in it too. NVML, the library behind nvidia-smi,
answers without: vLLM's CUDA platform asks it for the same reason, through the copy of its binding that is used here.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any, Final

logger = logging.getLogger("vllm.hwplugin")

# Part of every supported vLLM. A `pynvml` outside it may be another distribution's, with other functions.
_BINDING: Final = "vllm.third_party.pynvml"


def is_cuda_host() -> bool:
    """Whether this PyTorch is a CUDA build, which asks nothing of a device."""
    return importlib.import_module("torch").version.cuda is not None


def is_musa_host() -> bool:
    """Whether torch's one backend from outside is torch_musa's, which also asks nothing of a device."""
    torch: Any = importlib.import_module("torch")
    return bool(torch._C._get_privateuse1_backend_name() == "musa")


def vllm_version() -> str | None:
    """Of the vLLM of this process, which is imported already where it has loaded the plugin; None without one."""
    try:
        return getattr(importlib.import_module("vllm"), "__version__", None)
    except ImportError:
        return None


def gpu_names() -> frozenset[str] | None:
    """The names of all GPUs that the driver shows, as PyTorch has them.

    CUDA_VISIBLE_DEVICES is not applied: vLLM and Ray set it for a process, or narrow it, after its parent has loaded
    plugins, and a forked child keeps what its parent registered. So there may be names here of GPUs that this process
    never uses, and one that it uses is missing only where PyTorch has another name for it than NVML: that of a MIG
    slice ends with its profile.

    Returns:
        None where NVML does not answer, as on Jetson and parts of WSL, or counts no GPU.
    """
    try:
        nvml: Any = importlib.import_module(_BINDING)
    except ImportError as error:
        logger.debug("the GPUs have no names before the first call: %s", error)
        return None
    try:
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            return frozenset(str(nvml.nvmlDeviceGetName(handle)) for handle in handles) or None
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        logger.debug("the GPUs have no names before the first call, because NVML says: %s", error)
        return None
