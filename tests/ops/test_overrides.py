# SPDX-License-Identifier: Apache-2.0
"""A kernel in front of another one, on toy operations: the dispatch key CPU stands in for CUDA's and for MUSA's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_hwplugin.base import gates, run_records  # noqa: E402
from vllm_hwplugin.ops import definitions, overrides  # noqa: E402
from vllm_hwplugin.ops.operations import Operation  # noqa: E402

from .forked import said_by_a_fork  # noqa: E402
from .toys import Toy, make_toy  # noqa: E402

ON = {"VLLM_HWPLUGIN_OPS": "on"}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    overrides.remove()
    definitions.undefine()
    run_records.forget()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    return make_toy(monkeypatch)


@pytest.fixture
def entry() -> run_records.RunRecord:
    entry = run_records.new("0")
    run_records.begin(entry, None)
    return entry


def _host(monkeypatch: pytest.MonkeyPatch, *toys: Toy, musa: bool) -> None:
    """vLLM's C extension has these operations, where they are not the plugin's own, and so has the plugin's table."""
    monkeypatch.setattr(overrides, "is_musa_host", lambda: musa)
    monkeypatch.setattr(overrides, "MUSA_KEY" if musa else "KEY", "CPU")
    monkeypatch.setattr(overrides, "load_extension", lambda: definitions.define_missing("CPU") if musa else None)
    monkeypatch.setattr(overrides, "OPS", {toy.op.name: toy.op for toy in toys})
    monkeypatch.setattr(overrides, "unknown_names", lambda skip: tuple(name for name in skip if name == "rope"))


