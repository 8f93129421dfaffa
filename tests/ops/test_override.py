# SPDX-License-Identifier: Apache-2.0
"""A kernel in front of another one, on toy operations: the dispatch key CPU stands in for CUDA."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_hwplugin import gates, journal  # noqa: E402
from vllm_hwplugin.ops import overrides  # noqa: E402
from vllm_hwplugin.ops.override_table import Gain, OverridableOp, Schema  # noqa: E402

from .forked import said_by_a_fork  # noqa: E402
from .toys import Toy, make_toy  # noqa: E402

OWN = "(Tensor(a!) out, Tensor? bias) -> ()"
DEMANDS = {"VLLM_HWPLUGIN_OPS": "on"}, {"VLLM_HWPLUGIN_STRICT": "1"}
IS_CUDA_HOST = overrides.is_cuda_host
LOAD_EXTENSION = overrides.load_extension
ANY = ">=0.1"  # vLLM
GAIN = (Gain("cpu", ANY),)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    overrides.remove()
    journal.forget()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    return make_toy(monkeypatch)


def _wrong(toy: Toy) -> tuple[Schema, ...]:
    return (Schema(">=0.20", f"{toy.op.name}(Tensor! out) -> ()"),)


def _state(toy: Toy) -> str:
    return overrides._overrides[toy.op.name].state


def test_the_plugins_kernel_serves_under_vllms_name_and_is_loaded_once_at_the_first_call(toy: Toy) -> None:
    assert toy(None) == 1
    entry = journal.new("0")
    journal.begin(entry, None)
    override = toy.in_front()
    assert (override.state, toy.calls) == ("open", ["stock"])
    before = dict(entry.decisions)
    assert [toy(None), toy(None)] == [2, 2]
    assert toy.calls == ["stock", "load", "plugin", "plugin"]
    assert override.state == "plugin"
    # Others may have put theirs in the journal in this process.
    name = f"operation {toy.op.name}"
    assert before.keys() == entry.decisions.keys()
    assert before[name] != entry.decisions[name]


def test_a_thread_that_waits_for_the_first_call_does_not_load_it_again(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, second = overrides.load_kernel, threading.Thread(target=toy, args=(None,))

    def meanwhile(op: OverridableOp) -> bool:
        if threading.current_thread() is not second:
            second.start()
            second.join(0.2)
        return load(op)

    monkeypatch.setattr(overrides, "load_kernel", meanwhile)
    toy.in_front()
    toy(None)
    second.join()
    assert toy.calls.count("load") == 1


def test_a_call_that_the_kernel_does_not_support_goes_to_vllms_kernel(toy: Toy) -> None:
    toy.in_front()
    assert toy(None) == 2
    assert toy(None, dtype=torch.float64) == 1
    # An argument that the plugin's operation does not have, away from its default.
    assert toy(None, 4) == 5
    assert toy(None, 0) == 2
    assert toy.theirs._schema.arguments[2].name == "more"
    out = torch.zeros(1)
    toy.theirs(out, None, more=4)
    assert float(out) == 5


def test_an_argument_without_default_that_the_kernel_does_not_have_has_to_be_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy = make_toy(monkeypatch, "(Tensor! out, Tensor? bias, Tensor? padding) -> ()")
    toy.in_front()
    assert toy(None, None) == 2
    assert toy(None, torch.ones(2, 2)) == 9
    assert toy.calls == ["load", "plugin", "stock"]


def test_an_operation_of_the_plugin_may_have_more_arguments_with_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = make_toy(monkeypatch, "(Tensor! out) -> ()", "(Tensor(a!) out, Tensor? bias=None) -> ()")
    toy.in_front()
    assert toy() == 2
    toy = make_toy(monkeypatch, "(Tensor! out) -> ()", "(Tensor(a!) out, Tensor? bias) -> ()")
    with pytest.raises(overrides._Refused):
        toy.in_front()


def test_taken_away_again_vllms_kernel_serves(toy: Toy) -> None:
    before = torch._C._dispatch_dump(toy.op.qualname)
    toy.in_front()
    assert torch._C._dispatch_dump(toy.op.qualname) != before
    assert toy(None) == 2
    overrides.remove()
    assert toy(None) == 1


def _other_schema(toy: Toy) -> tuple[OverridableOp, str]:
    return toy.op._replace(schemas=_wrong(toy)), "CPU"


def _no_kernel(toy: Toy) -> tuple[OverridableOp, str]:
    return toy.op, "CUDA"


def _no_operation(toy: Toy) -> tuple[OverridableOp, str]:
    return toy.op._replace(namespace="_Cnone"), "CPU"


def _as_known(toy: Toy) -> tuple[OverridableOp, str]:
    return toy.op, "CPU"


@pytest.mark.parametrize(
    ("own", "make"),
    [
        (OWN, _other_schema),
        (OWN, _no_kernel),
        (OWN, _no_operation),
        ("(Tensor(a!) out, int bias) -> ()", _as_known),
        ("(Tensor(a!) out, Tensor? bias, int more, int less) -> ()", _as_known),
    ],
)
def test_an_operation_that_is_not_as_it_is_known_stays_as_it_is(
    own: str, make: Callable[[Toy], tuple[OverridableOp, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = make_toy(monkeypatch, own=own)
    op, key = make(toy)
    before = torch._C._dispatch_dump(toy.op.qualname)
    with pytest.raises(overrides._Refused):
        overrides.put_in_front(op, key, "on", required=False)
    assert torch._C._dispatch_dump(toy.op.qualname) == before


def _nothing(op: OverridableOp) -> bool:
    return False


def _fails(op: OverridableOp) -> bool:
    raise ModuleNotFoundError("No module named 'filelock'")


@pytest.mark.parametrize("load", [_nothing, _fails])
def test_a_kernel_that_cannot_be_had_leaves_vllms_or_stops_the_process(
    load: Callable[[OverridableOp], bool], toy: Toy, extension: Callable[..., Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    extension(toy, default_on=GAIN)
    monkeypatch.setattr(overrides, "load_kernel", load)
    overrides.install({})
    assert [toy(None), toy(None)] == [1, 1]
    for demand in DEMANDS:
        overrides.remove()
        overrides.install(demand)
        with pytest.raises(overrides.OverrideError):
            toy(None)


def test_auto_asks_the_device_that_the_first_call_is_for(toy: Toy) -> None:
    gains = replace(toy, op=toy.op._replace(default_on=GAIN))
    assert gains.in_front("auto").state == "open"
    assert toy(None) == 2
    overrides.remove()
    elsewhere = replace(toy, op=toy.op._replace(default_on=(Gain("NVIDIA H200", ANY),)))
    override = elsewhere.in_front("auto")
    assert toy(None) == 1
    assert override.state == "vllm"
    assert "load" not in toy.calls[-2:]


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
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        toy.theirs(y, None)
        return y * 3

    def traced() -> tuple[list[str], list[str], str]:
        torch._dynamo.reset()
        seen: list[str] = []

        def backend(graph: Any, inputs: Any) -> Any:
            seen.extend(str(node.target) for node in graph.graph.nodes)
            return graph.forward

        assert torch.compile(model, backend=backend, fullgraph=True)(torch.zeros(2)).tolist() == [expected, expected]
        from torch._dynamo.backends.common import aot_autograd

        lowered: list[str] = []

        def compiler(graph: Any, inputs: Any) -> Any:
            lowered.extend(f"{node.target} {node.kwargs.get('_op')} {node.args[:1]}" for node in graph.graph.nodes)
            return graph.forward

        torch._dynamo.reset()
        torch.compile(model, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)(torch.zeros(2))
        code = torch.fx.experimental.proxy_tensor.make_fx(model, tracing_mode="fake")(torch.zeros(2)).code
        return seen, lowered, code

    torch.library.register_fake(toy.op.qualname, lambda out, bias, more=0: None)
    expected = 3.0
    before = traced()
    toy.in_front()
    expected = 6.0
    after = traced()
    assert after == before
    assert any(toy.op.qualname.replace("::", ".") in name for name in after[0])
    assert toy.op.qualname.replace("::", ".") in after[2]
    assert "plugin" in toy.calls


def test_a_forked_process_decides_for_itself(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    override = toy.in_front()
    # Another thread of the parent may be deciding at the moment of the fork.
    override.lock.acquire()
    assert said_by_a_fork(lambda: f"{toy(None)} {override.state}", 60) == "2.0 plugin"
    override.lock.release()
    assert override.state == "open"


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Toy]:
    """`extension(toy)`: vLLM's C extension has this one operation, and so has the table."""
    monkeypatch.setattr(overrides, "load_extension", lambda: None)
    monkeypatch.setattr(overrides, "KEY", "CPU")
    monkeypatch.setattr(overrides, "is_cuda_host", lambda: True)
    monkeypatch.setattr(overrides, "gpu_names", lambda: None)

    def use(toy: Toy, **changes: Any) -> Toy:
        toy = replace(toy, op=toy.op._replace(**changes))
        monkeypatch.setattr(overrides, "OPS", {toy.op.name: toy.op})
        monkeypatch.setattr(overrides, "unknown_names", lambda skip: tuple(set(skip) - {toy.op.name}))
        return toy

    return use


