# SPDX-License-Identifier: Apache-2.0
"""Triton's backend on the simulated device: it is found and active, and kernels run in Triton's interpreter."""
