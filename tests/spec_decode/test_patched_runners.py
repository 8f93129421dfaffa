# SPDX-License-Identifier: Apache-2.0
"""The patched methods of vLLM's runners are called, in each distinct text and in every line that a hunk added."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams

from vllm_hwplugin.frozen import capture_metadata
from vllm_hwplugin.nwor import counters
from vllm_hwplugin.nwor import runner as nwor
from vllm_hwplugin.spec_decode.v1.draft_phase import DraftPhase
from vllm_hwplugin.spec_decode.v1.step_inputs import StepInputs as V1StepInputs
from vllm_hwplugin.spec_decode.v2.tail_graph import TailGraphs

from ..conftest import versions
from ..released import text_of
from .called_text import Seen, Text, added_lines

V1 = "vllm/v1/worker/gpu_model_runner.py"
V2 = "vllm/v1/worker/gpu/model_runner.py"
METRICS = "vllm/v1/metrics/loggers.py"
OFF = {
    f"VLLM_HWPLUGIN_{name}": "off"
    for name in ("NWOR_MODE", "V1_DRAFT_PHASE", "V1_STEP_INPUTS", "V2_STEP_INPUTS", "V2_TAIL_GRAPH")
}
ON = {"VLLM_HWPLUGIN_NWOR_MODE": "restore"}
HOOKED = ((nwor, "attach"), (nwor, "restore"), (nwor, "restore_sampled"), (counters, "counters_for"))
#: What decides which way vLLM's methods go: the last part of a name -> its value.
FACTS = {
    "gauge_lora_info": None,
    "is_encoder_only": False,
    "is_pooling_model": False,
    "kv_sharing_fast_prefill": False,
    "max_num_reqs": 4,
    "max_num_tokens": 8,
    "mm_encoder_only": False,
    "num_scheduled_tokens": {"one": 4},
    "num_speculative_steps": 3,
    "NONE": None,
    "broadcast_pp_output": False,
    "pipeline_parallel_size": 1,
    "sampling_params": SamplingParams(),
    "use_aux_hidden_state_outputs": False,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A patched method.

    Attributes:
        hooks: the calls of the plugin, in order, where graphs serve the step. One that is cut short takes what vLLM's
            own call takes, or what differs between versions.
        gone: what vLLM calls by itself, and not then.
        facts: what decides about its way.
        given: its arguments; a `Seen` for what is not among them.
    """

    hooks: list[str] = dataclasses.field(default_factory=list)
    gone: set[str] = dataclasses.field(default_factory=set)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)


CASES = {
    # v2/test_runner.py has what is overridden.
    V2: {
        "initialize_kv_cache": Case(["nwor.attach(self)"]),
        "capture_model": Case(["self.tail_graphs.capture()"]),
        "sample": Case(["nwor.restore("]),
        "sample_tokens": Case(
            ["self.tail_graphs.keep_drafts(idx_mapping=", "self.tail_graphs.drafts_of("],
            {"self.req_states.draft_tokens"},
        ),
    },
    V1: {
        "__init__": Case(),
        "initialize_kv_cache": Case(["nwor.attach(self, True)"], given={"is_profiling": True}),
        "capture_model": Case(["self.step_inputs.capture()"]),
        "_dummy_run": Case(
            [
                "self.step_inputs.forget_step()",
                "self.draft_phase.capture_behind(self.model(), self._build_attention_metadata()[1], profiling=False)",
            ],
            given={"num_tokens": 4, "is_graph_capturing": True},
        ),
        "execute_model": Case(
            [
                "self.step_inputs.update_states(",
                "self.step_inputs.prepare_inputs(",
                "self.step_inputs.get_slot_mappings(",
                "self.step_inputs.build_attention_metadata(",
                "self.draft_phase.logits(",
            ],
            {
                "self._update_states",
                "self._prepare_inputs",
                "self._get_slot_mappings",
                "self._build_attention_metadata",
                "self.model.compute_logits",
            },
            {"execute_model_state": None, "update_states()": None},
        ),
        "_sample": Case(["nwor.restore_sampled(self, spec_decode_metadata, self.rejection_sampler())"]),
        "sample_tokens": Case(
            ["self.draft_phase.sample(", "self.draft_phase.propose("], {"self._sample", "self.propose_draft_token_ids"}
        ),
    },
    METRICS: {
        "__init__": Case(["nwor.counters_for(vllm_config, self._counter_cls, ["]),
        "record": Case(["self.nwor_counters.observe(scheduler_stats.spec_decoding_stats, 3)"], given={"engine_idx": 3}),
    },
}
HOOKS = r"(nwor|self\.(tail_graphs|step_inputs|draft_phase|nwor_counters))\."
#: What the patched `__init__` gives its owner.
HELD = {V1: {"draft_phase", "step_inputs"}, METRICS: {"nwor_counters"}}


