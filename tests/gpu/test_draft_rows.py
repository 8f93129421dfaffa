# SPDX-License-Identifier: Apache-2.0
"""The kernels for draft rows on a GPU, byte by byte, in every layout and from a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm_hwplugin.nwor.rows import KernelRows, Rejected  # noqa: E402
from vllm_hwplugin.ops.build.spec import LOG_DRAFT_ROWS, RESTORE_DRAFT_ROWS  # noqa: E402

from ..nwor.steps import LAYOUTS, REJECTED_TOKENS, Layout, Step, assert_slots, by_number, by_sampled  # noqa: E402
from .ops.kernel_checks import load_kernel  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.sanitizer]
EVERYTHING = list(range(sum(Step.lengths)))


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    for kernel in (LOG_DRAFT_ROWS, RESTORE_DRAFT_ROWS):
        load_kernel(kernel)


@pytest.fixture(params=LAYOUTS, ids=[name.replace(" ", "-") for name in LAYOUTS])
def layout(request: pytest.FixtureRequest) -> Layout:
    torch.manual_seed(0)
    return LAYOUTS[request.param]


@pytest.fixture(params=[by_number, by_sampled], ids=["by-number", "by-what-was-sampled"])
def rejected(request: pytest.FixtureRequest) -> Rejected:
    return request.param("cuda")


def graph_of(call: Any) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize("replayed", [False, True])
def test_the_caches_are_as_if_rejected_drafts_had_never_been_written(
    layout: Layout, rejected: Rejected, replayed: bool
) -> None:
    step = Step(layout, True, KernelRows, "cuda")
    log, restore = lambda: step.rows.log(5), lambda: step.rows.restore(rejected)
    if replayed:
        log, restore = graph_of(log).replay, graph_of(restore).replay
    before = [cache.clone() for cache in step.caches]
    step.write([token for token in EVERYTHING if token not in REJECTED_TOKENS])
    expected = step.bytes()
    for cache, content in zip(step.caches, before, strict=True):
        cache.copy_(content)
    log()
    step.write(EVERYTHING)
    assert step.bytes() != expected
    restore()
    assert step.bytes() == expected
    assert_slots(step)
    # What was kept is used up.
    for slots, given in zip(step.slots, step.given, strict=True):
        slots.copy_(given)
    step.write(EVERYTHING)
    written = step.bytes()
    restore()
    assert step.bytes() == written


def test_rejected_drafts_become_zeros_and_nothing_else_does(layout: Layout, rejected: Rejected) -> None:
    step = Step(layout, False, KernelRows, "cuda")
    step.write(EVERYTHING)
    written = [cache.clone() for cache in step.caches]
    step.zero(REJECTED_TOKENS)
    expected = step.bytes()
    for cache, content in zip(step.caches, written, strict=True):
        cache.copy_(content)
    step.rows.restore(rejected)
    assert step.bytes() == expected
    assert_slots(step)
