# SPDX-License-Identifier: Apache-2.0
"""A CPU that has the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vllm_hwplugin.linear import layers, operations


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that has the kernels."""
    monkeypatch.setattr(layers, "ON_HOPPER", True)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """What the kernels were launched with, where the CPU has them."""
    found: list[tuple[Any, ...]] = []

    def skinny_linear(out: Any, x: Any, weight: Any, gated: bool, rows: int, depth: int, overlap: bool) -> None:
        assert (weight.shape[0] % rows, weight.shape[1] % depth, overlap) == (0, 0, True)
        found.append((tuple(x.shape), gated, (rows, depth)))
        product = x.float() @ weight.float().t()
        half = product.shape[1] // 2
        out.copy_(F.silu(product[:, :half]) * product[:, half:] if gated else product)

    def skinny_norm(out: Any, total: Any, x: Any, residual: Any, weight: Any, epsilon: float, overlap: bool) -> None:
        assert overlap
        found.append((tuple(x.shape),))
        added = x.float() if residual is None else x.float() + residual.float()
        if total is not None:
            total.copy_(added)
        out.copy_(F.rms_norm(added, (x.shape[1],), weight.float(), epsilon))

    library = torch.library.Library("hwplugin", "IMPL")
    for kernel in (skinny_linear, skinny_norm):
        library.impl(kernel.__name__, kernel, "CPU")
    monkeypatch.setattr(operations, "GPUS", ("cpu",))
    monkeypatch.setattr(operations, "_loaded", True)
    yield found
    library._destroy()
