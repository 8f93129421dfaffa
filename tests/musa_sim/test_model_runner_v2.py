# SPDX-License-Identifier: Apache-2.0
"""vLLM's Model Runner V2 on the simulated device, under a load: what features that change its steps are tested on.

On a Moore Threads host the plugin's platform class chooses V1. V2 runs here because the environment asks for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from vllm_hwplugin import bench

from . import loads
from .loads import Engine, Load, Process, Run

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

#: It sets tokens of a step and room for keys aside for its drafts.
DFLASH = Engine("dflash", drafts=7, more={"max_num_batched_tokens": 112, "num_gpu_blocks_override": 24})
ENGINES = {
    "none": Engine(None),
    "eagle3": Engine("eagle3"),
    "eagle3, eager": Engine("eagle3", graphs=None),
    "dflash": DFLASH,
}
GREEDY = [request.name for request in loads.mixed() if request.greedy and request.abort_at is None]
RANDOM = [request.name for request in loads.mixed() if not request.greedy]
ABORTED = {request.name for request in loads.mixed() if request.abort_at is not None}


@pytest.fixture(scope="module")
def runs(musa_host: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    if (device := bench.detect_host().device) != "cpu":
        pytest.skip(f"the texts are compared with those of vLLM on a CPU; it runs on {device} here")
    folder, requests = tmp_path_factory.mktemp("v2"), loads.mixed()

    def on_musa(*names: str) -> Process:
        asked = {name: Load(ENGINES[name].on_musa(), requests) for name in names}
        return Process(asked, loads.musa(folder / f"host of {names[0]}"))

    processes = {
        "one": on_musa("none", "eagle3"),
        "other": on_musa("eagle3, eager", "dflash"),
        "cpu": Process({"cpu": Load(Engine(None).on_cpu(), requests)}, loads.cpu()),
    }
    return {name: run for found in loads.side_by_side(processes, folder).values() for name, run in found.items()}


@pytest.mark.parametrize("name", ENGINES)
def test_greedy_texts_are_those_of_v1_on_the_cpu(name: str, runs: dict[str, Run]) -> None:
    assert (runs[name].runner, runs["cpu"].runner) == ("V2", "V1")
    assert runs[name].texts(GREEDY) == runs["cpu"].texts(GREEDY)


@pytest.mark.parametrize("name", ENGINES)
def test_the_load_is_what_it_is_for(name: str, runs: dict[str, Run]) -> None:
    run = runs[name]
    assert run.widths() == {1, 2, 3, 4, 5, 6}
    # Without drafts they need less room.
    assert run.preempted or name == "none"
    assert any(answer["cached"] for answer in run.answers.values())
    assert run.answers.keys() == {request.name for request in loads.mixed()} - ABORTED
    # One after its prompt, one in it, one that has been waiting.
    steps = [[bool(step["sampled"]) for step in run.of(name)] for name in sorted(ABORTED)]
    assert ([sum(one) > 1 for one in steps], [len(one) for one in steps][1:]) == ([True, False, False], [0, 1])
    assert {len(position) for answer in run.answers.values() for position in answer["logprobs"]} >= {3}


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "none"])
def test_drafts_are_accepted(name: str, runs: dict[str, Run]) -> None:
    run = runs[name]
    accepted = run.accepted()
    assert len(accepted) == ENGINES[name].drafts
    assert accepted == sorted(accepted, reverse=True)
    assert accepted[1] > 0
    assert len(run.steps) < len(runs["none"].steps)


@pytest.mark.parametrize("name", ENGINES)
def test_decodes_are_replayed_graphs(name: str, runs: dict[str, Run]) -> None:
    counts, graphs = runs[name].counts, ENGINES[name].graphs
    replays = counts["graph_replays"]
    assert (replays["target"] > counts["steps"] // 3) == (graphs is not None)
    if ENGINES[name].method is not None:
        assert (counts["draft_phases_in_graphs"] > counts["draft_phases"] // 2) == (graphs is not None)


def test_a_replay_is_what_was_captured(runs: dict[str, Run]) -> None:
    """Also for random requests, whose noise goes by their seeds and positions."""
    loads.assert_same(runs["eagle3, eager"], runs["eagle3"])
    assert RANDOM


def draft(run: dict[str, Any]) -> None:
    next(iter(run["steps"][7]["drafts"].values()))[1] += 1


def text(run: dict[str, Any]) -> None:
    run["answers"]["a"]["tokens"][3] += 1


def end(run: dict[str, Any]) -> None:
    run["steps"].pop()


@pytest.mark.parametrize("change", [draft, text, end])
def test_a_difference_is_seen(change: Callable[[dict[str, Any]], None], runs: dict[str, Run]) -> None:
    changed = dataclasses.asdict(runs["eagle3"])
    change(changed)
    with pytest.raises(AssertionError):
        loads.assert_same(runs["eagle3"], Run(**changed))