@pytest.fixture
def cuda(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> Toy:
    _host(monkeypatch, toy, musa=False)
    return toy


@pytest.fixture
def musa(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> tuple[Toy, Toy]:
    """An operation that the plugin defines, and one that this vLLM has a kernel of."""
    own = make_toy(monkeypatch, defined=True)
    _host(monkeypatch, own, toy, musa=True)
    return own, toy


def _said(entry: run_records.RunRecord, toy: Toy) -> str:
    return entry.decisions[f"operation {toy.op.name}"].partition(":")[0]


# -- one operation -----------------------------------------------------------------------------------------------------


def test_the_plugins_kernel_serves_under_vllms_name_and_is_loaded_once_at_the_first_call(
    toy: Toy, entry: run_records.RunRecord
) -> None:
    assert toy(None) == 1
    before = torch._C._dispatch_dump(toy.op.qualname)
    override = toy.in_front()
    assert (override.state, toy.calls, _said(entry, toy)) == ("open", ["stock"], "not decided yet")
    assert [toy(None), toy(None)] == [2, 2]
    assert toy.calls == ["stock", "load", "plugin", "plugin"]
    assert _said(entry, toy) == "the plugin's kernel"
    overrides.remove()
    assert toy(None) == 1
    assert torch._C._dispatch_dump(toy.op.qualname) == before


def test_a_call_that_the_kernel_refuses_goes_to_vllms_kernel(toy: Toy) -> None:
    toy.in_front()
    assert [toy(None), toy(None, dtype=torch.float64)] == [2, 1]
    # An argument that the plugin's operation does not have, away from its default.
    assert [toy(None, 4), toy(None, 0)] == [5, 2]
    out = torch.zeros(1)
    toy.theirs(out, None, more=4)
    assert float(out) == 5
    # What is no refusal is not passed over.
    with pytest.raises(RuntimeError, match="a fault of the device"):
        toy(torch.ones(0))


def test_an_argument_without_default_that_the_kernel_does_not_have_has_to_be_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy = make_toy(monkeypatch, "(Tensor! out, Tensor? bias, Tensor? padding) -> ()")
    toy.in_front()
    assert [toy(None, None), toy(None, torch.ones(2, 2))] == [2, 9]
    assert toy.calls == ["load", "plugin", "stock"]


@pytest.mark.parametrize(
    ("text", "own", "changes", "key"),
    [
        ("(Tensor! out) -> ()", "(Tensor(a!) out, Tensor? bias) -> ()", {}, "CPU"),
        ("(Tensor! out, Tensor? bias) -> ()", "(Tensor(a!) out, int bias) -> ()", {}, "CPU"),
        ("(Tensor! out, Tensor? bias) -> ()", "(Tensor(a!) out, Tensor? bias) -> ()", {}, "CUDA"),
        ("(Tensor! out, Tensor? bias) -> ()", "(Tensor(a!) out, Tensor? bias) -> ()", {"namespace": "_Cno"}, "CPU"),
    ],
    ids=["more arguments", "another type", "another device", "no operation"],
)
def test_an_operation_that_is_not_as_it_is_known_stays_as_it_is(
    text: str, own: str, changes: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = make_toy(monkeypatch, text, own)
    before = torch._C._dispatch_dump(toy.op.qualname)
    with pytest.raises(overrides._Refused):
        overrides.put_in_front(toy.op._replace(**changes), key, "on", required=False)
    assert torch._C._dispatch_dump(toy.op.qualname) == before


def test_nothing_is_built_while_a_graph_is_captured(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = True
    monkeypatch.setattr(overrides, "is_capturing", lambda device: capturing)
    override = toy.in_front()
    assert toy(None) == 1
    assert (override.state, toy.calls) == ("open", ["stock"])
    capturing = False
    assert toy(None) == 2
    # Loaded before, it is captured as well.
    capturing = True
    assert toy(None) == 2


def test_graphs_have_vllms_names(toy: Toy) -> None:
    from torch._dynamo.backends.common import aot_autograd

    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        toy.theirs(y, None)
        return y * 3

    def traced() -> tuple[list[str], str]:
        lowered: list[str] = []

        def compiler(graph: Any, inputs: Any) -> Any:
            lowered.extend(f"{node.target} {node.kwargs.get('_op')} {node.args[:1]}" for node in graph.graph.nodes)
            return graph.forward

        torch._dynamo.reset()
        compiled = torch.compile(model, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
        assert compiled(torch.zeros(2)).tolist() == [expected, expected]
        code = torch.fx.experimental.proxy_tensor.make_fx(model, tracing_mode="fake")(torch.zeros(2)).code
        return lowered, code

    torch.library.register_fake(toy.op.qualname, lambda out, bias, more=0: None)
    expected = 3.0
    before = traced()
    toy.in_front()
    expected = 6.0
    assert traced() == before
    assert toy.op.qualname.replace("::", ".") in before[1]


def test_a_forked_process_decides_for_itself(toy: Toy) -> None:
    override = toy.in_front()
    # Another thread of the parent may be deciding at the moment of the fork.
    override.lock.acquire()
    assert said_by_a_fork(lambda: f"{toy(None)} {override.state}", 60) == "2.0 plugin"
    override.lock.release()
    assert override.state == "open"


# -- what is put in front ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", ["0", "1"])
def test_on_cuda_nothing_is_done_unless_it_is_asked_for(
    strict: str, cuda: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    untouched = torch._C._dispatch_dump(cuda.op.qualname)
    loads: list[str] = []
    monkeypatch.setattr(overrides, "load_extension", lambda: loads.append("load"))
    for environ in ({}, {"VLLM_HWPLUGIN_OPS": "off"}, {**ON, "VLLM_HWPLUGIN_OPS_SKIP": cuda.op.name}):
        overrides.install(gates.Settings({**environ, "VLLM_HWPLUGIN_STRICT": strict}))
        assert torch._C._dispatch_dump(cuda.op.qualname) == untouched
    assert loads == ["load"]
    for role in ("api-server", "inspection"):
        monkeypatch.setattr(run_records, "role", lambda role=role: role)
        overrides.install(gates.Settings(ON))
    assert loads == ["load"]
    monkeypatch.setattr(run_records, "role", lambda: "worker")
    overrides.install(gates.Settings(ON))
    once = torch._C._dispatch_dump(cuda.op.qualname)
    overrides.install(gates.Settings(ON))
    assert torch._C._dispatch_dump(cuda.op.qualname) == once != untouched
    assert cuda(None) == 2


@pytest.mark.parametrize("strict", ["0", "1"])
def test_on_musa_kernels_serve_what_vllm_has_none_of(
    strict: str, musa: tuple[Toy, Toy], entry: run_records.RunRecord
) -> None:
    own, vllms = musa
    untouched = torch._C._dispatch_dump(vllms.op.qualname)
    overrides.install(gates.Settings({"VLLM_HWPLUGIN_STRICT": strict}))
    assert [own(None), own(None), vllms(None), own(None, dtype=torch.float64)] == [2, 2, 1, 1]
    assert own.calls == ["load", "plugin", "plugin", "plugin", "stock"]
    assert torch._C._dispatch_dump(vllms.op.qualname) == untouched
    assert _said(entry, own) == "the plugin's kernel"


@pytest.mark.parametrize("environ", [ON, {"VLLM_MUSA_OP_PERF_OVERRIDES": "1"}])
def test_asked_for_they_stand_in_front_of_vllms_too(environ: dict[str, str], musa: tuple[Toy, Toy]) -> None:
    overrides.install(gates.Settings(environ))
    assert [toy(None) for toy in musa] == [2, 2]


@pytest.mark.parametrize("environ", [{"VLLM_HWPLUGIN_OPS": "off"}, {"VLLM_MUSA_OP_PERF_OVERRIDES": "0"}, None])
def test_switched_off_or_left_out_the_definition_stays(
    environ: dict[str, str] | None, musa: tuple[Toy, Toy], entry: run_records.RunRecord
) -> None:
    own, vllms = musa
    definitions.define_missing("CPU")
    overrides.install(gates.Settings({"VLLM_HWPLUGIN_OPS_SKIP": own.op.name} if environ is None else environ))
    assert [own(None), vllms(None)] == [1, 1]
    assert "load" not in own.calls
    assert _said(entry, own) == "the plugin's definition in torch"


def _nothing(op: Operation) -> bool:
    return False


def _fails(op: Operation) -> bool:
    raise ModuleNotFoundError("No module named 'torch'")


@pytest.mark.parametrize("load", [_nothing, _fails])
def test_without_the_kernel_what_there_is_serves_unless_it_was_asked_for(
    load: Callable[[Operation], bool],
    musa: tuple[Toy, Toy],
    entry: run_records.RunRecord,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, vllms = musa
    monkeypatch.setattr(overrides, "load_kernel", load)
    overrides.install(gates.Settings({"VLLM_HWPLUGIN_STRICT": "1"}))
    assert [own(None), own(None)] == [1, 1]
    assert _said(entry, own) == "the plugin's definition in torch"
    overrides.remove()
    overrides.install(gates.Settings(ON))
    for toy in (own, vllms):
        with pytest.raises(overrides.OverrideError, match=toy.op.name):
            toy(None)


def test_a_wrong_name_in_the_skip_list_is_said(cuda: Toy, caplog: pytest.LogCaptureFixture) -> None:
    skip = {"VLLM_HWPLUGIN_OPS_SKIP": "rope"}
    with caplog.at_level(logging.WARNING, "vllm.hwplugin"):
        overrides.install(gates.Settings(skip))
    assert "rope" in caplog.text
    for demand in (ON, {"VLLM_HWPLUGIN_STRICT": "1"}):
        with pytest.raises(overrides.OverrideError, match="rope"):
            overrides.install(gates.Settings({**demand, **skip}))
