# SPDX-License-Identifier: Apache-2.0
"""The kernel on a GPU: bit for bit what its definition in torch computes there, which has the bits of vLLM's layers."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.rotary_embedding import rotary_embedding  # noqa: E402

from ...ops.operation_checks import same_bits  # noqa: E402
from ...ops.test_rotary_embedding import calls  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.sanitizer
def test_each_bit_is_the_definitions() -> None:
    reference: Any = rotary_embedding.__wrapped__  # type: ignore[attr-defined]
    for positions, query, key, *rest in calls("cuda"):
        expected = [None if tensor is None else tensor.clone() for tensor in (query, key)]
        reference(positions, *expected, *rest)
        rotary_embedding(positions, query, key, *rest)
        assert same_bits(query, expected[0])
        assert key is None or same_bits(key, expected[1])
