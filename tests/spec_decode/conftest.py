"""The patched texts of the installed vLLM as modules of their own, and stand-ins for what needs a GPU."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.register_assert_rewrite(f"{__package__}.walks")


@pytest.fixture(scope="session")
def patched_module() -> Callable[..., types.ModuleType]:
    """`patched_module(path, gate="off", ...)`: a module of vLLM with the project's patches, beside vLLM's own."""
    from vllm_hwplugin.patching import load_catalogue, make_plan
    from vllm_hwplugin.patching._installed import find_installed

    from ..released import WITHOUT_MODES

    made: dict[tuple, types.ModuleType] = {}

    def module(path: str, **choices: str) -> types.ModuleType:
        key = (path, *sorted(choices.items()))
        if key not in made:
            plan = make_plan(load_catalogue(), find_installed(), {**WITHOUT_MODES, **choices})
            assert plan.features["draft-full-graph"].state == "live", plan.features["draft-full-graph"].reason
            made[key] = types.ModuleType(f"patched.{path}")
            made[key].__package__ = path.rpartition("/")[0].replace("/", ".")
            exec(compile(plan.files[path].text, f"patched {path}", "exec"), vars(made[key]))
        return made[key]

    return module


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """By feature, whether the engine uses it, as the run record was told last; where there is no capture to leave."""
    from vllm_hwplugin.base import run_records
    from vllm_hwplugin.spec_decode import graph_recording

    told: dict[str, bool] = {}
    monkeypatch.setattr(graph_recording, "leave_capture", lambda pool, *, broken: None)
    monkeypatch.setattr(graph_recording, "reserved_memory", lambda: 0)
    monkeypatch.setattr(run_records, "use", lambda feature, used, reason="": told.__setitem__(feature, used))
    return told


@pytest.fixture(scope="session")
def vllm_here() -> Any:
    """The text of the vLLM that this process imports."""
    from vllm_hwplugin.patching import find_installed

    return find_installed()


class _Capture:
    """`torch.cuda.CUDAGraph` of a host without a GPU, as far as a capture that failed is left."""

    def capture_begin(self) -> None: ...

    def capture_end(self) -> None: ...


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a recording asks of torch beside its graph, on a host without a GPU."""
    import torch

    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Capture)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda: None)
    for name in ("memory_reserved", "current_device_index"):
        monkeypatch.setattr(torch.accelerator, name, lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))


@pytest.fixture
def uses(accelerator: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[bool, str]]:
    """What features say of their use, on a host without a GPU where recordings may fail."""
    from vllm_hwplugin.base import run_records

    said: dict[str, tuple[bool, str]] = {}
    monkeypatch.setattr(run_records, "use", lambda feature, used, reason="": said.update({feature: (used, reason)}))
    return said


@pytest.fixture
def booting(patched_module, notes, monkeypatch: pytest.MonkeyPatch):
    """`booting(make, k, build, stock=...)`: a proposer and its runner, whose graphs replay as on a GPU."""
    import vllm.v1.worker.gpu_model_runner as stock_runner

    from vllm_hwplugin.spec_decode.v1 import pass_graphs

    from .drafters import BLOCK, LAYER, make_config
    from .host_runner import PROPOSERS, make_host
    from .recorded_graph import RecordedGraphs

    runners = {True: stock_runner, False: patched_module("vllm/v1/worker/gpu_model_runner.py")}
    for module in runners.values():
        # Both take the tests' proposers for vLLM's.
        for name in PROPOSERS:
            monkeypatch.setattr(module, name, object, raising=False)
    monkeypatch.setattr(pass_graphs, "CUDAGraphWrapper", RecordedGraphs)
    monkeypatch.setattr(pass_graphs, "current_platform", types.SimpleNamespace(graph_pool_handle=object))
    monkeypatch.setattr(RecordedGraphs, "instances", [])
    monkeypatch.setattr(RecordedGraphs, "sealed", False)

    def made(make, k, build, *, stock):
        proposer = make(k, make_config([rung * (1 + k) for rung in (1, 2, 4, 8)]))
        proposer.host = make_host(runners[stock], proposer, LAYER, block_size=BLOCK, build=build)
        return proposer

    return made


@pytest.fixture
def make(patched_module, booting, monkeypatch: pytest.MonkeyPatch):
    """`make(which, k)`: a proposer that is "stock", "passes" (a graph a pass) or "loop"."""
    import vllm.v1.spec_decode.llm_base_proposer as stock_proposer

    from vllm_hwplugin.spec_decode.v1 import draft_loop_graph

    from .drafters import build_views, make_proposer, plain_eagle_step

    path = "vllm/v1/spec_decode/llm_base_proposer.py"
    modules = {
        "stock": stock_proposer,
        "passes": patched_module(path, VLLM_HWPLUGIN_DRAFT_LOOP_GRAPH="off"),
        "loop": patched_module(path),
    }
    for module in (draft_loop_graph, *modules.values()):
        monkeypatch.setattr(module, "eagle_step_update_slot_mapping_and_metadata", plain_eagle_step)

    def made(which, k, module=None):
        return booting(partial(make_proposer, module or modules[which]), k, build_views, stock=which == "stock")

    return made


@pytest.fixture
def make_dflash(patched_module, booting, monkeypatch: pytest.MonkeyPatch):
    """`make_dflash(which, k)`: a `DFlashProposer`; "stock", or "graphs"."""
    import vllm.v1.spec_decode.dflash as stock_dflash
    import vllm.v1.spec_decode.llm_base_proposer as stock_proposer

    from . import dflash_drafter

    folder = "vllm/v1/spec_decode"
    proposer = patched_module(f"{folder}/llm_base_proposer.py")
    # The drafter's module takes its base class from the proposer's.
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, stock_proposer.__name__, proposer)
        # "on" gives the text of "auto" as a module that no other test made, on the stock base class, before.
        patched = patched_module(f"{folder}/dflash.py", VLLM_HWPLUGIN_DFLASH_FULL_GRAPH="on")
    modules = {
        "stock": dflash_drafter.Modules(stock_dflash, stock_proposer),
        "graphs": dflash_drafter.Modules(patched, proposer),
    }
    for one in modules.values():
        monkeypatch.setattr(one.dflash, "_copy_and_expand_dflash_inputs", dflash_drafter.plain_expand)
        monkeypatch.setattr(one.proposer, "DFlashQwen3ForCausalLM", dflash_drafter.DFlashModel)

    def made(which, k):
        make = partial(dflash_drafter.make_dflash, modules[which])
        return booting(make, k, dflash_drafter.build_block_views, stock=which == "stock")

    return made


@pytest.fixture
def entry() -> Any:
    """This process's run record, in which `capture-sizes` and `v2-mixed-graphs` are live."""
    from vllm_hwplugin.base import run_records

    made = run_records.new("0")
    made.features = {name: {"state": "live", "reason": ""} for name in ("capture-sizes", "v2-mixed-graphs")}
    run_records.begin(made, None)
    return made
