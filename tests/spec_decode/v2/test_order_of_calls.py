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


@pytest.fixture(scope="module")
def sides(vllm_tree: Callable[[str], Any]) -> Iterator[Sides]:
    with host_of_graphs() as monkeypatch:
        kernels = {"language": plain_triton.LANGUAGE, "jit": partial(jit, make=plain_triton.Kernel)}
        stock, patched = (
            ReleasedModules(vllm_tree(VERSION), STAND_INS, **kernels, **choices) for choices in (UNPATCHED, {})
        )
        read_by_the_plugin(patched, monkeypatch)
        yield Sides(Side(stock), Side(patched))


def test_nothing_differs_whatever_happens_to_requests(sides: Sides) -> None:
    walk(sides, 3 * (PLAIN + BEST) + MORE)
    # The walks lead there: a step of this has three graphs more than vLLM's. Whatever became of other requests, one
    # whose tail is in graphs has its inputs in one, too, unless it is to draft less.
    assert sum(graphs > stock for stock, graphs in sides.replays) > 100
    runner = sides.both[1].runner
    inputs, sampling = (one.outcomes() for one in (runner.step_inputs._step_counts, runner.tail_graphs._sampling))
    assert 0 <= sampling["served"] - inputs["served"] <= inputs["fewer_drafts"]
