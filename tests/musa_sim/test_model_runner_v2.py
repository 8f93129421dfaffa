# SPDX-License-Identifier: Apache-2.0
"""vLLM's Model Runner V2 on the simulated device, under a load: what features that change its steps are tested on.

On a Moore Threads host the plugin's platform class chooses V1. V2 runs here because the environment asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin.base.features import gate_of

from . import checkpoints, loads
from .loads import Engine, Load, Process, Run

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

#: It sets tokens of a step and room for keys aside for its drafts.
DFLASH = Engine("dflash", drafts=7, more={"max_num_batched_tokens": 112, "num_gpu_blocks_override": 24})
ENGINES = {"eagle3": Engine("eagle3"), "dflash": DFLASH}
#: It moves no keys, and is shown each step.
CONNECTOR = {"kv_connector": "Witness", "kv_connector_module_path": "tests.musa_sim.kv_connector", "kv_role": "kv_both"}
#: Larger batches, among them those of vLLM's warm-up, take more of the memory that kernels share.
SMALL_GRAPHS = "eagle3, small graphs"
SHORT, PLAIN = "eagle3, KV connector", "no drafter"
MIXED = loads.mixed()
MORE = loads.asking_for_more()
LOAD = [*MIXED, *loads.two_alone(top_k=20, top_p=0.9), *loads.rows_again(), *MORE]
GREEDY = [request.name for request in LOAD if request.greedy and request.abort_at is None]
ABORTED = {request.name for request in LOAD if request.abort_at is not None}
#: By engine. Loads of few steps are what a whole load begins with, or two requests; the draft has other weights from
#: the middle of one on.
LOADS = {
    **{name: Load(engine.on_musa(), LOAD) for name, engine in ENGINES.items()},
    **{
        name: Load(engine.on_musa(), loads.two_alone(), calls=((106, "update_draft"),) if "weights" in name else ())
        for name, engine in {
            "dflash, new weights": DFLASH,
            "dflash, new weights, eager": replace(DFLASH, graphs=None),
        }.items()
    },
    # Its engine has vLLM's attention kernel, whose calls take seconds in the interpreter.
    SHORT: Load(
        Engine("eagle3", graphs_of=(2,), more={"kv_transfer_config": CONNECTOR}).on_musa(),
        [replace(one, params={**one.params, "max_tokens": 18}) for one in loads.two_alone()],
    ),
    SMALL_GRAPHS: Load(Engine("eagle3", graphs_of=(1, 2)).on_musa(), MIXED),
    # Fewer blocks than with drafts, so that requests lose theirs.
    PLAIN: Load(Engine(None, more={"num_gpu_blocks_override": 15}).on_musa(), LOAD),
}

#: The first that has Model Runner V2 by default, which drafts step by step.
STEP_BY_STEP = "0.26.0"


def process(
    folder: Path,
    names: Sequence[str],
    vllm: tuple[str, Path] | None = None,
    variables: dict[str, str] = loads.UNPATCHED,
) -> Process:
    """Engines under their loads; without variables, of vLLM's own code."""
    return Process({name: LOADS[name] for name in names}, loads.musa(folder, vllm, **variables))


#: They record more of a step, with vLLM's own functions: nothing else may come of it.
GRAPHS = ("v2-step-inputs", "v2-tail-graph")
WITH_GRAPHS = loads.UNPATCHED | {gate_of(feature): "on" for feature in ("engine-report", "v2-graph-addresses", *GRAPHS)}
#: All draft steps in one launch, for versions that have one for each.
FUSED = "v2-fused-drafts"


