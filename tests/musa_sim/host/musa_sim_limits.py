# SPDX-License-Identifier: Apache-2.0
"""What vLLM finds on a MUSA host and the simulated one need not have: torchvision.

Where pip has only the build for CUDA, it cannot be imported beside torch's build for the CPU. vLLM 0.32 imports it
before it captures graphs, whatever the model is, to warm up kernels of multimodal models; so these two do nothing here.
"""

import importlib.util
import sys
import types

_WARM_UPS = ("minimax_m3_msa_warmup", "qwen_vl_triton_warmup")


def install():
    if importlib.util.find_spec("torchvision") is not None:
        return
    for name in _WARM_UPS:
        module = types.ModuleType(f"vllm.model_executor.warmup.{name}")
        setattr(module, name, lambda worker_or_runner: None)
        sys.modules[module.__name__] = module
