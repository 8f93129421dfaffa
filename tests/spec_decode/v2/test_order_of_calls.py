# SPDX-License-Identifier: Apache-2.0
"""Graphs of a step's inputs and tail, beside vLLM without them, over the scheduler's own order of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

from ..walks import BEST, MORE, PLAIN, UNPATCHED, Sides, host_of_graphs, walk
from . import plain_triton
from .released_modules import ReleasedModules, jit
from .scheduled_runner import STAND_INS, Side, read_by_the_plugin

VERSION = "0.32.0"
#: All features but one that pads what stock vLLM does not (`test_mixed_graphs`).
ALIKE = {"VLLM_HWPLUGIN_V2_MIXED_GRAPHS": "off"}


@pytest.fixture(scope="module")
def sides(vllm_tree: Callable[[str], Any]) -> Iterator[Sides]:
    with host_of_graphs() as monkeypatch:
        kernels = {"language": plain_triton.LANGUAGE, "jit": partial(jit, make=plain_triton.Kernel)}
        stock, patched = (
            ReleasedModules(vllm_tree(VERSION), STAND_INS, **kernels, **choices) for choices in (UNPATCHED, ALIKE)
        )
        read_by_the_plugin(patched, monkeypatch)
        yield Sides(Side(stock), Side(patched))


def test_nothing_differs_whatever_happens_to_requests(sides: Sides) -> None:
    walk(sides, 3 * (PLAIN + BEST) + MORE)
    # The walks lead there: a step of this has three graphs more than vLLM's, whatever became of other requests. One
    # with a prompt, or with fewer drafts, has the graph that samples.
    assert sum(graphs > stock for stock, graphs in sides.replays) > 100
    tail, inputs = sides.both[1].runner.tail_graphs, sides.both[1].runner.step_inputs._step_counts.outcomes()
    sampling, drafting = tail._sampling.outcomes(), tail._drafting.outcomes()
    assert drafting["served"] == inputs["served"]
    assert sampling["served"] > inputs["served"]