@pytest.fixture(scope="module")
def eagle3(musa_host: None, newest: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Stock, and with graphs, of the newest release."""
    folder = tmp_path_factory.mktemp("v2 with eagle3")
    processes = {
        side: process(folder / f"host, {side}", ["eagle3"], newest, variables)
        for side, variables in {"stock": loads.UNPATCHED, "graphs": WITH_GRAPHS}.items()
    }
    return {side: runs["eagle3"] for side, runs in loads.side_by_side(processes, folder).items()}


#: The plugin knows no such thing of these engines.
UNKNOWN = ("drafter", "updates alone")


def drafting_without_graphs(folder: Path) -> dict[str, Load]:
    """Engines whose drafter vLLM has no graph for. The draft model has three of the target's four layers."""
    weights = {name: one for name, one in checkpoints.dense().items() if ".layers.3." not in name}
    config = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    draft = checkpoints.write(folder, weights, **config)
    asked: dict[str, dict[str, Any]] = {
        "ngram": {"prompt_lookup_max": 3},
        "draft_model": {"model": str(draft), "draft_sample_method": "probabilistic"},
    }
    made = {
        name: Engine(name, more={"speculative_config": {"method": name, "num_speculative_tokens": 3, **how}})
        for name, how in asked.items()
    }
    return {name: Load(engine.on_musa(), MIXED) for name, engine in made.items()}


@pytest.fixture(scope="module")
def sides(
    musa_host: None, newest: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Run]]:
    """By process, the runs of its engines."""
    folder = tmp_path_factory.mktemp("v2")
    more = drafting_without_graphs(folder / "draft")
    # What is not known is patched only while an engine starts.
    more_with_graphs = more | {what: Load(ENGINES["eagle3"].on_musa(), MIXED, unknown=what) for what in UNKNOWN}
    asked = {
        # What engines note stays for those that follow.
        "graphs": {name: LOADS[name] for name in (PLAIN, "dflash", "dflash, new weights", SHORT)} | more_with_graphs,
        "stock": {name: LOADS[name] for name in ("dflash, new weights, eager", SHORT, "dflash", PLAIN)} | more,
    }
    # An engine that is not known cannot have all that is asked for.
    graphs = WITH_GRAPHS | {gate_of("v2-step-inputs"): "auto"}
    variables = {"graphs": graphs, "stock": loads.UNPATCHED}
    return loads.side_by_side(
        {side: Process(asked[side], loads.musa(folder / f"host, {side}", newest, **variables[side])) for side in asked},
        folder,
    )


@pytest.fixture(scope="module")
def runs(eagle3: dict[str, Run], sides: dict[str, dict[str, Run]]) -> dict[str, Run]:
    """Of stock vLLM."""
    return {"eagle3": eagle3["stock"], **sides["stock"]}


def assert_graphs_serve(expected: Run, found: Run) -> None:
    loads.assert_same(expected, found)
    assert set(GRAPHS) <= set(found.used)
    # Most steps whose target is a graph have graphs of inputs and drafts, too, whatever became of other requests and
    # whatever requests ask of the sampler. Sampling has a graph where they ask for little, also beside a prompt.
    before, after = expected.counts["graph_replays"], found.counts["graph_replays"]
    assert after["target"] == before["target"] >= after["inputs"] > 3 * before["target"] // 4
    assert 0 < after["draft"] <= before["draft"]
    assert found.counts["draft_phases"] == expected.counts["draft_phases"]
    sampling, drafting, inputs = (
        found.counted[path] for path in ("v2-tail-graph sampling", "v2-tail-graph drafting", "v2-step-inputs inputs")
    )
    assert (sampling["served"], inputs["served"]) == (after["sampling"], after["inputs"])
    assert sum(sampling.values()) == sum(inputs.values()) == found.counts["steps"]
    assert (sum(drafting.values()), drafting["served"]) == (found.counts["draft_phases"], inputs["served"])
    assert "prompt" in sampling.keys() & inputs.keys()
    asked = {"sampling_parameters", "structured_output"}
    assert sampling.keys() >= asked
    assert not (drafting.keys() | inputs.keys()) & asked
    # All of these decode beside one that asks for nothing.
    assert sampling["sampling_parameters"] > sum(len(found.of(request.name)) for request in MORE[1:]) // 3


