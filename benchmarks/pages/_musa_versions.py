# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/platforms.md: package versions that Moore Threads name together, and what ``doctor`` expects.

All of it was read in their publications (sources, requirements, guides); nothing was run on MUSA hardware.
"""

from __future__ import annotations

from typing import Final

from vllm_hwplugin.musa.versions import (
    MIN_MATE,
    MIN_MTML,
    MIN_TORCHADA,
    MIN_TRITON,
    PYTHON,
    TORCH_BY_VLLM,
    TORCH_MUSA,
)
from vllm_hwplugin.ops.compile.plan import MIN_TORCH

from ._text import head, row

_COLUMNS: Final = (
    "who names them",
    "torch and torch_musa",
    "vLLM",
    "Triton",
    "mate",
    "torchada",
    "mthreads-ml-py",
    "Python",
)
_STACKS: Final = (
    (
        "vllm-musa, branch 0.28.0-dev, requirements",
        "2.11.0.post2+musa5.2.0",
        "0.28.0, changed by patches",
        "3.2.0",
        "0.2.7",
        "0.1.95",
        "2.4.1 or later",
        "3.10",
    ),
    ("MUSA SDK 5.2.0, installation guide", "2.9.1", "", "3.2.0 or 3.6.0", "0.2.3", "", "", "3.10, 3.12"),
    ("torch_musa 2.7.1, source", "2.7.1", "", "3.1 or 3.2", "0.1.0 or later", "", "", ""),
    (
        "what `doctor` expects",
        f"as vLLM's; {MIN_TORCH} or later for the kernels",
        "as above",
        f"3.2.0, or {MIN_TRITON} or later",
        f"{MIN_MATE} or later",
        f"{MIN_TORCHADA} or later (read at 0.1.103)",
        f"{MIN_MTML} or later",
        PYTHON,
    ),
)


def markdown() -> str:
    """Return both tables."""
    lines = head(("vLLM", "torch that it requires", "torch_musa that it runs with"))
    lines += [
        row((str(vllm), torch, "none" if torch == "2.14" else TORCH_MUSA)) for vllm, torch in TORCH_BY_VLLM.items()
    ]
    return "\n".join([*lines, "", *head(_COLUMNS), *map(row, _STACKS)])
