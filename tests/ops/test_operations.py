# SPDX-License-Identifier: Apache-2.0
"""What torch asks of every operation, and the calls that its kernel must refuse, for the tests on a GPU."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.operations import OPS  # noqa: E402

from .operation_checks import same_bits  # noqa: E402

#: Each has the operation, ``call_with``, the arguments of a good call with changes, the changes that are mistakes, and
#: where a call may have nothing to do those that leave it nothing.
TESTS = {name: importlib.import_module(f"{__package__}.test_{name}") for name in OPS}
MISTAKES = [(name, changes) for name, test in TESTS.items() for changes in test.MISTAKES]
NOTHING = [(name, changes) for name, test in TESTS.items() for changes in getattr(test, "NOTHING", ())]


@pytest.mark.parametrize("name", TESTS)
def test_a_good_call_is_not_refused(name: str) -> None:
    getattr(TESTS[name], name)(**TESTS[name].call_with())


@pytest.mark.parametrize(("name", "changes"), NOTHING)
def test_nothing_to_do_is_no_error_and_writes_nothing(name: str, changes: dict[str, Any]) -> None:
    arguments = TESTS[name].call_with(**changes)
    before = {key: value.clone() for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    getattr(TESTS[name], name)(**arguments)
    assert all(same_bits(arguments[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", TESTS)
def test_the_operation_is_what_torch_compile_expects(name: str) -> None:
    operation = getattr(torch.ops.hwplugin, name).default
    # PyTorch's check computes with what was written, which it cannot in float8. int8 has no bound of scales.
    changes = {
        argument: value.to(torch.int8)
        for argument, value in TESTS[name].call_with().items()
        if isinstance(value, torch.Tensor) and value.dtype == torch.float8_e4m3fn
    }
    good = TESTS[name].call_with(**changes, **({"scale_ub": None} if changes else {}))
    torch.library.opcheck(operation, tuple(good.values()))
    left_out = {one.name: None for one in operation._schema.arguments if str(one.type).startswith("Optional")}
    torch.library.opcheck(operation, tuple(left_out.get(one, value) for one, value in good.items()))
