# SPDX-License-Identifier: Apache-2.0
"""What MUSA's Triton 3.6 does wrong, on the installed Triton with the vendor's rule put in."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_hwplugin.musa import triton_gaps

jit: Any = pytest.importorskip("triton.runtime.jit")
X, W, STATE = (SimpleNamespace(dtype="fp16", data_ptr=lambda at=at: at) for at in (64, 128, 192))


def vendors(params: Any, values: Any) -> str:
    """The vendor's rule: each parameter that is declared as no constant counts."""
    places: dict[int, list[int]] = {}
    for at, value in enumerate(v for p, v in zip(params, values, strict=False) if not p.is_constexpr):
        if hasattr(value, "data_ptr"):
            places.setdefault(value.data_ptr(), []).append(at)
    return ",".join(f"{a}:{b}" for found in places.values() for a, b in itertools.combinations(found, 2))


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`named(kernel, *values)`: what Triton says of a launch, in a worker."""
    monkeypatch.setattr(jit, "_make_pointer_alias_spec", vendors, raising=False)
    triton_gaps.fix_aliases()

    def ask(kernel: Callable[..., None], *values: Any) -> str:
        params = [
            jit.KernelParam(at, one, one.name == "plain", False)
            for at, one in enumerate(inspect.signature(kernel).parameters.values())
        ]
        return jit._make_pointer_alias_spec(params, values)  # type: ignore[no-any-return]

    return ask


def sample(a, b, c, count: tl.int64, SIZE: tl.constexpr, plain=0) -> None:  # type: ignore[no-untyped-def, name-defined]  # noqa: F821
    """As a kernel is declared."""


@pytest.mark.parametrize(
    ("values", "pairs"),
    [
        ((W, X, X, 1, 64), "1:2"),
        ((None, X, X, 1, 64), "0:1"),
        ((1, X, X, 1, 64), "0:1"),
        ((True, X, X, 1, 64), "1:2"),
        ((1.0, X, X, 1, 64), "1:2"),
        ((X, X, X, 1, 64), "0:1,0:2,1:2"),
        # An annotated number, and one that is not specialized, are arguments at 1 too.
        ((X, W, STATE, 1, 64, X), "0:4"),
        ((X, W, STATE, 1, 64, 1), ""),
        # Of a tuple it is not known how many arguments it is.
        (((W, W), X, X, 1, 64), ""),
    ],
)
def test_arguments_count_as_triton_numbers_them(values: tuple[Any, ...], pairs: str, named: Callable[..., str]) -> None:
    assert named(sample, *values) == pairs


def test_inductor_finds_a_benchmark_where_torch_musa_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def do_bench(function: Any, quantiles: Any = None, device_type: str = "cuda") -> Any:
        assert device_type == "musa"
        return function() if quantiles is None or len(quantiles) == 1 else [function()] * len(quantiles)

    import triton.testing

    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    monkeypatch.delitem(sys.modules, triton_gaps._BENCHMARK, raising=False)
    triton_gaps.give_benchmark()
    # As torch_musa's `TritonBenchmarker` imports it.
    from triton.backends.mtgpu.musa_testing import do_bench as theirs

    assert theirs(lambda: 2.0) == 2.0
    assert theirs(lambda: 2.0, quantiles=[0.5]) == [2.0]
    assert theirs(lambda: 2.0, quantiles=[0.5, 0.2]) == [2.0, 2.0]
    monkeypatch.delitem(sys.modules, triton_gaps._BENCHMARK)
