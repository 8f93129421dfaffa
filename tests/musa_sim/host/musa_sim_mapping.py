# SPDX-License-Identifier: Apache-2.0
"""What Model Runner V2 needs and a vLLM for no device lacks: pinned memory under an address of the device.

vLLM has a kernel of ``vllm._C`` for it, on CUDA, ROCm and XPU alone. On a Moore Threads host the plugin's platform
class therefore chooses V1; here ``VLLM_USE_V2_MODEL_RUNNER=1`` gives vLLM the device's own mapping, so that V2's code
and graphs can be tested where there is no GPU.
"""

import importlib.abc
import importlib.util
import os
import sys

_NAME = "vllm.utils.torch_utils"


class _Mapping(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != _NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            from torch_musa._MUSAC import device as _sim

            load(module)
            module.get_accelerator_view_from_cpu_tensor = _sim.mapped

        spec.loader.exec_module = exec_module
        return spec


def install():
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        sys.meta_path.insert(0, _Mapping())
