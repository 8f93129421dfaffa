# SPDX-License-Identifier: Apache-2.0
"""The device that the stand-in takes tensors of. A test without a simulated one sets another type."""

TYPE = "musa"
# Of the MTT S5000.
COMPUTE_UNITS = 56
