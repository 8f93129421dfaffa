# SPDX-License-Identifier: Apache-2.0
"""vLLM's runner under the overrides of its methods, in each version: what is called, in what order."""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.frozen import capture_metadata
from vllm_hwplugin.patching import load_catalogue
from vllm_hwplugin.spec_decode.v2 import runner as overrides
from vllm_hwplugin.spec_decode.v2 import tail_graph
from vllm_hwplugin.spec_decode.v2.methods import put_before
from vllm_hwplugin.spec_decode.v2.step_inputs import _Step
from vllm_hwplugin.spec_decode.v2.tail_capture import Served

from ...conftest import versions
from ...released import text_of
from ..called_text import Seen, Text
from ..test_patched_runners import FACTS, OFF, V2

#: Methods that run as their text has them. Of the others only the overridden ones are there, with their parameters.
RUN = ("initialize_kv_cache", "capture_model", "add_requests", "execute_model", "sample_tokens", "_dummy_run")
STUBS = ("__init__", "update_requests", "prepare_inputs", "prepare_attn", "sample", "postprocess_sampled")
FEATURES = ("v2-tail-graph", "v2-step-inputs")
VERSIONS = [version for version in SUPPORTED if load_catalogue().feature(FEATURES[0]).versions.covers(version)]  # type: ignore[union-attr]


MORE_FACTS = {
    "pcp_manager": None,
    "num_ubatches": 0,
    "get_prev_sampled_outputs()": None,
    "decode_query_len": 4,
    "num_query_per_req": 1,
    "num_extra_query_per_req": 0,
}


class Mixin:
    """The class above vLLM's runner. A stand-in answers to each name that the runner does not have."""

    text: Text

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        vars(self)[name] = getattr(Seen("self", self.text), name)
        return vars(self)[name]

    @contextlib.contextmanager
    def maybe_dummy_run_with_lora(self, *_: Any, **__: Any) -> Iterator[None]:
        yield