def test_the_gate_decides(toy: Toy, extension: Callable[..., Toy]) -> None:
    untouched = torch._C._dispatch_dump(toy.op.qualname)
    skip = {"VLLM_HWPLUGIN_OPS_SKIP": toy.op.name}
    for gains, gate in itertools.product([(), GAIN], ["auto", "on", "off"]):
        extension(toy, default_on=gains)
        for environ in ({"VLLM_HWPLUGIN_OPS": gate}, {"VLLM_HWPLUGIN_OPS": gate, **skip}):
            wanted = environ.keys().isdisjoint(skip) and (gate == "on" or (gate == "auto" and gains != ()))
            overrides.install(environ)
            once = torch._C._dispatch_dump(toy.op.qualname)
            assert (once != untouched, toy(None)) == (wanted, 1 + wanted), environ
            overrides.install(environ)
            assert torch._C._dispatch_dump(toy.op.qualname) == once
            overrides.remove()


@pytest.mark.parametrize("strict", ["0", "1"])
@pytest.mark.parametrize("names", [{"NVIDIA A10"}, {"NVIDIA A10", "NVIDIA T400"}], ids=["one kind", "two kinds"])
def test_where_no_gpu_of_the_host_gains_vllms_own_kernel_is_called_with_nothing_between(
    names: set[str], strict: str, toy: Toy, extension: Callable[..., Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    extension(toy, default_on=(Gain("NVIDIA H200", ANY),), schemas=_wrong(toy))
    monkeypatch.setattr(overrides, "gpu_names", lambda: frozenset(names))
    monkeypatch.setattr(overrides, "load_extension", lambda: pytest.fail("imported for nothing"))
    untouched = torch._C._dispatch_dump(toy.op.qualname)
    entry = journal.new("0")
    journal.begin(entry, None)
    overrides.install({"VLLM_HWPLUGIN_STRICT": strict})
    assert torch._C._dispatch_dump(toy.op.qualname) == untouched
    assert overrides.states() == {}
    said = entry.decisions[f"operation {toy.op.name}"]
    assert all(name in said for name in names)
    # The gate asks for it on any device, and for the extension with it.
    monkeypatch.setattr(overrides, "load_extension", lambda: None)
    with pytest.raises(overrides.OverrideError):
        overrides.install({"VLLM_HWPLUGIN_OPS": "on"})


def test_only_over_the_kernels_that_it_was_measured_against_does_one_gain(
    toy: Toy, extension: Callable[..., Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM writes its kernels anew, and may be the faster one then."""
    extension(toy, default_on=(Gain("NVIDIA H200", "==0.20.2"), Gain("NVIDIA A10", "==0.33.0")))
    monkeypatch.setattr(overrides, "device_name", lambda device: "NVIDIA H200")
    untouched = torch._C._dispatch_dump(toy.op.qualname)
    served = {}
    for version in ("0.20.2+cu130", "0.33.0", "0.20.1", "dev", None):
        monkeypatch.setattr(overrides, "vllm_version", lambda version=version: version)
        for names in (None, frozenset({"NVIDIA H200"})):
            monkeypatch.setattr(overrides, "gpu_names", lambda names=names: names)
            entry = journal.new("0")
            journal.begin(entry, None)
            overrides.install({})
            front = torch._C._dispatch_dump(toy.op.qualname) != untouched
            served[version, names is not None] = front, toy(None)
            assert f"operation {toy.op.name}" in entry.decisions
            overrides.remove()
            journal.forget()
    vllms, own = (False, 1), (True, 2)
    # Where the driver does not name the device, the first call does.
    assert served == {
        **{("0.20.2+cu130", named): own for named in (False, True)},
        ("0.33.0", False): (True, 1),
        ("0.33.0", True): vllms,
        **{("0.20.1", named): vllms for named in (False, True)},
        **{("dev", named): vllms for named in (False, True)},
        **{(None, named): own for named in (False, True)},
    }


def test_a_process_that_may_get_another_gpu_of_the_host_decides_at_the_first_call(
    toy: Toy, extension: Callable[..., Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    extension(toy, default_on=(Gain("NVIDIA H200", ANY),))
    monkeypatch.setattr(overrides, "gpu_names", lambda: frozenset({"NVIDIA T400", "NVIDIA H200"}))
    monkeypatch.setattr(overrides, "device_name", lambda device: "NVIDIA T400")
    overrides.install({})
    assert _state(toy) == "open"
    assert toy(None) == 1
    assert _state(toy) == "vllm"
    overrides.remove()
    monkeypatch.setattr(overrides, "device_name", lambda device: "NVIDIA H200")
    overrides.install({})
    assert toy(None) == 2


def test_what_cannot_stand_in_front_stops_a_process_that_demands_it_and_no_other(
    toy: Toy, extension: Callable[..., Toy], caplog: pytest.LogCaptureFixture
) -> None:
    extension(toy, schemas=_wrong(toy), default_on=GAIN)
    for demand in DEMANDS:
        with pytest.raises(overrides.OverrideError, match=toy.op.name):
            overrides.install(demand)
    with caplog.at_level(logging.WARNING, "vllm.hwplugin"):
        overrides.install({})
    (said,) = caplog.records
    assert toy.op.name in said.getMessage()
    assert toy(None) == 1


def _no_extension(monkeypatch: pytest.MonkeyPatch) -> str:
    """vLLM's C extension was built for another PyTorch, or not at all: its module cannot be imported."""
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", None)
    monkeypatch.setattr(overrides, "load_extension", LOAD_EXTENSION)
    return "vllm._custom_ops"


def _no_get_kernel(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delattr(torch.library, "get_kernel")
    return "get_kernel"


def _no_allow_override(monkeypatch: pytest.MonkeyPatch) -> str:
    real = torch.library.Library.impl

    def impl(self: Any, op_name: str, fn: Any, dispatch_key: str = "", *, with_keyset: bool = False) -> None:
        real(self, op_name, fn, dispatch_key, with_keyset=with_keyset)

    monkeypatch.setattr(torch.library.Library, "impl", impl)
    return "allow_override"


def _no_driver(monkeypatch: pytest.MonkeyPatch) -> str:
    def gpu_names() -> None:
        raise OSError("libnvidia-ml.so.1: wrong ELF class")

    monkeypatch.setattr(overrides, "gpu_names", gpu_names)
    return "wrong ELF class"


@pytest.mark.parametrize("spoil", [_no_extension, _no_get_kernel, _no_allow_override, _no_driver])
def test_whatever_fails_vllms_own_operations_serve_unless_the_plugins_were_demanded(
    spoil: Callable[[pytest.MonkeyPatch], str],
    toy: Toy,
    extension: Callable[..., Toy],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    extension(toy, default_on=GAIN)
    cause = spoil(monkeypatch)
    untouched = torch._C._dispatch_dump(toy.op.qualname)
    entry = journal.new("0")
    journal.begin(entry, None)
    with caplog.at_level(logging.WARNING, "vllm.hwplugin"):
        overrides.install({})
    assert torch._C._dispatch_dump(toy.op.qualname) == untouched
    assert toy(None) == 1
    assert cause in caplog.text
    assert cause in entry.decisions[f"operation {toy.op.name}"]
    with pytest.raises(overrides.OverrideError, match=cause):
        overrides.install({"VLLM_HWPLUGIN_STRICT": "1"})
    if spoil is not _no_driver:
        # `on` takes the kernels whatever the device is called.
        with pytest.raises(overrides.OverrideError, match=cause):
            overrides.install({"VLLM_HWPLUGIN_OPS": "on"})


@pytest.mark.parametrize("strict", ["0", "1"])
def test_the_defaults_ask_nothing_of_a_host_without_cuda(
    strict: str,
    toy: Toy,
    extension: Callable[..., Toy],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its vLLM has few of the operations, and strict mode has to start there all the same."""
    extension(toy, namespace="_Cnone", default_on=(Gain("NVIDIA H200", ANY),))
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(overrides, "is_cuda_host", IS_CUDA_HOST)
    monkeypatch.setattr(overrides, "load_extension", lambda: pytest.fail("imported for nothing"))
    entry = journal.new("0")
    journal.begin(entry, None)
    with caplog.at_level(logging.INFO, "vllm.hwplugin"):
        overrides.install({"VLLM_HWPLUGIN_STRICT": strict})
    assert caplog.text == ""
    assert entry.decisions.keys() == {f"operation {toy.op.name}"}
    monkeypatch.setattr(overrides, "load_extension", lambda: None)
    with pytest.raises(overrides.OverrideError):
        overrides.install({"VLLM_HWPLUGIN_OPS": "on"})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    if strict == "1":
        with pytest.raises(overrides.OverrideError):
            overrides.install({"VLLM_HWPLUGIN_STRICT": strict})


def test_a_wrong_name_in_the_skip_list_is_said(
    toy: Toy, extension: Callable[..., Toy], caplog: pytest.LogCaptureFixture
) -> None:
    extension(toy)
    with caplog.at_level(logging.WARNING, "vllm.hwplugin"):
        overrides.install({"VLLM_HWPLUGIN_OPS_SKIP": "rope"})
    assert "rope" in caplog.text
    with pytest.raises(overrides.OverrideError, match="rope"):
        overrides.install({"VLLM_HWPLUGIN_OPS": "on", "VLLM_HWPLUGIN_OPS_SKIP": "rope"})


def test_processes_without_a_model_do_not_import_the_extension(
    toy: Toy, extension: Callable[..., Toy], monkeypatch: pytest.MonkeyPatch
) -> None:
    extension(toy)
    loads: list[str] = []
    monkeypatch.setattr(overrides, "load_extension", lambda: loads.append("load"))
    for role in ("api-server", "inspection"):
        monkeypatch.setattr(journal, "role", lambda role=role: role)
        overrides.install({"VLLM_HWPLUGIN_OPS": "on"})
    assert loads == []
    monkeypatch.setattr(journal, "role", lambda: "worker")
    overrides.install({"VLLM_HWPLUGIN_OPS": "auto"})
    assert loads == []
    overrides.install({"VLLM_HWPLUGIN_OPS": "on"})
    assert loads == ["load"]


def test_a_bad_value_is_left_to_the_engine() -> None:
    overrides.install({"VLLM_HWPLUGIN_OPS": "perhaps"})
    assert overrides.states() == {}
    # What was demanded cannot be had then.
    with pytest.raises(gates.GateError, match="VLLM_HWPLUGIN_SLP"):
        overrides.install({"VLLM_HWPLUGIN_OPS": "on", "VLLM_HWPLUGIN_SLP": "perhaps"})
