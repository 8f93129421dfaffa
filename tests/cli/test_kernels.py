# SPDX-License-Identifier: Apache-2.0
"""What ``doctor`` says of the kernels."""

from __future__ import annotations

import pytest

from vllm_hwplugin.cli._host import Tool
from vllm_hwplugin.cli._kernels import kernel_rows
from vllm_hwplugin.ops.compile.spec import KERNELS

TOOLS = (
    Tool("nvcc", "/opt/cuda/bin/nvcc", "13.0.88"),
    Tool("mcc", None, None),
    Tool("ninja", "/usr/bin/ninja", "1.13"),
)
WITHOUT_NVCC = (Tool("nvcc", None, None), *TOOLS[1:])
WITHOUT_NINJA = (*TOOLS[:2], Tool("ninja", None, None))


@pytest.mark.parametrize(
    ("kind", "tools", "words"),
    [
        ("cpu", TOOLS, "this host has no GPU for it, so"),
        ("cuda", TOOLS, "nvcc builds it at the operation's first use, and until then"),
        ("cuda", WITHOUT_NVCC, "nvcc not found (install it, or set CUDA_HOME), and without it"),
        ("cuda", WITHOUT_NINJA, "ninja not found (`pip install ninja`), and without it"),
        ("musa", TOOLS, "mcc not found (install it, or set MUSA_HOME), and without it"),
    ],
)
def test_a_kernel_without_a_library_says_what_is_missing_and_what_it_costs(
    kind: str, tools: tuple[Tool, ...], words: str
) -> None:
    rows = {row.kernel: row for row in kernel_rows(kind, (), tools)}
    assert set(rows) == set(KERNELS)
    row = rows["topk_softmax"]
    assert (row.state, row.detail) == ("not built", f"{words} {KERNELS['topk_softmax'].fallback_cost}")
    assert row.library is None
