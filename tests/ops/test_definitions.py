# SPDX-License-Identifier: Apache-2.0
"""vLLM's operations where vLLM has none: on the CPU, whose dispatch key stands in for that of MUSA."""

from __future__ import annotations

import ast
import itertools
import logging
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_hwplugin.base import run_records  # noqa: E402
from vllm_hwplugin.ops import definitions  # noqa: E402
from vllm_hwplugin.ops.operations import DEFINED, Operation  # noqa: E402

from ..conftest import versions  # noqa: E402
from .vllm_child import printed_beside_vllm  # noqa: E402

_numbers = itertools.count()

# A process of its own: an extension cannot be unloaded, and a definition would be seen by other tests.
WITHOUT_EXTENSION = """
import json, torch
from tests.ops.vllms_names import Check, WithoutExtension, cases, check_weak_references
WithoutExtension.install()
import vllm._custom_ops as ops
from vllm.utils.torch_utils import weak_ref_tensors
from vllm_hwplugin.ops import definitions
from vllm_hwplugin.ops.operations import DEFINED

def own(name):
    __import__(f"vllm_hwplugin.ops.{name}")
    return getattr(torch.ops.hwplugin, name)

device = torch.device("cpu")
there = [item.qualname for item in DEFINED.values() if hasattr(getattr(torch.ops, item.namespace), item.name)]
defined = definitions.define_missing("CPU")
assert definitions.define_missing("CPU") == defined
checked = ["weak_ref_tensor"]
check_weak_references(weak_ref_tensors, device)
for name, case in cases(ops, own).items():
    check = Check(case, device)
    for seed in range(20):
        check.compare(seed, check.call)
    checked.append(name)
print(json.dumps([there, defined, checked]))
"""


def test_a_vllm_without_an_extension_serves_each_operation_under_its_own_name() -> None:
    there, defined, checked = printed_beside_vllm(WITHOUT_EXTENSION)
    assert there == []
    assert set(defined) == set(checked) == set(DEFINED)


def _fill(value: float) -> Callable[[Any], None]:
    def fill(out: Any) -> None:
        out.fill_(value)

    return fill


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Operation]]:
    """`one(text)` makes an operation of this schema the only one of the table; its body writes 2."""

    def make(text: str = "(Tensor! out) -> ()") -> Operation:
        name = f"defined{next(_numbers)}"
        item = Operation(name, "_Cdefined", "nothing", ("out",))  # type: ignore[arg-type]
        monkeypatch.setattr(definitions, "DEFINED", MappingProxyType({name: item}))
        monkeypatch.setattr(definitions, "described", lambda item: (text, _fill(2)))
        return item

    yield make
    definitions.undefine()
    run_records.forget()


def _vllms(item: Operation, key: str, text: str = "(Tensor! out) -> ()") -> Any:
    library = torch.library.Library("_Cdefined", "FRAGMENT")
    library.define(item.name + text)
    library.impl(item.name, _fill(1), key)
    return library


def _called(item: Operation) -> float:
    out = torch.zeros(2)
    getattr(torch.ops._Cdefined, item.name)(out)
    return float(out[0])


@pytest.mark.parametrize("key", ["CPU", "CompositeExplicitAutograd"])
def test_what_vllm_has_stays(key: str, one: Callable[..., Operation]) -> None:
    item = one()
    library = _vllms(item, key)
    before = torch._C._dispatch_dump(item.qualname)
    assert definitions.define_missing("CPU") == ()
    assert torch._C._dispatch_dump(item.qualname) == before
    assert _called(item) == 1
    del library


def test_an_operation_with_kernels_for_other_devices_alone_gets_one(one: Callable[..., Operation]) -> None:
    """Whatever that build calls the arguments."""
    item = one()
    library = _vllms(item, "CUDA", "(Tensor! result) -> ()")
    assert definitions.define_missing("CPU") == (item.name,)
    assert _called(item) == 2
    assert definitions.is_defined(item.name)
    definitions.undefine()
    with pytest.raises(NotImplementedError):
        _called(item)
    del library


def test_an_operation_with_other_arguments_is_left_alone_with_a_word(
    one: Callable[..., Operation], caplog: pytest.LogCaptureFixture
) -> None:
    item = one()
    library = _vllms(item, "CUDA", "(Tensor out) -> ()")
    with caplog.at_level(logging.WARNING, "vllm.hwplugin"):
        assert definitions.define_missing("CPU") == ()
    assert item.qualname in caplog.text
    del library


@pytest.mark.parametrize(
    "version",
    versions("vllm/_custom_ops.py", "vllm/utils/torch_utils.py", "vllm/v1/attention/", "vllm/model_executor/layers/"),
)
def test_vllm_passes_what_the_schema_of_its_version_takes(version: str, vllm_tree: Callable[[str], Any]) -> None:
    torch_utils, custom_ops = "vllm/utils/torch_utils.py", "vllm/_custom_ops.py"
    flex = "vllm/v1/attention/backends/flex_attention.py"
    experts = "vllm/model_executor/layers/fused_moe/activation.py"
    callers = {"weak_ref_tensor": [torch_utils], "reshape_and_cache_flash": [custom_ops, flex]}
    callers |= {name: [experts] for name in ("silu_and_mul", "gelu_and_mul")}
    # Experts of 0.20 have no such activation.
    callers["gelu_tanh_and_mul"] = [] if version.startswith("0.20.") else [experts]
    for item in DEFINED.values():
        arguments, _ = definitions.described(item)
        schema = torch._C.parse_schema(item.qualname + arguments)
        names = [one.name for one in schema.arguments]
        needed = len([one for one in schema.arguments if not one.has_default_value()])
        for path in callers.get(item.name, [custom_ops]):
            target = f"torch.ops.{item.namespace}.{item.name}"
            nodes = list(ast.walk(ast.parse(vllm_tree(version).read(path))))
            calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == target]
            assert calls, f"{target} is not called in {path}"
            assert all(needed <= len(call.args) <= len(schema.arguments) for call in calls), target
            # What the caller names as the schema does is at its place.
            for place, given in ((place, ast.unparse(one)) for call in calls for place, one in enumerate(call.args)):
                assert given not in names or names[place] == given, f"{target} is called with {given} at {place}"


def test_a_quantized_cache_is_an_error() -> None:
    one = torch.ones(1, 1, 8)
    with pytest.raises(NotImplementedError, match="kv_cache_dtype=fp8"):
        definitions.reshape_and_cache_flash(one, one, one, one, torch.tensor([0]), "fp8", one, one)
    with pytest.raises(NotImplementedError, match="concat_and_cache_mla in torch has no kv_cache_dtype=fp8"):
        definitions.concat_and_cache_mla(one[0], one[0], one, torch.tensor([0]), "fp8", one)
