# SPDX-License-Identifier: Apache-2.0
"""One function describes an operation: its schema, what serves without a kernel, and when the kernel is loaded."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops import define  # noqa: E402
from vllm_hwplugin.ops.compile.spec import KernelSpec  # noqa: E402

from .operation_checks import compiled_result  # noqa: E402

TOY = KernelSpec("toy_of_the_tests", "nothing is lost")


def toy(
    out: torch.Tensor, more: torch.Tensor | None, x: torch.Tensor, times: int = 2, bias: torch.Tensor | None = None
) -> None:
    """out = times * x + bias, and more = x where it is given."""
    out.copy_(times * x if bias is None else times * x + bias)
    if more is not None:
        more.copy_(x)


@pytest.fixture(scope="module")
def operation() -> Any:
    return define.operation(TOY, writes=("out", "more"))(toy)


def test_the_functions_signature_is_the_schema(operation: Any) -> None:
    schema = torch.ops.hwplugin.toy_of_the_tests.default._schema
    expected = "(Tensor! out, Tensor!? more, Tensor x, int times=2, Tensor? bias=None) -> ()"
    assert str(schema) == str(torch._C.parse_schema(f"hwplugin::{TOY.name}{expected}"))
    assert operation.__wrapped__ is toy
    assert operation.__doc__ == toy.__doc__


def test_a_call_by_name_or_place_is_served_and_seen_by_a_compiler(operation: Any) -> None:
    x, out, more = torch.arange(3.0), torch.zeros(3), torch.zeros(3)
    operation(out, more, x)
    assert torch.equal(out, 2 * x)
    assert torch.equal(more, x)
    operation(out=out, more=None, x=x, bias=torch.ones(3))
    assert torch.equal(out, 2 * x + 1)

    def caller(x: Any) -> Any:
        out = torch.zeros_like(x)
        operation(out, None, x, times=3)
        return out

    found, called = compiled_result(caller, x)
    assert torch.equal(found, 3 * x)
    assert any(TOY.name in name for name in called)


def test_a_compiler_keeps_a_call_that_writes_through_addresses_alone() -> None:
    """Where drafts are zeroed, not logged, no tensor of the call holds what is written."""
    importlib.import_module("vllm_hwplugin.nwor.rows")

    def zero(table: Any, query_start_loc: Any, num_rejected: Any) -> Any:
        torch.ops.hwplugin.restore_draft_rows(table, None, None, query_start_loc, num_rejected, None, None, 1, 3, 16)
        return num_rejected + 1

    arguments = torch.zeros(1, 12, dtype=torch.int64), torch.zeros(2, dtype=torch.int32), torch.ones(1)
    # It is called, and there is no kernel for this device.
    with pytest.raises(NotImplementedError, match="restore_draft_rows"):
        torch.compile(zero, backend="aot_eager", fullgraph=True)(*arguments)


def test_a_gpus_tensor_has_the_kernel_loaded_however_it_is_passed(
    operation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[KernelSpec] = []
    monkeypatch.setattr(define, "ensure", asked.append)
    x, out = torch.ones(2), torch.zeros(2)
    operation(out, None, x)
    assert asked == []
    # As if this host's processor were a GPU.
    monkeypatch.setattr(define, "GPUS", ("cpu",))
    operation(out, None, x)
    operation(out=out, more=None, x=x)
    assert asked == [TOY, TOY]
    asked.clear()
    # A compiler follows the call to the operation and no further.
    compiled_result(lambda x: operation(out, None, x), x)
    assert asked == []
