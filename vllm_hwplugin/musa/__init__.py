# SPDX-License-Identifier: Apache-2.0
"""Moore Threads GPUs: platform class, worker, communicator, attention over mate, and host checks.

Two modules for MUSA are elsewhere, next to their callers for CUDA: ``ops/definitions.py`` defines operations that a
vLLM without kernels lacks, and ``ops/compile/port.py`` ports CUDA C++ to mcc.
"""
