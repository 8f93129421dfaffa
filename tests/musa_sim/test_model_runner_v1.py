# SPDX-License-Identifier: Apache-2.0
"""Steps of Model Runner V1 in more graphs, on the simulated device under a load: nothing else comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from vllm_hwplugin.base.features import gate_of

from .. import releases
from . import loads
from .loads import Engine, Load, Process, Run
from .test_engines import V1

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

#: Sampling and drafting in two graphs, and a step's inputs from those of the step before.
PHASE, INPUTS = "v1-draft-phase", "v1-step-inputs"
#: What the first is built on.
NEEDED = ("draft-full-graph", "draft-loop-graph", "dflash-full-graph")
STOCK = loads.UNPATCHED | V1
GRAPHS = STOCK | {gate_of(one): "auto" for one in ("engine-report", *NEEDED)}
GRAPHS |= {gate_of(one): "on" for one in (PHASE, INPUTS)}


@dataclass(frozen=True)
class Case:
    """An engine that gets the load.

    Attributes:
        engine: with its drafter.
        asynchronous: whether the scheduler runs ahead of the device, where sampled tokens and drafts then stay.
        drawn: whether drafts are drawn by temperature.
        defaults: the model's own sampling parameters, which some requests ask for.
        calls: of methods that leave their own batch in the runner's buffers, while the same requests go on.
    """

    engine: Engine
    asynchronous: bool = True
    drawn: bool = False
    defaults: Mapping[str, float] = field(default_factory=dict)
    calls: tuple[tuple[int, str], ...] = ()

    def load(self) -> Load:
        options = {**self.engine.on_musa(), "async_scheduling": self.asynchronous}
        if self.defaults:
            options["override_generation_config"] = self.defaults
        if not self.drawn:
            return Load(options, [*loads.mixed(), *loads.two_alone(**self.defaults)], calls=self.calls)
        options["speculative_config"] = {**options["speculative_config"], "draft_sample_method": "probabilistic"}
        return Load(options, loads.by_temperature())

    def plain(self) -> set[str]:
        """Requests for which a graph can sample."""
        served = {"temperature", "seed", "max_tokens", *self.defaults}
        return {one.name for one in self.load().requests if one.params.keys() <= served}

    def full_steps(self, run: Run) -> list[list[str] | None]:
        """Of each step the requests, where all have all their drafts in it; else None."""
        return [
            list(step["scheduled"])
            if all(count == 1 + self.engine.drafts for count in step["scheduled"].values())
            and len(step["verified"]) == len(step["scheduled"])
            else None
            for step in run.steps
        ]

    def going_on(self, run: Run) -> Iterator[bool]:
        """Of each step, whether its inputs follow from the step before."""
        counts, before = set[int](), set[str]()
        for step, names in zip(run.steps, self.full_steps(run), strict=True):
            yield names is not None and len(names) in counts and before.issuperset(names)
            counts |= set() if names is None else {len(names)}
            before = set(step["scheduled"])


#: What a rank of data parallelism does while its requests are paused.
DUMMY = "execute_dummy_batch"
#: Those of `mixed` that filter do so by both.
FILTERS = {"top_k": 20, "top_p": 0.9}
#: A dummy batch is padded to two requests.
EAGLE3 = Engine("eagle3", graphs_of=(2, 4, 6))
#: Room for drafts, and no seeded prompt in pieces: vLLM then winds the request's generator back, which the simulated
#: device's cannot be.
DFLASH = Engine("dflash", drafts=7, more={"max_num_batched_tokens": 192, "num_gpu_blocks_override": 24})
CASES = {
    "eagle3": Case(EAGLE3, calls=((105, DUMMY),)),
    "eagle3, synchronous": Case(EAGLE3, asynchronous=False, defaults=FILTERS, calls=((104, DUMMY),)),
    "dflash": Case(DFLASH),
    "dflash, drawn drafts, FULL": Case(replace(DFLASH, graphs="FULL"), drawn=True),
}


def run(names: Sequence[str], folder: Path, vllm: tuple[str, Path]) -> Mapping[str, Mapping[str, Run]]:
    """Run these cases by stock vLLM, and in graphs."""
    asked = {name: CASES[name].load() for name in names}
    sides = {"stock": STOCK, "graphs": GRAPHS}
    processes = {side: Process(asked, loads.musa(folder / f"host, {side}", vllm, **sides[side])) for side in sides}
    return loads.side_by_side(processes, folder)


@pytest.mark.smoke
def test_all_graphs_change_nothing(musa_host: None, newest: tuple[str, Path], tmp_path: Path) -> None:
    assert_graphs_serve("dflash", run(["dflash"], tmp_path, newest))


def assert_graphs_serve(name: str, runs: Mapping[str, Mapping[str, Run]]) -> None:
    """Nothing differs but the graphs that are replayed.

    Those of the phase are replayed in the steps in which all requests verify all drafts alone, that of the inputs in
    such a step whose requests were in the step before, after another such step with as many; and none in other steps.
    """
    case, expected, found = CASES[name], runs["stock"][name], runs["graphs"][name]
    assert (expected.runner, found.runner) == ("V1", "V1")
    loads.assert_same(expected, found)
    assert expected.accepted()[1] > 0
    # The loads of drawn drafts fit.
    assert expected.preempted or case.drawn
    assert {PHASE, INPUTS} <= set(found.used)

    before, after = expected.counts, found.counts
    steps, replays = after["steps"], after["graph_replays"]
    # Of a step that the scheduler has run ahead with, nothing may be wanted any more.
    unseen = steps - len(found.steps)
    # A step drafts as often, and the target's graphs are the same ones.
    for what in (lambda counts: counts["draft_phases"], lambda counts: counts["graph_replays"]["target"]):
        assert 0 <= what(after) - what(before) <= unseen
    assert before["graph_replays"]["sampling"] == before["graph_replays"]["inputs"] == 0
    full = case.full_steps(found)
    served = sum(names is not None for names in full)
    assert 0 < served <= after["draft_phases_in_graphs"]
    assert 0 < replays["sampling"] <= served + unseen < steps
    sampling, drafting = (found.counted[f"{PHASE} {part}"] for part in ("sampling", "drafting"))
    assert (sum(sampling.values()), sampling["served"]) == (steps, replays["sampling"])
    assert sum(drafting.values()) == after["draft_phases"]
    assert 0 <= drafting["served"] - served <= unseen
    assert sampling["prompt"] > 0
    plain = sum(names is not None and case.plain().issuperset(names) for names in full)
    assert 0 <= sampling["served"] + sampling.get("requests_changed", 0) - plain <= unseen
    # The step after each call is vLLM's.
    going_on = sum(case.going_on(found)) - len(case.calls)
    # Where the scheduler runs ahead, a last step is under way when all requests are done.
    assert replays["inputs"] - going_on in ((0, 1) if case.asynchronous else (0,))
    assert steps // 4 < replays["inputs"] < steps
    inputs = found.counted[f"{INPUTS} inputs"]
    assert (sum(inputs.values()), inputs["served"]) == (steps, replays["inputs"])
    assert inputs["prompt"] > 0


@pytest.mark.parametrize(
    ("version", "name"),
    [
        # There the target's attention metadata is made on the host in each step, too.
        ("0.20.2", "eagle3"),
        (releases.NEWEST, "eagle3, synchronous"),
        # 0.22 to 0.24 cannot draw what a DFlash drafter drafts for several requests.
        ("0.26.0", "dflash, drawn drafts, FULL"),
    ],
)
def test_more_graphs_change_nothing(
    version: str, name: str, released: Callable[[str], tuple[str, Path]], musa_host: None, tmp_path: Path
) -> None:
    assert_graphs_serve(name, run([name], tmp_path, released(version)))
