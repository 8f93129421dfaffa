# SPDX-License-Identifier: Apache-2.0
"""Sampling and drafting of the V1 runner in two graphs, on the simulated device under a load."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_hwplugin.spec_decode.features import gate_of

from ..conftest import cannot_run
from . import loads, simulated
from .loads import Engine, Load, Process, Run

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

FEATURE = "v1-draft-phase"
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
#: What it is built on.
NEEDED = ("engine-report", "draft-full-graph", "draft-loop-graph", "dflash-full-graph")
SIDES = {
    "stock": loads.UNPATCHED | V1,
    "graphs": loads.UNPATCHED | V1 | {gate_of(feature): "auto" for feature in NEEDED} | {gate_of(FEATURE): "on"},
}

EAGLE3 = Engine("eagle3")
#: Room for drafts, and no seeded prompt in pieces: vLLM then winds the request's generator back, which the simulated
#: device's cannot be.
DFLASH = Engine("dflash", "FULL", drafts=7, more={"max_num_batched_tokens": 192, "num_gpu_blocks_override": 24})


@dataclass(frozen=True)
class Case:
    """An engine and its load.

    Attributes:
        asynchronous: whether the scheduler runs ahead of the device.
        drawn: whether drafts are drawn by temperature.
    """

    engine: Engine
    asynchronous: bool = True
    drawn: bool = False

    def load(self) -> Load:
        options = {**self.engine.on_musa(), "async_scheduling": self.asynchronous}
        if self.drawn:
            drawing = {"draft_sample_method": "probabilistic"}
            options["speculative_config"] = {**options["speculative_config"], **drawing}
        return Load(options, loads.by_temperature() if self.drawn else loads.mixed())


CASES = {
    "eagle3": Case(EAGLE3),
    "dflash": Case(DFLASH, asynchronous=False),
    "drawn drafts": Case(EAGLE3, drawn=True),
}
#: By version of vLLM. 0.22 to 0.24 cannot draw what a DFlash drafter drafts for several requests.
OTHERS = {
    "0.20.2": {"eagle3": Case(EAGLE3, asynchronous=False)},
    "0.26.0": {"drawn drafts": Case(DFLASH, drawn=True)},
}


def sides(cases: Mapping[str, Case], folder: Path, vllm: tuple[str, Path] | None = None) -> dict[str, dict[str, Run]]:
    """By side, and by case, what comes of it."""
    asked = {name: case.load() for name, case in cases.items()}
    return loads.side_by_side(
        {
            side: Process(asked, loads.musa(folder / f"host, {side}", vllm, **variables))
            for side, variables in SIDES.items()
        },
        folder,
    )


@pytest.fixture(scope="module")
def runs(musa_host: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Run]]:
    return sides(CASES, tmp_path_factory.mktemp("v1"))


def assert_graphs_serve(case: Case, expected: Run, found: Run) -> None:
    """Nothing differs, and the graphs are replayed in the steps in which all requests verify all drafts alone."""
    assert (expected.runner, found.runner) == ("V1", "V1")
    loads.assert_same(expected, found)
    assert expected.accepted()[1] > 0
    assert FEATURE in found.used
    full = 1 + case.engine.drafts
    served = sum(
        all(count == full for count in step["scheduled"].values()) and len(step["verified"]) == len(step["scheduled"])
        for step in found.steps
    )
    before, after = expected.counts, found.counts
    # Of a step that the scheduler has run ahead with, nothing may be wanted any more.
    unseen = after["steps"] - len(found.steps)
    # A step drafts as often, and the target's graphs are the same ones.
    for what in (lambda counts: counts["draft_phases"], lambda counts: counts["graph_replays"]["target"]):
        assert 0 <= what(after) - what(before) <= unseen
    assert 0 < served <= after["draft_phases_in_graphs"]
    assert 0 < after["graph_replays"]["sampling"] <= served + unseen < after["steps"]
    assert before["graph_replays"]["sampling"] == 0


@pytest.mark.parametrize("name", CASES)
def test_more_graphs_change_nothing(name: str, runs: dict[str, dict[str, Run]]) -> None:
    assert_graphs_serve(CASES[name], runs["stock"][name], runs["graphs"][name])


@pytest.mark.network
@pytest.mark.parametrize("version", OTHERS)
def test_nor_on_other_versions(version: str, musa_host: None, tmp_path: Path) -> None:
    try:
        tree = simulated.released_vllm(version)
    except subprocess.CalledProcessError as error:
        cannot_run(f"vLLM {version} cannot be had: {error}")
    found = sides(OTHERS[version], tmp_path, (version, tree))
    for name, case in OTHERS[version].items():
        assert_graphs_serve(case, found["stock"][name], found["graphs"][name])
