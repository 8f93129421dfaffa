# SPDX-License-Identifier: Apache-2.0
"""Single kernels against their rivals: what ``bench attention`` and ``bench ops`` measure with.

What is measured and how often, and what the figures say, is decided without torch; only the child process (``_child``)
and what it imports needs a GPU.
"""

from . import _attention_cases as attention_cases
from . import _op_cases as op_cases
from ._figures import (
    ATTENTION_FIXED,
    ATTENTION_FLOPS,
    BY_LAUNCHES,
    BY_MEMORY,
    BY_PRODUCTS,
    FORMAT,
    bandwidth,
    find,
    left_out,
    make_results,
    op_ratio,
    roofline,
    summary,
)
from ._supervise import CRASHED, FAILED, MEASURED, Cell, outcome, supervise

__all__ = [
    "ATTENTION_FIXED",
    "ATTENTION_FLOPS",
    "BY_LAUNCHES",
    "BY_MEMORY",
    "BY_PRODUCTS",
    "CRASHED",
    "FAILED",
    "FORMAT",
    "MEASURED",
    "Cell",
    "attention_cases",
    "bandwidth",
    "find",
    "left_out",
    "make_results",
    "op_cases",
    "op_ratio",
    "outcome",
    "roofline",
    "summary",
    "supervise",
]
