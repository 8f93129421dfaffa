# SPDX-License-Identifier: Apache-2.0
"""The schedule that FlashAttention 3 is asked for on behalf of a windowed DFlash draft.

What FlashAttention's own host code makes of it needs a GPU, and is not tested here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("triton")

from vllm_hwplugin.base.versions import SUPPORTED

from ..conftest import versions
from .draft_schedule import MAX_MODEL_LEN, OFF, WINDOW, Engine

WINDOWED = SUPPORTED[SUPPORTED.index("0.25.0") : SUPPORTED.index("0.30.0")]


def reaches(asked: dict[str, Any]) -> tuple[bool, bool]:
    """What FlashAttention 3 makes of a window to both sides: whether it is one for these sequences and queries."""
    left, right = asked["window_size"]
    return 0 <= left < asked["max_seqlen_k"] - 1, 0 <= right < asked["max_seqlen_q"] - 1


@pytest.mark.parametrize("version", versions("vllm/v1/attention/", among=WINDOWED))
def test_a_step_of_short_sequences_is_scheduled_as_its_graph_was(version: str, vllm_tree: Callable[[str], Any]) -> None:
    stock = Engine(vllm_tree(version), window=WINDOW, **OFF)
    # What the captured kernel was given, and the schedule that it reads in a step.
    stock.metadata(MAX_MODEL_LEN, capture=True)
    stock.metadata(WINDOW // 2)
    captured, replayed = stock.asked
    assert captured["window_size"] == replayed["window_size"] == (WINDOW - 1, WINDOW - 1)
    assert (reaches(captured), reaches(replayed)) == ((True, False), (False, False))

    patched = Engine(vllm_tree(version), window=WINDOW)
    assert patched.metadata(MAX_MODEL_LEN, capture=True).scheduler_metadata is None
    assert patched.metadata(WINDOW // 2).scheduler_metadata is None
    assert patched.asked == []