@pytest.mark.smoke
def test_more_graphs_change_nothing(eagle3: dict[str, Run]) -> None:
    assert_graphs_serve(eagle3["stock"], eagle3["graphs"])


def test_nor_with_dflash(sides: dict[str, dict[str, Run]]) -> None:
    assert_graphs_serve(sides["stock"]["dflash"], sides["graphs"]["dflash"])


def test_graphs_sample_where_no_graph_can_draft(eagle3: dict[str, Run], sides: dict[str, dict[str, Run]]) -> None:
    found = sides["graphs"]["drafter"]
    loads.assert_same(eagle3["stock"].before(found), found)
    sampling, drafting = (found.counted[f"v2-tail-graph {half}"] for half in ("sampling", "drafting"))
    assert sampling["served"] == found.counts["graph_replays"]["sampling"] > len(found.steps) // 4
    assert "served" not in drafting
    assert "vLLM drafts: EagleSpeculator drafts in its own way" in found.noted["v2-tail-graph"]
    assert_inputs_are_made(found, "vLLM drafts")


def assert_inputs_are_made(found: Run, why_without_metadata: str) -> None:
    inputs = found.counted["v2-step-inputs inputs"]
    assert inputs["served"] == found.counts["graph_replays"]["inputs"] > len(found.steps) // 4
    assert found.noted["v2-step-inputs"] == f"{why_without_metadata}; attention metadata is vLLM's in each step"


def test_graphs_draft_with_metadata_that_vllm_updates(eagle3: dict[str, Run], sides: dict[str, dict[str, Run]]) -> None:
    found = sides["graphs"]["updates alone"]
    loads.assert_same(eagle3["stock"].before(found), found)
    assert found.counted["v2-tail-graph drafting"]["served"] > len(found.steps) // 4
    assert found.counts["graph_replays"]["draft"] < sides["graphs"]["drafter"].counts["graph_replays"]["draft"]
    assert_inputs_are_made(found, "MusaFlashAttentionMetadataBuilder may make metadata on the host")


@pytest.mark.parametrize("name", ["ngram", "draft_model"])
def test_graphs_draft_where_vllm_has_no_graph(name: str, sides: dict[str, dict[str, Run]]) -> None:
    expected, found = sides["stock"][name], sides["graphs"][name]
    loads.assert_same(expected, found)
    assert expected.widths() == {1, 2, 3, 4, 5, 6}
    assert 0 < expected.accepted()[2] < expected.accepted()[0]
    assert set(GRAPHS) <= set(found.used)
    decodes = found.counts["graph_replays"]["target"]
    assert decodes > found.counts["steps"] // 2
    for path in ("v2-tail-graph drafting", "v2-step-inputs inputs"):
        counted = found.counted[path]
        # The target has a graph also where a request has fewer drafts.
        assert counted["served"] + counted.get("fewer_drafts", 0) == decodes
        assert counted.keys() <= {"served", "prompt", "fewer_drafts"}


def test_graphs_without_a_drafter_change_nothing(sides: dict[str, dict[str, Run]]) -> None:
    expected, found = sides["stock"][PLAIN], sides["graphs"][PLAIN]
    loads.assert_same(expected, found)
    assert expected.widths() == {1, 2, 3, 4, 5, 6}
    assert expected.preempted
    assert set(GRAPHS) <= set(found.used)
    assert found.counts["graph_replays"]["target"] == expected.counts["graph_replays"]["target"]
    sampling, inputs = found.counted["v2-tail-graph sampling"], found.counted["v2-step-inputs inputs"]
    assert sum(sampling.values()) == sum(inputs.values()) == found.counts["steps"]
    assert inputs["served"] > 3 * found.counts["graph_replays"]["target"] // 4
    assert sampling["served"] > found.counts["steps"] // 2
    assert sampling.keys() == {"sampling_parameters", "structured_output", "served"}
    assert inputs.keys() <= {"served", "prompt", "no_full_graph"}
    # Nothing drafts, so there is nothing to count, and nothing to say of it.
    assert "v2-tail-graph drafting" not in found.counted
    assert "draft" not in found.noted["v2-tail-graph"]
    # A graph makes attention metadata, too, or a note would say who does.
    assert "v2-step-inputs" not in found.noted


