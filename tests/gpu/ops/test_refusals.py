# SPDX-License-Identifier: Apache-2.0
"""The kernels refuse mistaken calls, and write nothing but results: dispatcher and graphs reach them past Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from vllm_hwplugin.ops.compile.spec import KERNELS  # noqa: E402

from ...ops.operation_checks import assert_refused  # noqa: E402
from ...ops.test_operations import MISTAKES, NOTHING, TESTS  # noqa: E402
from .kernel_checks import load_kernel  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    for name in TESTS:
        load_kernel(KERNELS[name])


def on_gpu(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: moved(value) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def moved(tensor: Any) -> Any:
    """The same on the GPU: at the same place of its storage, and by the same strides."""
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    return whole.cuda().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("name", TESTS)
def test_a_good_call_is_not_refused(name: str) -> None:
    getattr(TESTS[name], name)(**on_gpu(TESTS[name].call_with()))


@pytest.mark.sanitizer
@pytest.mark.parametrize(("name", "changes"), NOTHING)
def test_nothing_to_do_is_no_error(name: str, changes: dict[str, Any]) -> None:
    getattr(TESTS[name], name)(**on_gpu(TESTS[name].call_with(**changes)))


@pytest.mark.sanitizer
@pytest.mark.parametrize("name", TESTS)
def test_nothing_beside_the_results_is_written(name: str) -> None:
    arguments = on_gpu(TESTS[name].call_with())
    around = []
    for argument in getattr(torch.ops.hwplugin, name).default._schema.arguments:
        if argument.is_write and (tensor := arguments.get(argument.name)) is not None:
            space = torch.full((256 + tensor.nbytes + 256,), 0x55, dtype=torch.uint8, device="cuda")
            arguments[argument.name] = space[256:-256].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            around += [space[:256], space[-256:]]
    getattr(TESTS[name], name)(**arguments)
    assert around
    assert all(bool((part == 0x55).all()) for part in around)


@pytest.mark.parametrize(("name", "changes"), MISTAKES)
def test_a_mistake_is_refused_by_the_kernels_own_checks_and_writes_nothing(name: str, changes: dict[str, Any]) -> None:
    assert_refused(getattr(TESTS[name], name), on_gpu(TESTS[name].call_with(**changes)), f"{name}: ")


@pytest.mark.parametrize("name", TESTS)
def test_a_tensor_of_another_device_is_refused(name: str) -> None:
    for argument, value in TESTS[name].call_with().items():
        if isinstance(value, torch.Tensor):
            arguments = on_gpu(TESTS[name].call_with()) | {argument: value}
            assert_refused(getattr(TESTS[name], name), arguments, f"{name}: {argument} is not on ")
