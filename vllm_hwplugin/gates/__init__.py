# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that the plugin reads: one table, one parser, one page of documentation.

docs/gates.md shows the table, ``doctor`` prints it, and :func:`register_with_vllm` tells vLLM about it.
Only the standard library is imported, because every vLLM process reads the gates before anything else of the plugin.
"""

from ._reader import demands, read, read_all, register_with_vllm, show, unclaimed, unknown
from .table import (
    BY_NAME,
    CATALOGUE_PREFIX,
    COMPILE_KEY,
    FINGERPRINT,
    GATES,
    PREFIX,
    STRICT,
    Alias,
    Gate,
    GateError,
    GateValue,
    Value,
    feature_gate,
)

__all__ = [
    "BY_NAME",
    "CATALOGUE_PREFIX",
    "COMPILE_KEY",
    "FINGERPRINT",
    "GATES",
    "PREFIX",
    "STRICT",
    "Alias",
    "Gate",
    "GateError",
    "GateValue",
    "Value",
    "demands",
    "feature_gate",
    "read",
    "read_all",
    "register_with_vllm",
    "show",
    "unclaimed",
    "unknown",
]
