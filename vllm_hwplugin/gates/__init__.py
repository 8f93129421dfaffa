# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that the plugin reads: one table, one parser, one page of documentation.

``docs/gates.md`` is written from the table, ``doctor`` prints it, and :func:`register_with_vllm` tells vLLM about it.
Only the standard library is imported, because every vLLM process reads the gates before anything else of the plugin.
"""

from ._reader import Unknown, read, read_all, register_with_vllm, show, source, unclaimed, unknown
from .table import (
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
    catalogue_gate,
    find,
)

__all__ = [
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
    "Unknown",
    "Value",
    "catalogue_gate",
    "find",
    "markdown",
    "read",
    "read_all",
    "register_with_vllm",
    "show",
    "source",
    "unclaimed",
    "unknown",
]


def markdown() -> str:
    """The text of ``docs/gates.md``."""
    from . import _page  # for who writes it or compares it, and no process of vLLM

    return _page.markdown()
