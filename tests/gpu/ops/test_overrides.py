# SPDX-License-Identifier: Apache-2.0
"""The plugin's kernels under vLLM's names, on a real GPU and with vLLM's own C extension.

What ran is told by the names of the CUDA kernels in a profile, not by what the plugin says of itself. The engines'
texts are compared as far as they go: a kernel that rounds elsewhere may turn a near-tie of two tokens in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.base import gates  # noqa: E402
from vllm_hwplugin.ops import overrides  # noqa: E402
from vllm_hwplugin.ops.compile.jit import ensure  # noqa: E402
from vllm_hwplugin.ops.compile.spec import KERNELS  # noqa: E402
from vllm_hwplugin.ops.operations import OPS, RECORD  # noqa: E402
from vllm_hwplugin_lab.bench import find_checkpoints, load_prompts  # noqa: E402
from vllm_hwplugin_lab.bench.micro import _op_cases, _ops_bench  # noqa: E402

from ...musa_sim import loads  # noqa: E402
from ...musa_sim.loads import Load, Process, Request  # noqa: E402
from ..engines import SMALL_ENGINE  # noqa: E402
from ..mixed_load import environment  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

# The least share of the tokens before the first that differs, of 24 texts. Those of a wrong kernel part at once.
ALIKE = 0.9

ON = {"VLLM_HWPLUGIN_OPS": "on"}


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """vLLM's extension and the plugin's kernels: what a profile shows later is the operations alone."""
    import vllm._custom_ops  # noqa: F401

    for name in OPS:
        _ops_bench.reference(name)
        assert ensure(KERNELS[name]), name


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    overrides.remove()


def theirs(name: str) -> Any:
    return getattr(getattr(torch.ops, OPS[name].namespace), name)


def case(name: str) -> list[Any]:
    """Arguments as vLLM makes them, the same ones at every call."""
    (found,) = [one for one in _op_cases.CASES.values() if one.op == name and one.tokens == 64][:1]
    random = torch.Generator("cuda").manual_seed(7)
    values = _ops_bench.arguments(found, "cuda", random)
    return values + _ops_bench.trailing(theirs(name), len(values))


def run(operation: Callable[..., Any], args: list[Any]) -> set[str]:
    """Call it; the names of the CUDA kernels that ran."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        operation(*args)
        torch.cuda.synchronize()
    names = {event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA}
    assert names, "the profile has no kernel"
    return names


def bits(args: list[Any]) -> list[list[int]]:
    return [one.contiguous().view(torch.uint8).flatten().tolist() for one in args if isinstance(one, torch.Tensor)]


@pytest.mark.parametrize("name", OPS)
def test_the_plugins_kernel_runs_under_vllms_name(name: str) -> None:
    stock = run(theirs(name), case(name))
    own = getattr(torch.ops.hwplugin, name)
    wanted = case(name)
    plugins = run(own, wanted[: len(own.default._schema.arguments)])
    assert not stock & plugins
    overrides.install(gates.Settings(ON))
    found = case(name)
    assert run(theirs(name), found) == plugins
    assert bits(found) == bits(wanted)
    assert overrides._overrides[name].state == "plugin"
    overrides.remove()
    assert run(theirs(name), case(name)) == stock


def test_a_call_that_the_kernel_refuses_gets_vllms() -> None:
    """Heads of 12 bytes, which it does not move 16 at a time; vLLM's kernel reports what it refuses, too."""
    name = "merge_attn_states"
    overrides.install(gates.Settings(ON))
    run(theirs(name), case(name))
    output, lse = torch.zeros(2, 3, 6, device="cuda", dtype=torch.bfloat16), torch.zeros(3, 2, device="cuda")
    args = [output, lse, torch.ones_like(output), lse.clone(), torch.ones_like(output), lse.clone()]
    args += _ops_bench.trailing(theirs(name), len(args))
    with pytest.raises(RuntimeError) as raised:
        theirs(name)(*args)
    assert not str(raised.value).startswith(f"{name}: ")


@pytest.mark.parametrize("name", OPS)
def test_captured_it_replays_with_what_the_tensors_hold_then(name: str) -> None:
    overrides.install(gates.Settings(ON))
    wanted, args = case(name), case(name)
    theirs(name)(*case(name))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        theirs(name)(*args)
    getattr(torch.ops.hwplugin, name)(*wanted[: len(getattr(torch.ops.hwplugin, name).default._schema.arguments)])
    for _ in range(3):
        for one, fresh in zip(args, case(name), strict=True):
            if isinstance(one, torch.Tensor):
                one.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        assert bits(args) == bits(wanted)


def test_a_first_call_inside_a_capture_gets_vllms_kernel_and_decides_nothing() -> None:
    name = "topk_softmax"
    wanted, args = case(name), case(name)
    torch.cuda.synchronize()
    theirs(name)(*wanted)
    overrides.install(gates.Settings(ON))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        theirs(name)(*args)
    assert "during the capture of a graph" in overrides._overrides[name].reason
    graph.replay()
    torch.cuda.synchronize()
    assert bits(args) == bits(wanted)
    theirs(name)(*case(name))
    assert overrides._overrides[name].state == "plugin"


# vLLM's own kernels in the graph, not Inductor's, with the norms and the rotation of Qwen3 fused.
FUSED = "fused_qk_norm_rope"
OPTIONS = {
    "compilation_config": {
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "custom_ops": ["+rms_norm", "+rotary_embedding"],
        "pass_config": {"enable_qk_norm_rope_fusion": True},
    }
}


def test_an_engine_says_the_same_and_its_fusion_still_matches(tmp_path: Path) -> None:
    small = find_checkpoints(None)
    params = {"temperature": 0.0, "max_tokens": 48}
    requests = [Request(f"r{at}", list(prompt[:64]), 0, params) for at, prompt in enumerate(load_prompts(small, 24))]
    load = Load({**SMALL_ENGINE, "model": str(small.target), **OPTIONS}, requests)
    processes = {
        gate: Process({gate: load}, environment(tmp_path, gate, "V1", VLLM_HWPLUGIN_OPS=gate)) for gate in ("off", "on")
    }
    off, on = (runs[gate] for gate, runs in loads.side_by_side(processes, tmp_path).items())
    assert not [name for name in off.noted if name.startswith(RECORD)]
    assert on.noted[RECORD + FUSED].startswith("the plugin's kernel"), on.noted
    share = sum(alike(one["tokens"], on.answers[name]["tokens"]) for name, one in off.answers.items()) / len(requests)
    print(f"{share:.1%} of the tokens alike, {on.noted}")
    assert share >= ALIKE


def alike(one: list[int], other: list[int]) -> float:
    same = next((at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))
    return same / len(one)
