# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2 without speculation on the simulated device, stock and with graphs of inputs and sampling."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_hwplugin.base.features import gate_of
from vllm_hwplugin.base.gates import PLAIN_DECODE

from . import loads
from .loads import Engine, Load

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

GRAPHS = ("v2-step-inputs", "v2-tail-graph")
DEMANDED = loads.UNPATCHED | {gate_of(one): "on" for one in ("engine-report", "v2-graph-addresses", *GRAPHS)}
DEMANDED |= {PLAIN_DECODE: "on"}
#: Fewer blocks than with drafts, so that requests lose theirs.
LOAD = Load(
    Engine(None, more={"num_gpu_blocks_override": 15}).on_musa(),
    [*loads.mixed(), *loads.two_alone(top_k=20, top_p=0.9), *loads.rows_again(), *loads.asking_for_more()],
)


@pytest.mark.smoke
def test_graphs_without_a_drafter_change_nothing(musa_host: None, newest: tuple[str, Path], tmp_path: Path) -> None:
    expected, found = loads.compare_runs(LOAD, loads.UNPATCHED, DEMANDED, tmp_path, newest)
    assert expected.runner == "V2"
    assert expected.widths() == {1, 2, 3, 4, 5, 6}
    assert expected.preempted
    assert set(GRAPHS) <= set(found.used)
    assert found.counts["graph_replays"]["target"] == expected.counts["graph_replays"]["target"]
    sampling, inputs = found.counted["v2-tail-graph sampling"], found.counted["v2-step-inputs inputs"]
    assert sum(sampling.values()) == sum(inputs.values()) == found.counts["steps"]
    assert inputs["served"] > 3 * found.counts["graph_replays"]["target"] // 4
    assert sampling["served"] > found.counts["steps"] // 2
    asked = {"sampling_parameters", "structured_output"}
    assert sampling.keys() == asked | {"served"}
    assert inputs.keys() <= {"served", "prompt", "no_full_graph"}
    # Nothing drafts, so there is nothing to count, and nothing to say of it.
    assert "v2-tail-graph drafting" not in found.counted
    assert "draft" not in found.noted["v2-tail-graph"]
    # A graph makes attention metadata, too, or a note would say who does.
    assert "v2-step-inputs" not in found.noted
