# SPDX-License-Identifier: Apache-2.0
"""Graphs of a step's inputs and draft phase, beside vLLM without them, over the scheduler's own order of calls."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm.v1.worker.gpu_model_runner", exc_type=ImportError)

from vllm_hwplugin.base.features import gate_of

from .scheduled_runner import Side, modules_of, read_by_the_plugin
from .walks import BEST, MORE, PLAIN, UNPATCHED, Sides, host_of_graphs, walk

pytestmark = pytest.mark.each_vllm("v1-step-inputs")
#: Else, up to 0.26, a batch without requests writes into blocks that requests have left.
VACATED = {gate_of("backport-vacated-row"): "auto"}
#: Without seeds: after a piece of a seeded request's prompt vLLM winds its generator back, which the host's cannot be.
KINDS = [{name: value for name, value in kind.items() if name != "seed"} for kind in 4 * PLAIN + BEST + MORE]


@pytest.mark.parametrize(
    "how",
    [{}, {"asynchronous": False}, {"drawn": True}, {"recurrent": True}],
    ids=["asynchronous", "synchronous", "drawn drafts", "layers with a state"],
)
def test_nothing_differs_whatever_happens_to_requests(vllm_here: Any, how: dict[str, bool]) -> None:
    with host_of_graphs() as monkeypatch:
        stock, patched = (modules_of(vllm_here, monkeypatch, **choices) for choices in (UNPATCHED | VACATED, {}))
        read_by_the_plugin(patched, monkeypatch)
        sides = Sides(Side(stock, **how), Side(patched, **how))
        walks = walk(sides, KINDS, examples=25)
    # The walks lead there: inputs, sampling and drafting are graphs beside the target's.
    assert sum(graphs - stock == 3 for stock, graphs in sides.replays) > 2 * walks
