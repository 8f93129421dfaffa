# SPDX-License-Identifier: Apache-2.0
"""Where the simulated host has less than the vLLM and the packages that are installed for the tests.

- ``vllm._C`` and the like: a vLLM for no device has no compiled kernels. ``MUSA_SIM_VLLM_KERNELS=1`` leaves those that
  are installed, which have a library for each kind of processor.
- torchvision: where pip has only the build for CUDA, it cannot be imported beside torch's build for the CPU. vLLM 0.32
  imports it before it captures graphs, whatever the model is, to warm up kernels of two multimodal models, which here
  does nothing.
- Inductor generates code for MUSA only with torch_musa's own backend; here ``torch.compile`` traces, and runs eagerly.
  With ``MUSA_SIM_INDUCTOR=refuse`` a function that is compiled by itself raises when it is called. vLLM's compilation
  of a model does not name Inductor to ``torch.compile``.
"""

import functools
import importlib.abc
import importlib.util
import os
import platform
import sys
import types

import torch

_KERNELS = ("vllm._C", "vllm._moe_C")
_WARM_UPS = ("minimax_m3_msa_warmup", "qwen_vl_triton_warmup")


class _WithoutKernels(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith(_KERNELS):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class _ForThisProcessor(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports for ``vllm._C`` the library that vLLM takes on this processor, which may lack that one's instructions."""

    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name == "vllm._C" else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        from vllm.platforms.cpu import CpuPlatform

        CpuPlatform.import_kernels()


def _compile_eagerly():
    original, refuses = torch.compile, os.environ.get("MUSA_SIM_INDUCTOR") == "refuse"

    def refuse(model):
        if model is None:
            return refuse

        @functools.wraps(model)
        def call(*_, **__):
            raise RuntimeError(f"Inductor compiles {model.__module__}.{model.__qualname__} after graphs exist")

        return call

    @functools.wraps(original)
    def compile(model=None, *, backend="inductor", mode=None, options=None, **kwargs):
        if backend == "inductor":
            return refuse(model) if refuses else original(model, backend="eager", **kwargs)
        return original(model, backend=backend, mode=mode, options=options, **kwargs)

    torch.compile = compile


def install():
    _compile_eagerly()
    if os.environ.get("MUSA_SIM_VLLM_KERNELS") != "1":
        sys.meta_path.insert(0, _WithoutKernels())
    elif platform.machine() == "x86_64" and not torch.cpu._is_avx512_bf16_supported():
        # Else that library is `vllm._C` itself.
        sys.meta_path.insert(0, _ForThisProcessor())
    if importlib.util.find_spec("torchvision") is None:
        for name in _WARM_UPS:
            module = types.ModuleType(f"vllm.model_executor.warmup.{name}")
            setattr(module, name, lambda worker_or_runner: None)
            sys.modules[module.__name__] = module
