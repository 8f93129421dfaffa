# SPDX-License-Identifier: Apache-2.0
"""The pages made from ``benchmarks/results``: ``python -m benchmarks.pages`` (``make docs``) writes them.

README.md, docs/benchmarks.md and docs/kernel-benchmarks.md answer users' questions; the long tables next to the results
files have every figure.
"""

from ._host_time import parts_us
from ._judged import goals, verdicts
from ._pages import RESULTS, ROOT, drawings, outdated, pages, write
from ._read import ResultsError, read_all
