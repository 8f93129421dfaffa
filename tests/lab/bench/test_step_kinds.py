"""What a live load's steps are called, and to which of them time is counted."""

from __future__ import annotations

from types import SimpleNamespace as Bag

import pytest

from vllm_hwplugin.spec_decode.step_counts import Reason, StepCounts
from vllm_hwplugin_lab.bench import _step_kinds
from vllm_hwplugin_lab.bench._step_kinds import GRAPHS, StepKinds

K = 3
MODES = {name: Bag(name=name) for name in GRAPHS}


def step(tokens, *, new=(), drafts=None):
    """What vLLM's scheduler gives a runner; requests draft that have more than one token and are not ``new``."""
    found = {name: [-1] * (count - 1) for name, count in tokens.items() if name not in new and count > 1}
    return Bag(
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_new_reqs=list(new),
        scheduled_spec_decode_tokens=found if drafts is None else {name: [-1] * drafts[name] for name in drafts},
    )


class Runner:
    """Each function takes some seconds of ``clock``; ``graphs`` is V1's or V2's, which say the same in two ways."""

    def __init__(self, clock, graphs, *, ahead, drafts):
        speculation = Bag(num_speculative_tokens=drafts) if drafts else None
        config = {"speculative_config": speculation, "scheduler_config": Bag(async_scheduling=ahead)}
        self.vllm_config, self.clock = Bag(**config), clock
        self.paths = [StepCounts("a", "inputs"), StepCounts("a", "drafting")]
        if graphs == "V1":
            self.cudagraph_dispatcher = Bag(dispatch=lambda mode: (MODES[mode], None))
        else:
            self.cudagraph_manager = Bag(dispatch=lambda mode: Bag(cg_mode=MODES[mode]))

    def execute_model(self, scheduled, tensors=None, *, modes=(), outcomes=()):
        self.clock.now += 2
        for mode in modes:
            (getattr(self, "cudagraph_dispatcher", None) or self.cudagraph_manager).dispatch(mode)
        for path, reason in zip(self.paths, outcomes, strict=False):
            # A runner takes vLLM's way by the answer.
            assert path.missed(object() if reason is None else reason) is (reason is not None)
        return tensors

    def sample_tokens(self, grammar):
        self.clock.now += 3
        return grammar


@pytest.fixture
def run(monkeypatch):
    """`run(steps)`: a runner after them, each (scheduled, seconds until the next one, what it is asked with)."""
    for name in ("served", "missed"):
        monkeypatch.setattr(StepCounts, name, getattr(StepCounts, name))
    clock = Bag(now=100.0)
    monkeypatch.setattr(_step_kinds.time, "perf_counter", lambda: clock.now)

    def call(steps, graphs="V2", *, ahead=False, drafts=K):
        runner = Runner(clock, graphs, ahead=ahead, drafts=drafts)
        kinds = StepKinds(runner)
        for scheduled, later, *asked in steps:
            assert runner.execute_model(scheduled, "tensors", **(asked[0] if asked else {})) == "tensors"
            if scheduled.num_scheduled_tokens:
                assert runner.sample_tokens("grammar") == "grammar"
            clock.now += later
        return runner, kinds

    return call


END = (step({}), 1000)
DECODE = step({"a": 4, "b": 4})


def times_of(kinds):
    return {row["kind"]: (row["seconds"], row["host_seconds"]) for row in kinds.taken()}


def kinds_of(kinds):
    return {row["kind"]: row["steps"] for row in kinds.taken()}


def test_a_step_is_called_by_what_is_in_it(run):
    _, kinds = run(
        [
            (step({"a": 300, "b": 20}, new=("a", "b")), 1),
            (DECODE, 1),
            (DECODE, 1),
            (step({"a": 4, "b": 4, "c": 700}, new=("c",)), 1),
            (step({"a": 4, "b": 4, "c": 100}, drafts={"a": 3, "b": 3}), 1),  # the rest of c's prompt
            (step({"a": 4, "b": 4, "c": 4}), 1),
            (step({"b": 4, "c": 4}), 1),
            (step({"c": 4, "b": 4}), 1),  # the rows have changed places
            (step({"c": 2, "b": 4}), 1),
            (step({"c": 1, "b": 4}), 1),
            END,
        ]
    )
    assert kinds_of(kinds) == {"prompt": 3, "requests_changed": 4, "same_requests": 1, "fewer_drafts": 2}
    assert kinds.taken() == []


@pytest.mark.parametrize("graphs", ["V1", "V2"])
def test_the_targets_mode_is_the_first_of_a_step(run, graphs):
    asked = ["FULL"], ["PIECEWISE", "FULL"], []
    _, kinds = run([(DECODE, 1, {"modes": modes}) for modes in asked] + [END], graphs)
    assert [row["graph"] for row in kinds.taken()] == ["FULL", "PIECEWISE", "NONE"]


def test_what_the_plugins_paths_made_of_a_step_stands_beside_it(run):
    outcomes = [(None, None), (Reason.REQUESTS_CHANGED, None), (None, None), ()]
    runner, kinds = run([(DECODE, 1, {"outcomes": one}) for one in outcomes] + [END])
    found = {(row["kind"], *row["paths"].values()): row["steps"] for row in kinds.taken()}
    assert found == {
        ("requests_changed", "served", "served"): 1,
        ("same_requests", "requests_changed", "served"): 1,
        ("same_requests", "served", "served"): 1,
        ("same_requests",): 1,
    }
    # The plugin's own counts go on.
    assert [path.outcomes() for path in runner.paths] == [{"served": 2, "requests_changed": 1}, {"served": 3}]


def test_time_between_steps_is_counted_to_the_step_that_is_waited_for(run):
    steps = [(step({"a": 9}, new=("a",)), 10), (step({"a": 4}), 20), (step({"a": 4}), 40), END, END]
    _, kinds = run(steps)
    # Two seconds in execute_model and three in sample_tokens; nothing of what comes behind the last request.
    assert times_of(kinds) == {"prompt": (15, 5), "requests_changed": (25, 5), "same_requests": (45, 5)}
    _, kinds = run(steps, ahead=True)
    # The first step is followed by the second at once; behind that vLLM waits for the first.
    assert times_of(kinds) == {"prompt": (35, 5), "requests_changed": (45, 5), "same_requests": (5, 5)}
