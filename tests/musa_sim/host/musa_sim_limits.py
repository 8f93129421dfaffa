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


def _doubt_scaled_mm(how):
    """``doubted``: refuse what torch_musa 2.7.1's source says of sizes and layouts. ``zeros``: as reported of `mm`."""
    original = torch._scaled_mm

    @functools.wraps(original)
    def scaled_mm(a, b, *args, out_dtype=None, **kwargs):
        if how == "doubted" and a.device.type == "musa":
            if not a.is_contiguous() or not b.t().is_contiguous():
                raise RuntimeError("_scaled_mm only works if mat1 is row-major and mat2 column-major")
            if any(size % 32 for size in (*a.shape, b.shape[1])):
                raise RuntimeError("_scaled_mm only works if sizes are divisible by 32")
        result = original(a, b, *args, out_dtype=out_dtype, **kwargs)
        return torch.zeros_like(result) if how == "zeros" and out_dtype == torch.float32 else result

    torch._scaled_mm = scaled_mm


def install():
    _compile_eagerly()
    if how := os.environ.get("MUSA_SIM_SCALED_MM"):
        _doubt_scaled_mm(how)
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
