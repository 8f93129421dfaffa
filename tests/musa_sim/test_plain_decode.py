# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2 without speculation on the simulated device, stock and with graphs of inputs and sampling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_hwplugin.base.features import gate_of
from vllm_hwplugin.base.gates import PLAIN_DECODE

from . import loads
from .loads import Engine, Load, Process, Run

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

GRAPHS = ("v2-step-inputs", "v2-tail-graph")
#: As they are by default, and with graphs demanded.
FEATURES = loads.UNPATCHED | {gate_of(one): "auto" for one in ("engine-report", "v2-graph-addresses", *GRAPHS)}
DEMANDED = FEATURES | {gate_of(one): "on" for one in GRAPHS} | {PLAIN_DECODE: "on"}
#: Fewer blocks than with drafts, so that requests lose theirs.
LOAD = Load(
    Engine(None, more={"num_gpu_blocks_override": 15}).on_musa(),
    [
        *loads.mixed(),
        *loads.two_alone(top_k=20, top_p=0.9),
        *loads.rows_again(),
        *loads.asking_for_more(),
    ],
)


def run(folder: Path, sides: dict[str, dict[str, str]], vllm: tuple[str, Path] | None = None) -> dict[str, Run]:
    processes = {
        side: Process({"plain": LOAD}, loads.musa(folder / f"host, {side}", vllm, **variables))
        for side, variables in sides.items()
    }
    return {side: found["plain"] for side, found in loads.side_by_side(processes, folder).items()}


@pytest.fixture(scope="module")
def runs(musa_host: None, newest: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    sides = {"stock": loads.UNPATCHED, "features": FEATURES, "graphs": DEMANDED}
    return run(tmp_path_factory.mktemp("plain"), sides, newest)


def assert_graphs_serve(expected: Run, found: Run) -> None:
    loads.assert_same(expected, found)
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


@pytest.mark.smoke
def test_graphs_without_a_drafter_change_nothing(runs: dict[str, Run]) -> None:
    assert_graphs_serve(runs["stock"], runs["graphs"])


def test_there_are_none_unless_they_are_asked_for(runs: dict[str, Run]) -> None:
    found = runs["features"]
    loads.assert_same(runs["stock"], found)
    assert found.unused == dict.fromkeys(GRAPHS, f"there is no speculative decoding, and {PLAIN_DECODE} is not set")
    replays = found.counts["graph_replays"]
    assert (replays["inputs"], replays["sampling"]) == (0, 0)


def test_the_load_is_what_it_is_for(runs: dict[str, Run]) -> None:
    expected = runs["stock"]
    assert expected.runner == "V2"
    assert expected.widths() == {1, 2, 3, 4, 5, 6}
    assert expected.preempted
    assert any(answer["cached"] for answer in expected.answers.values())
    assert expected.counts["graph_replays"]["target"] > expected.counts["steps"] // 2


@pytest.mark.parametrize("version", ["0.28.0", "0.26.0"])
def test_graphs_change_nothing_on_other_versions(
    version: str, released: Callable[[str], tuple[str, Path]], musa_host: None, tmp_path: Path
) -> None:
    found = run(tmp_path, {"stock": loads.UNPATCHED, "graphs": DEMANDED}, released(version))
    assert_graphs_serve(found["stock"], found["graphs"])
