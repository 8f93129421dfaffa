# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of single kernels and their rivals, for ``bench attention`` and ``bench ops``.

Only the child process (``_child``) and its imports need torch and a GPU.
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
