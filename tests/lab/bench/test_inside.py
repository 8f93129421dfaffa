"""What an engine says of itself, read from stand-ins with the attributes of vLLM's own classes."""

from __future__ import annotations

from types import SimpleNamespace as Bag

import pytest

from vllm_hwplugin_lab.bench import _inside


def mode(name):
    return Bag(cudagraph_mode=Bag(name=name))


def runner(module, **attributes):
    return type("GPUModelRunner", (), {"__module__": module, **attributes})()


V1 = "vllm.v1.worker.gpu_model_runner"
V2 = "vllm.v1.worker.gpu.model_runner"


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        (Bag(cudagraph_dispatcher=mode("NONE")), "NONE"),
        (Bag(cudagraph_dispatcher=mode("PIECEWISE"), draft_graphs=Bag(ready=True)), "FULL"),
        (Bag(cudagraph_dispatcher=mode("PIECEWISE"), draft_graphs=Bag(ready=False)), "PIECEWISE"),
    ],
)
def test_graph_modes_of_v1(drafter, expected):
    found = _inside.graph_modes(runner(V1, cudagraph_dispatcher=mode("FULL"), drafter=drafter))
    assert found == {"target": "FULL", "drafter": expected}


@pytest.mark.parametrize("manager", ["query_cudagraph_manager", "decode_cudagraph_manager"])
def test_graph_modes_of_v2(manager):
    speculator = Bag(**{manager: mode("FULL_DECODE_ONLY")})
    found = _inside.graph_modes(runner(V2, cudagraph_manager=mode("FULL"), speculator=speculator))
    assert found == {"target": "FULL", "drafter": "FULL_DECODE_ONLY"}


@pytest.mark.parametrize(("asked", "module"), [("1", V1), ("0", V2)])
def test_another_runner_is_not_measured_under_a_wrong_name(monkeypatch, asked, module):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    with pytest.raises(_inside.WrongRunner, match=f"MODEL_RUNNER={asked}, but vLLM runs {module}"):
        _inside.check_runner(runner(module))