def without_graphs(path: str, owner: Seen) -> None:
    """Give the owner of the methods what the patched `__init__` does; it has no graphs, and counts nothing."""
    if path == V2:
        owner.tail_graphs = TailGraphs(owner)
    elif path == V1:
        owner.draft_phase = DraftPhase(owner)
        owner.step_inputs = V1StepInputs(owner)
    else:
        owner.nwor_counters = None


def is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("vllm_hwplugin") or repr(value).startswith("nwor.")


@pytest.mark.parametrize("version", versions(V2)[::-1])
def test_model_runner_v2(version: str, vllm_tree: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check(V2, vllm_tree(version), monkeypatch)


@pytest.mark.parametrize("version", versions(V1))
def test_model_runner_v1(version: str, vllm_tree: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check(V1, vllm_tree(version), monkeypatch)


@pytest.mark.parametrize("version", versions(METRICS))
def test_metrics(version: str, vllm_tree: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check(METRICS, vllm_tree(version), monkeypatch)


def check(path: str, tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks are called where they serve; where they do not, vLLM is called as by its own lines."""
    owner = "PrometheusStatLogger" if path == METRICS else "GPUModelRunner"

    def run(text: str, name: str, case: Case, *, graphs: bool = True) -> tuple[Text, Seen, Any]:
        made = Text(text, owner, {**FACTS, **case.facts})
        for module, function in HOOKED:
            monkeypatch.setattr(module, function, Seen(f"nwor.{function}", made))
        monkeypatch.setattr(capture_metadata, "captured_draft", lambda *_: False)
        one = Seen("self", made)
        if not graphs:
            without_graphs(path, one)
            made.calls.clear()
        return made, one, made.run(name, one, **case.given)

    stock, patched = (text_of(tree, path, **choices) for choices in (OFF, ON))
    added, ran, code = added_lines(stock, patched), set[int](), set[int]()
    assert Text(patched, owner, {}).methods_at(added) <= CASES[path].keys()
    for name, case in CASES[path].items():
        own, _, _ = run(stock, name, case)
        served, one, result = run(patched, name, case)
        hooked = path != V2 or case.hooks[0].partition("(")[0] in patched
        hooks = [call for call in served.calls if re.match(HOOKS, call)]
        expected = case.hooks if hooked else []
        assert len(hooks) == len(expected), (name, hooks)
        for hook, start in zip(hooks, expected, strict=True):
            whole = start.endswith(")")
            # Some versions say that it is not vLLM's measurement of memory.
            assert hook.replace(", False)", ")") == start if whole else hook.startswith(start), (name, hook, start)
        assert own.names - served.names == (case.gone if hooked else set())
        ran |= served.lines
        code |= served.code
        if name == "__init__":
            assert {key for key, held in vars(one).items() if is_ours(held)} == (HELD[path] if hooked else set())
        if (path, name) == (V2, "sample"):
            drafts = "num_draft_tokens=input_batch.num_draft_tokens"
            assert hooks == [f"nwor.restore(self, num_rejected={result[2]!r}, {drafts})"]
        if case.gone or path == METRICS:
            stepped, _, _ = run(patched, name, case, graphs=False)
            assert [call for call in stepped.calls if not call.startswith("nwor.")] == own.calls
            ran |= stepped.lines
    assert added & code <= ran, f"lines {sorted((added & code) - ran)} did not run"
