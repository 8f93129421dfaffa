"""The patched texts of the installed vLLM as modules of their own, and stand-ins for what needs a GPU."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def patched_module() -> Callable[..., types.ModuleType]:
    """`patched_module(path, gate="off", ...)`: a module of vLLM with the project's patches, beside vLLM's own."""
    from vllm_hwplugin.patching import load_catalog, make_plan
    from vllm_hwplugin.patching._installed import find_installed

    made: dict[tuple, types.ModuleType] = {}

    def module(path: str, **choices: str) -> types.ModuleType:
        key = (path, *sorted(choices.items()))
        if key not in made:
            plan = make_plan(load_catalog(), find_installed().source, choices)
            assert plan.features["draft-full-graph"].state == "live", plan.features["draft-full-graph"].reason
            made[key] = types.ModuleType(f"patched.{path}")
            exec(compile(plan.files[path].text, f"patched {path}", "exec"), vars(made[key]))
        return made[key]

    return module


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the modules put on record, by feature."""
    from vllm_hwplugin import record

    said: dict[str, str] = {}
    monkeypatch.setattr(record, "note", said.__setitem__)
    return said


@pytest.fixture
def make(patched_module, notes, monkeypatch: pytest.MonkeyPatch):
    """`make(which, kind, k, sizes=...)`: a proposer that is "stock", "passes" (a graph a pass) or "loop"."""
    import vllm.v1.cudagraph_dispatcher as stock_dispatcher
    import vllm.v1.spec_decode.llm_base_proposer as stock_proposer

    from vllm_hwplugin.spec_decode import draft_graphs, draft_loop

    from .drafters import make_config, make_proposer, plain_eagle_step
    from .recorded_graph import RecordedGraphs

    proposer, dispatcher = "vllm/v1/spec_decode/llm_base_proposer.py", "vllm/v1/cudagraph_dispatcher.py"
    modules = {
        "stock": (stock_proposer, stock_dispatcher),
        "passes": (
            patched_module(proposer, VLLM_HWPLUGIN_DRAFT_LOOP_GRAPH="off"),
            patched_module(dispatcher, VLLM_HWPLUGIN_DRAFT_LOOP_GRAPH="off"),
        ),
        "loop": (patched_module(proposer), patched_module(dispatcher)),
    }
    for module in (draft_loop, *(module for module, _ in modules.values())):
        monkeypatch.setattr(module, "eagle_step_update_slot_mapping_and_metadata", plain_eagle_step)
    monkeypatch.setattr(draft_graphs, "CUDAGraphWrapper", RecordedGraphs)
    pools = types.SimpleNamespace(graph_pool_handle=object)
    monkeypatch.setattr(draft_graphs, "current_platform", pools)
    monkeypatch.setattr(RecordedGraphs, "instances", [])
    monkeypatch.setattr(RecordedGraphs, "sealed", False)

    def made(which, kind, k, sizes=None, **limits):
        sizes = [rung * (1 + k) for rung in (1, 2, 4, 8)] if sizes is None else sizes
        return make_proposer(*modules[which], kind, k, make_config(sizes, **limits))

    return made
