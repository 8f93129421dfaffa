# SPDX-License-Identifier: Apache-2.0
"""Build libraries from ``csrc``: ahead of time in setup.py, or at first use.

`flags`, `arch`, `spec` and `plan` are pure; `toolchain` asks a compiler for its version; `port` translates CUDA C++ to
MUSA's, in a copy; `jit` and `ahead` build. Only `torch_build` and `jit` import torch, and only when they are called.
"""
