# SPDX-License-Identifier: Apache-2.0
"""The pages that are made of ``benchmarks/results``: ``python -m benchmarks.pages`` (``make docs``) writes them.

What a user asks is answered in README.md, docs/benchmarks.md and docs/kernel-benchmarks.md; every figure stands in the
long tables beside the results files.
"""

from ._decode_misses import misses
from ._gains import Gain, gains
from ._goals import OPS_BYTES, Goal, goals
from ._host_time import PARTS, parts_us
from ._pages import RESULTS, ROOT, outdated, pages, write
from ._read import Found, ResultsError, read_all
from ._verdict import MARGIN, Verdict, verdicts

__all__ = [
    "MARGIN",
    "OPS_BYTES",
    "PARTS",
    "RESULTS",
    "ROOT",
    "Found",
    "Gain",
    "Goal",
    "ResultsError",
    "Verdict",
    "gains",
    "goals",
    "misses",
    "outdated",
    "pages",
    "parts_us",
    "read_all",
    "verdicts",
    "write",
]
