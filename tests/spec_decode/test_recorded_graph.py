# SPDX-License-Identifier: Apache-2.0
"""The stand-in for a captured graph behaves as one, and the arithmetic of drafters' steps as vLLM's kernel."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode  # noqa: E402

from .drafters import plain_eagle_step  # noqa: E402

FULL, NONE = CUDAGraphMode.FULL, CUDAGraphMode.NONE


def test_step_arithmetic_is_that_of_vllms_cpu_kernel():
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("needs a vLLM built for CPU")
    current_platform.import_kernels()
    kernel = getattr(torch.ops._C, "eagle_step_slot_mapping_metadata_kernel_impl", None)
    if kernel is None:
        pytest.skip("this vLLM has no CPU kernel for the step")
    results = []
    for ours in (True, False):
        positions, seq_lens = torch.tensor([3, 62, 63]), torch.tensor([4, 63, 64], dtype=torch.int32)
        table = torch.arange(48, dtype=torch.int32).view(3, 16)
        slots = torch.zeros(5 if ours else 3, dtype=torch.int64)
        if ours:
            plain_eagle_step(positions, table, seq_lens, 4, 64, positions, slots, 5)
            assert slots[3:].tolist() == [-1, -1]
        else:
            kernel(positions, table, seq_lens, positions, slots, 4, 64, -1)
        results.append((positions.tolist(), seq_lens.tolist(), slots[:3].tolist()))
    assert results[0] == results[1]
