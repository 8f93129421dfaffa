# SPDX-License-Identifier: Apache-2.0
"""A V1 step's inputs from those of the step before, on the simulated device under a load: nothing else comes of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_hwplugin.spec_decode.features import gate_of

from ..conftest import cannot_run
from . import loads, simulated
from .loads import Engine, Load, Process, Request, Run

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

FEATURE = "v1-step-inputs"
V1 = loads.UNPATCHED | {"VLLM_USE_V2_MODEL_RUNNER": "0"}
SIDES = {"stock": V1, "graphs": V1 | {gate_of("engine-report"): "auto", gate_of(FEATURE): "on"}}
#: The other half of the step in graphs, which hand over to this one what they leave on the device.
DRAFT_PHASE = ("draft-full-graph", "draft-loop-graph", "dflash-full-graph", "v1-draft-phase")
WHOLE = {"stock": V1, "graphs": SIDES["graphs"] | {gate_of(feature): "auto" for feature in DRAFT_PHASE}}


@dataclass(frozen=True)
class Case:
    """An engine that gets the load.

    Attributes:
        engine: with its drafter.
        asynchronous: whether the scheduler runs ahead of the device, where sampled tokens and drafts then stay.
    """

    engine: Engine
    asynchronous: bool = True

    def load(self) -> Load:
        return Load({**self.engine.on_musa(), "async_scheduling": self.asynchronous}, [*loads.mixed(), *two_alone()])

    def steady(self, run: Run) -> int:
        """Steps whose requests are those of the step before, each with all its drafts in both."""
        count, before = 0, None
        for step in run.steps:
            full = [1 + self.engine.drafts] * len(step["scheduled"])
            decodes = list(step["scheduled"].values()) == full and len(step["verified"]) == len(full)
            now = list(step["scheduled"]) if decodes else None
            count += now is not None and now == before
            before = now
        return count


def two_alone() -> list[Request]:
    """When the others are done, a greedy request and a random one that meanwhile need more blocks, both at a time."""
    texts = json.loads((loads.SMALL / "prompts.json").read_text())["prompt_ids"]
    return [
        Request("p", texts[3][:24], 100, {"temperature": 0.0, "max_tokens": 44}),
        Request("q", texts[7][:24], 100, {"temperature": 0.9, "seed": 5, "max_tokens": 44}),
    ]


EAGLE3 = Engine("eagle3")
#: Room for drafts, and no seeded prompt in pieces: vLLM then winds the request's generator back, which the simulated
#: device's cannot be.
DFLASH = Engine("dflash", drafts=7, more={"max_num_batched_tokens": 192, "num_gpu_blocks_override": 24})
CASES = {
    "eagle3": Case(EAGLE3),
    "eagle3, synchronous": Case(EAGLE3, asynchronous=False),
    "dflash": Case(DFLASH),
}
ON_OLDEST = {"eagle3": Case(EAGLE3), "dflash": Case(DFLASH, asynchronous=False)}


def run(
    cases: Mapping[str, Case],
    folder: Path,
    vllm: tuple[str, Path] | None = None,
    sides: Mapping[str, dict[str, str]] = SIDES,
    **variables: str,
) -> dict[str, tuple[Run, Run]]:
    """Each case's run with stock vLLM and with graphs."""
    processes = {
        side: Process(
            {name: case.load() for name, case in cases.items()},
            loads.musa(folder / f"host, {side}", vllm, **{**sides[side], **variables}),
        )
        for side in sides
    }
    runs = loads.side_by_side(processes, folder)
    return {name: (runs["stock"][name], runs["graphs"][name]) for name in cases}


@pytest.fixture(scope="module")
def runs(musa_host: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Run]]:
    return run(CASES, tmp_path_factory.mktemp("steps"))


@pytest.fixture(scope="module")
def oldest_runs(musa_host: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Run]]:
    """Where the target's attention metadata is made on the host in each step, too."""
    version = "0.20.2"
    try:
        vllm = version, simulated.released_vllm(version)
    except subprocess.CalledProcessError as error:
        cannot_run(f"vLLM {version} cannot be had: {error}")
    return run(ON_OLDEST, tmp_path_factory.mktemp("oldest"), vllm, MUSA_SIM_MATE_SCHEDULES="1")


def assert_graphs_serve(case: Case, stock: Run, graphs: Run) -> None:
    """Nothing differs, and a graph is replayed in each steady step and in no other."""
    assert (stock.runner, graphs.runner) == ("V1", "V1")
    loads.assert_same(stock, graphs)
    assert stock.accepted()[1] > 0
    assert stock.preempted
    assert FEATURE in graphs.used
    replayed = graphs.counts["graph_replays"]["inputs"]
    # Where the scheduler runs ahead, a last step is under way when all requests are done.
    assert replayed - case.steady(graphs) in ((0, 1) if case.asynchronous else (0,))
    assert graphs.counts["steps"] // 4 < replayed < graphs.counts["steps"]


@pytest.mark.parametrize("name", CASES)
def test_inputs_of_the_step_before_change_nothing(name: str, runs: dict[str, tuple[Run, Run]]) -> None:
    assert_graphs_serve(CASES[name], *runs[name])


@pytest.mark.network
@pytest.mark.parametrize("name", ON_OLDEST)
def test_nor_on_the_oldest_vllm(name: str, oldest_runs: dict[str, tuple[Run, Run]]) -> None:
    assert_graphs_serve(ON_OLDEST[name], *oldest_runs[name])


def test_a_whole_step_in_graphs_changes_nothing(musa_host: None, tmp_path: Path) -> None:
    (pair,) = run({"dflash": CASES["dflash"]}, tmp_path, sides=WHOLE).values()
    stock, graphs = pair
    loads.assert_same(stock, graphs)
    assert {FEATURE, "v1-draft-phase"} <= set(graphs.used)
