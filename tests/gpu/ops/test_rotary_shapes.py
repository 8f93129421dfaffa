# SPDX-License-Identifier: Apache-2.0
"""The kernel on GPUs of NVIDIA and Moore Threads: bit for bit vLLM's RotaryEmbedding.forward_static, in graphs too."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.compile.spec import ROTARY_EMBEDDING  # noqa: E402
from vllm_hwplugin.ops.definitions import MUSA_KEY  # noqa: E402
from vllm_hwplugin.ops.rotary_embedding import rotary_embedding  # noqa: E402

from ...ops.rotary_shapes import DTYPES, MODES, SHAPES, Call  # noqa: E402
from .kernel_checks import load_kernel  # noqa: E402

REPLAYS = 32


@pytest.fixture(scope="module", params=["cuda", "musa"])
def device(request: pytest.FixtureRequest) -> str:
    module = getattr(torch, request.param, None)
    if module is None or not module.is_available():
        pytest.skip(f"no GPU of the type {request.param}")
    pytest.importorskip("vllm.model_executor.layers.rotary_embedding.base")
    load_kernel(ROTARY_EMBEDDING, {"cuda": "CUDA", "musa": MUSA_KEY}[request.param])
    return str(request.param)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_bit_for_bit_vllms_forward_static(shape: tuple[int, int, int, int, int], mode: str, device: str) -> None:
    for dtype, neox in itertools.product(DTYPES, [True, False]):
        Call(shape, dtype, neox, device, rotary_embedding).check(mode, REPLAYS)
