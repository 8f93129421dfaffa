# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that the plugin reads: one table, one parser, one page of documentation.

``docs/gates.md`` is written from the table, ``doctor`` prints it, and :func:`register_with_vllm` tells vLLM about it.
Only the standard library is imported, because every vLLM process reads the gates before anything else of the plugin.
"""

from collections.abc import Iterable

from ._reader import Unknown, demands, read, read_all, register_with_vllm, show, source, unclaimed, unknown
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
    find,
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
    "Unknown",
    "Value",
    "demands",
    "feature_gate",
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


def markdown(of_features: Iterable[Gate]) -> str:
    """The text of ``docs/gates.md``.

    Args:
        of_features: the gates that the project's features declare.
    """
    from . import _page  # for who writes it or compares it, and no process of vLLM

    return _page.markdown(of_features)