def runner_of(module: str, facts: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return a runner of a module's text, under the decorator if it has one, and the list that gets its calls."""
    text = Text(module, "GPUModelRunner", {**FACTS, **MORE_FACTS, **facts})
    (found,) = (node for node in ast.parse(module).body if getattr(node, "name", "") == "GPUModelRunner")
    assert isinstance(found, ast.ClassDef)
    kept = [node for node in found.body if not isinstance(node, ast.FunctionDef) or node.name in (*RUN, *STUBS)]
    for node in kept:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            if node.name in STUBS:
                given = ", ".join(arg.arg for arg in node.args.args[1:])
                node.body = ast.parse("pass" if node.name == "__init__" else f"return own_{node.name}({given})").body
    found.body = kept
    names = {node.id for node in ast.walk(found) if isinstance(node, ast.Name)} - vars(builtins).keys()
    namespace: dict[str, Any] = {name: Seen(name.replace("own_", "self."), text) for name in names}
    namespace |= {
        "LoRAModelRunnerMixin": type("Mixin", (Mixin,), {"text": text}),
        "with_tail_graphs": overrides.with_tail_graphs,
    }
    namespace |= {"__builtins__": {**vars(builtins), "__import__": text._import}, "__name__": "vllms.runner"}
    unevaluated = compile("from __future__ import annotations", "flags", "exec").co_flags
    exec(compile(ast.Module([found], []), "patched", "exec", unevaluated, dont_inherit=True), namespace)
    runner = namespace["GPUModelRunner"](Seen("vllm_config", text), Seen("device", text))
    text.calls.clear()
    return runner, text.calls


def call(runner: Any, name: str) -> None:
    """Call a method with a stand-in for each argument that vLLM's own needs."""
    own = next(vars(one)[name] for one in reversed(type(runner).__mro__) if name in vars(one))
    parameters = [*inspect.signature(own).parameters.values()][1:]
    needed = [one.name for one in parameters if one.default is one.empty and one.kind == one.POSITIONAL_OR_KEYWORD]
    getattr(runner, name)(**{name: Seen(name, runner.text) for name in needed})


def names_of(calls: list[str]) -> list[str]:
    return [re.split(r"[(\[]", item.replace("()", ""))[0] for item in calls]


@pytest.fixture(params=versions(V2, among=VERSIONS)[::-1])
def tree(request: pytest.FixtureRequest, vllm_tree: Callable[[str], Any]) -> Any:
    return vllm_tree(request.param)


@pytest.fixture
def patched(tree: Any) -> str:
    return text_of(tree, V2)


@pytest.mark.parametrize("last", ["self.speculator.capture", "ModelCudaGraphManager.capture"])
def test_graphs_are_captured_behind_vllms_once(patched: str, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, calls = runner_of(patched, {} if "speculator" in last else {"speculator": None})
    runner.tail_graphs.capture = lambda: calls.append("ours")
    monkeypatch.setattr(capture_metadata, "captured_draft", lambda *_: False)
    for _ in range(2):
        call(runner, "initialize_kv_cache")
    calls.clear()
    call(runner, "capture_model")
    made = names_of(calls)
    assert made.count("ours") == 1
    assert made[made.index("ours") - 1] == last


#: What a runner calls to prepare a step, and does not call where graphs have prepared it.
PREPARES = {
    "self.sampler.apply_staged_writes",
    "self.block_tables.apply_staged_writes",
    "BlockTables.apply_staged_writes",
    "self.prepare_inputs",
    "self.prepare_attn",
    "self.model_state.prepare_attn",
    "self.model_state.prepare_inputs",
    "self.model_state.get_mm_embeddings",
    "self.model_state.prepare_inputs_embeds",
}


def test_graphs_prepare_a_step(tree: Any, patched: str) -> None:
    nothing_new = {"scheduled_new_reqs": [], "new_block_ids": [None], "lora_config": None}
    stock, expected = runner_of(text_of(tree, V2, **OFF), nothing_new)
    call(stock, "initialize_kv_cache")
    call(stock, "execute_model")
    runner, calls = runner_of(patched, nothing_new)
    call(runner, "initialize_kv_cache")
    inputs, descs = runner.step_inputs, []

    def steady(scheduled: Any, desc: Any) -> Any:
        descs.append(repr(desc))
        captured = types.SimpleNamespace(metadata_is_vllms=False, reads_slots=False)
        inputs._step = _Step(captured, Seen("batch", runner.text), embedded=True)
        return inputs._step.batch

    inputs.captured, inputs.steady = types.SimpleNamespace(tells_of_each_step=False), steady
    call(runner, "execute_model")
    assert descs == ["dispatch_cg_and_sync_dp()[0]"]
    # Nor is anything asked of what these would have made.
    asked = {"requires_raw_input_tokens", "self.model_state.prepare_inputs.keys"}
    left_out = {*names_of(expected)} - {*names_of(calls)} - asked
    assert left_out == PREPARES & {*names_of(expected)}
    # A dummy batch behind it is vLLM's whole.
    calls.clear()
    expected.clear()
    runner._dummy_run(4)
    stock._dummy_run(4)
    assert names_of(calls) == names_of(expected)


def test_a_dummy_batch_takes_nothing_from_the_step_before(patched: str) -> None:
    """Not what was sampled last, and not that a graph has postprocessed it."""
    runner, calls = runner_of(patched, {})
    tail, batch = runner.tail_graphs, object()
    graph: Any = types.SimpleNamespace(replay=lambda: calls.append("replayed"))
    tail._step = tail_graph._Step(batch, Served(graph, None), Served(graph, None), updated=True)
    runner._dummy_run(4)
    assert "replayed" not in calls
    assert "self.speculator.propose" in names_of(calls)
    runner.postprocess_sampled(*range(5))
    assert "self.postprocess_sampled" not in names_of(calls)
    # Of other requests, which another rank has sampled.
    runner.postprocess_sampled(*range(5))
    assert "self.postprocess_sampled" in names_of(calls)


def test_a_rank_without_a_sampler_notes_no_request(patched: str) -> None:
    runner, calls = runner_of(patched, {"is_last_pp_rank": False})
    runner.tail_graphs = Seen("self.tail_graphs", runner.text)
    call(runner, "add_requests")
    assert "self.tail_graphs.add_request" not in names_of(calls)


class Base:
    def __init__(self, vllm_config: Any, device: Any):
        self.speculator, self.max_num_reqs = None, 2

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        return "vLLM's", input_batch, None

    def capture_model(self) -> None:
        """Nothing to capture."""


def test_a_subclass_has_its_own_methods_above_the_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    class Vendors(overrides.with_tail_graphs(Base)):  # type: ignore[misc]
        def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
            return ("the vendor's", *super().sample(hidden_states, input_batch, grammar_output))

    runner = Vendors(None, None)
    batch = types.SimpleNamespace(has_structured_output_reqs=False)
    assert runner.sample(None, batch, None) == ("the vendor's", "vLLM's", batch, None)
    # What a graph records is vLLM's own.
    assert runner.tail_graphs._vllm.sample(None, batch, None) == ("vLLM's", batch, None)


def test_a_method_is_put_before_anothers_once() -> None:
    said: list[Any] = []

    class Owner:
        def step(self, value: int) -> int:
            return value

    class Holder:
        def step(self, own: Callable[[int], int], value: int) -> int:
            said.append(value)
            return own(value)

    owner, holder = Owner(), Holder()
    taken = inspect.signature(owner.step)
    for _ in range(2):
        put_before(owner, "step", holder.step)
    assert owner.step(value=3) == 3
    assert said == [3]
    # It tells what a version's method takes.
    assert inspect.signature(owner.step) == taken
