# SPDX-License-Identifier: Apache-2.0
"""The device that the stand-in takes tensors of, and its version. A test without a simulated one sets others."""

import importlib.metadata

TYPE = "musa"
# Of the MTT S5000.
COMPUTE_UNITS = 56
# From 0.2.7 on attention takes float8_e4m3fn.
try:
    VERSION = tuple(map(int, importlib.metadata.version("mate").split(".")))
except importlib.metadata.PackageNotFoundError:
    VERSION = (0, 2, 2)