def test_graphs_draft_by_new_weights_of_the_draft(sides: dict[str, dict[str, Run]]) -> None:
    """This vLLM's own graphs go on with what the draft has fused of the old ones: the other engine has none."""
    expected, found = sides["stock"]["dflash, new weights, eager"], sides["graphs"]["dflash, new weights"]
    loads.assert_same(expected, found)
    assert found.counts["graph_replays"]["sampling"] > len(found.steps) // 2


def test_a_kv_connector_is_shown_what_stock_shows_it(sides: dict[str, dict[str, Run]]) -> None:
    expected, found = (sides[side][SHORT] for side in ("stock", "graphs"))
    loads.assert_same(expected, found)
    assert found.shown == expected.shown
    assert found.counts["graph_replays"]["inputs"] > sum(one is not None for one in expected.shown) // 2 > 0


def test_more_graphs_change_nothing_where_vllm_drafts_step_by_step(
    released: Callable[[str], tuple[str, Path]], musa_host: None, eagle3: dict[str, Run], tmp_path: Path
) -> None:
    """A replay of small graphs that uses freed memory is an error: up to 0.29 vLLM warms up after the capture."""
    # The small graphs' engine is the first of its process: kernels keep their memory, and an engine before would have
    # had more. Batches that the tail's graph does not serve draft in the other one.
    asked = {
        "stock": (["eagle3"], loads.UNPATCHED),
        "graphs": ([SMALL_GRAPHS, "eagle3"], WITH_GRAPHS | {gate_of(FUSED): "on"}),
    }
    processes = {
        side: process(tmp_path / f"host, {side}", names, released(STEP_BY_STEP), variables)
        for side, (names, variables) in asked.items()
    }
    found = loads.side_by_side(processes, tmp_path)
    expected, graphs, small = found["stock"]["eagle3"], found["graphs"]["eagle3"], found["graphs"][SMALL_GRAPHS]
    assert_graphs_serve(expected, graphs)
    assert FUSED in graphs.used
    loads.assert_same(expected.before(small), small)
    # Nor does another version.
    assert expected.texts(GREEDY) == eagle3["stock"].texts(GREEDY)
    assert expected.accepted()[1] > 0
    # Of batches of one and two requests.
    assert small.counts["graph_replays"]["sampling"] > 5


@pytest.mark.parametrize("name", ENGINES)
def test_the_load_is_what_it_is_for(name: str, runs: dict[str, Run]) -> None:
    run = runs[name]
    assert run.runner == "V2"
    assert run.widths() == {1, 2, 3, 4, 5, 6}
    assert run.preempted
    assert any(answer["cached"] for answer in run.answers.values())
    assert run.answers.keys() == {request.name for request in LOAD} - ABORTED
    # One after its prompt, one in it, one that has been waiting.
    early = [request.name for request in MIXED if request.name in ABORTED]
    steps = [[bool(step["sampled"]) for step in run.of(name)] for name in early]
    assert ([sum(one) > 1 for one in steps], [len(one) for one in steps][1:]) == ([True, False, False], [0, 1])
    assert [len(answer["logprobs"]) for answer in run.answers.values() if answer["logprobs"]] == [14, 18]
    accepted, counts = run.accepted(), run.counts
    assert accepted == sorted(accepted, reverse=True)
    assert (len(accepted), accepted[1] > 0) == (ENGINES[name].drafts, True)
    assert counts["graph_replays"]["target"] > counts["steps"] // 3
    assert counts["draft_phases_in_graphs"] > counts["draft_phases"] // 2


def test_greedy_texts_depend_on_no_drafter(runs: dict[str, Run]) -> None:
    assert runs["dflash"].texts(GREEDY) == runs["eagle3"].texts(GREEDY)
