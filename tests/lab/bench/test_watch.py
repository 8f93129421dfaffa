from __future__ import annotations

from types import SimpleNamespace as Bag

import pytest

from vllm_hwplugin_lab.bench._watch import watched


class Graph:
    def replay(self):
        return "replayed"


class Drafter:
    def __init__(self, graph):
        self.graph = graph

    def propose(self, fail=False):
        if fail:
            raise RuntimeError("no drafts")
        return self.graph and self.graph.replay()


class Runner:
    """The parts of vLLM's model runner that are counted at: a target graph a step, then the draft phase."""

    def __init__(self, draft_graph):
        self.drafter = Drafter(draft_graph)

    def execute_model(self, scheduler_output, tensors=None, *, fail=False):
        if scheduler_output.num_scheduled_tokens:
            Graph().replay()
            self.drafter.propose(fail)
        return tensors


def output(size, new=0):
    return Bag(num_scheduled_tokens={str(i): 4 for i in range(size)}, scheduled_new_reqs=["n"] * new)


def test_steps_are_counted_by_what_is_in_them():
    runner = Runner(Graph())
    with watched(runner, Graph) as counts:
        for step in (output(1, 1), output(3, 2), output(3), output(0), output(2)):
            assert runner.execute_model(step, "tensors") == "tensors"
    assert counts.facts() == {
        "steps": 4,
        "batch_sizes": {"1": 1, "2": 1, "3": 2},
        "mixed_steps": 1,
        "draft_phases": 4,
        "draft_phases_in_graphs": 4,
        "graph_replays": {"inputs": 0, "target": 4, "sampling": 0, "draft": 4},
    }


def test_a_draft_phase_without_a_graph_shows():
    runner = Runner(None)
    with watched(runner, Graph) as counts:
        runner.execute_model(output(2))
    assert (counts.draft_phases, counts.draft_phases_in_graphs) == (1, 0)
    assert counts.replays == {"target": 1}


def test_everything_is_as_before_after_a_failure_too():
    runner, replay = Runner(Graph()), Graph.replay
    with pytest.raises(RuntimeError, match="no drafts"), watched(runner, Graph) as counts:
        runner.execute_model(output(1), fail=True)
    assert vars(runner).keys() == {"drafter"}
    assert vars(runner.drafter).keys() == {"graph"}
    assert Graph.replay is replay
    # A graph that is replayed after a failed draft phase is not a draft's.
    assert counts.replays == {"target": 1}
