# SPDX-License-Identifier: Apache-2.0
"""Moore Threads GPUs: the platform class, its worker and communicator, attention over mate, and what a host has.

Two things of MUSA are elsewhere, because CUDA's part of the same room calls them: ``ops/definitions.py``, operations
that a vLLM without kernels lacks, and ``ops/compile/port.py``, which makes CUDA C++ into what mcc compiles.
"""
