"""Which graphs passes were given, on runners with the methods of vLLM's; the real V1 runner is in tests/e2e."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace as Bag

import pytest

from vllm_hwplugin import spec_decode
from vllm_hwplugin_lab.bench._graphs import counted
from vllm_hwplugin_lab.bench._inside import drafting_of, replaying

FULL, NONE = Bag(name="FULL"), Bag(name="NONE")


class V1Runner:
    def __init__(self, drafter):
        self.drafter = drafter

    def _determine_batch_execution_and_padding(self, num_tokens, num_reqs):
        return FULL, Bag(num_tokens=8), False, None, None

    def step(self):
        self._determine_batch_execution_and_padding(num_tokens=7, num_reqs=2)
        self.drafter.propose()


class Proposer:
    def __init__(self):
        self.draft_graphs = DraftGraphs(self)

    def _determine_batch_execution_and_padding(self, num_tokens, use_cudagraphs=True):
        return NONE, num_tokens, None

    def propose(self):
        for tokens in (7, 2):
            self.draft_graphs.determine_batch_execution_and_padding(tokens)


class DraftGraphs:
    """The plugin's: a graph for two, and vLLM's own answer for the rest."""

    def __init__(self, proposer):
        self.proposer = proposer

    def determine_batch_execution_and_padding(self, num_tokens):
        if num_tokens > 2:
            return self.proposer._determine_batch_execution_and_padding(num_tokens)
        return FULL, 4, None


def row(model, unpadded, padded, mode, count):
    return {"model": model, "unpadded": unpadded, "padded": padded, "mode": mode, "count": count}


def test_v1_with_the_plugins_graphs_counts_a_pass_once():
    runner = V1Runner(Proposer())
    with counted(runner) as counts:
        for _ in range(3):
            runner.step()
    runner.step()
    assert counts.rows() == [
        row("target", 7, 8, "FULL", 3),
        row("drafter", 2, 4, "FULL", 3),
        row("drafter", 7, 7, "NONE", 3),
    ]
    assert set(vars(runner)) == {"drafter"}
    assert set(vars(runner.drafter)) == {"draft_graphs"}


class Manager:
    def dispatch(self, num_reqs, num_tokens, uniform_token_count, num_active_loras=0):
        return Bag(cg_mode=FULL, num_tokens=16)


def test_v2_names_each_managers_part():
    speculator = Bag(prefill_cudagraph_manager=Manager(), decode_cudagraph_manager=Manager(), other_manager=None)
    runner = Bag(cudagraph_manager=Manager(), speculator=speculator, encoder_cudagraph_manager=None)
    with counted(runner) as counts:
        runner.cudagraph_manager.dispatch(2, 8, 4)
        speculator.prefill_cudagraph_manager.dispatch(2, num_tokens=8, uniform_token_count=4)
        for _ in range(2):
            speculator.decode_cudagraph_manager.dispatch(2, 2, 1, num_active_loras=0)
    assert counts.rows() == [
        row("target", 8, 16, "FULL", 1),
        row("drafter decode", 2, 16, "FULL", 2),
        row("drafter prefill", 8, 16, "FULL", 1),
    ]
    assert vars(runner.cudagraph_manager) == {}


def test_v2_with_the_plugins_graph_of_the_whole_draft():
    speculator = Bag(decode_cudagraph_manager=Manager())

    class TailGraphs:
        def propose(self, batch, metadata, **settings):
            if batch.num_reqs == 3:
                speculator.decode_cudagraph_manager.dispatch(3, 3, 1)

    runner = Bag(cudagraph_manager=Manager(), speculator=speculator, tail_graphs=TailGraphs())
    assert drafting_of(runner) is runner.tail_graphs
    with counted(runner) as counts:
        for num_reqs in (2, 2, 3):
            batch = Bag(num_reqs=num_reqs, num_tokens=4 * num_reqs, num_tokens_after_padding=16)
            runner.tail_graphs.propose(batch, None)
    assert counts.rows() == [row("drafter decode", 3, 16, "FULL", 1), row("drafter tail", 8, 16, "FULL", 2)]
    assert vars(runner.tail_graphs) == {}


def test_v1_with_the_plugins_graph_of_the_whole_draft():
    proposer = Proposer()

    class DraftPhase:
        def propose(self, scheduler_output, sampled_token_ids, sampling_metadata, hidden_states):
            if scheduler_output.total_num_scheduled_tokens == 7:
                proposer.propose()

    runner = V1Runner(proposer)
    runner.draft_phase = DraftPhase()
    with counted(runner) as counts:
        for tokens in (8, 8, 7):
            runner.draft_phase.propose(Bag(total_num_scheduled_tokens=tokens), None, None, Bag(shape=(16, 64)))
    assert counts.rows() == [
        row("drafter", 2, 4, "FULL", 1),
        row("drafter", 7, 7, "NONE", 1),
        row("drafter phase", 8, 16, "FULL", 2),
    ]
    assert vars(runner.draft_phase) == {}


@pytest.mark.parametrize(
    ("module", "feature", "methods"),
    [
        ("draft_phase", "DraftPhase", {"sample": [], "propose": ["scheduler_output", "hidden_states"]}),
        ("v2/tail_graphs", "TailGraphs", {"sample": [], "propose": ["batch"]}),
        ("steady_steps", "StepInputs", {"prepare_inputs": []}),
        ("v2/step_inputs", "StepInputs", {"steady": []}),
    ],
)
def test_the_plugins_graphs_have_the_methods_that_are_watched(module, feature, methods):
    tree = ast.parse((Path(spec_decode.__file__).parent / f"{module}.py").read_text())
    (found,) = [one for one in ast.walk(tree) if isinstance(one, ast.ClassDef) and one.name == feature]
    signatures = {
        one.name: [argument.arg for argument in one.args.args] for one in found.body if isinstance(one, ast.FunctionDef)
    }
    for method, arguments in methods.items():
        assert set(arguments) <= set(signatures[method])
    runner = Bag(**dict.fromkeys(("draft_phase", "tail_graphs", "step_inputs"), Bag(**dict.fromkeys(methods))))
    assert [method for _, _, method in replaying(runner)][:1] == [name for name in methods if name != "propose"]


@pytest.mark.parametrize("version", ["0.20.0", "0.26.0", "0.33.0"])
def test_vllm_has_these_methods(vllm_tree, version):
    tree = vllm_tree(version)

    def arguments(path, method):
        functions = [one for one in ast.walk(ast.parse(tree.read(path))) if isinstance(one, ast.FunctionDef)]
        return [[a.arg for a in one.args.args] for one in functions if one.name == method]

    method = "_determine_batch_execution_and_padding"
    for path in ("vllm/v1/worker/gpu_model_runner.py", "vllm/v1/spec_decode/llm_base_proposer.py"):
        (found,) = arguments(path, method)
        assert found[:2] == ["self", "num_tokens"]
    found = arguments("vllm/v1/worker/gpu/cudagraph_utils.py", "dispatch")
    assert found
    assert all(one[:3] == ["self", "num_reqs", "num_tokens"] for one in found)
