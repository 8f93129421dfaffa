# SPDX-License-Identifier: Apache-2.0
"""The kernels for draft rows on a GPU, byte by byte, in every layout and from a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm_hwplugin.nwor.rows import KernelRows, Rejected  # noqa: E402
from vllm_hwplugin.ops.compile.spec import KERNELS  # noqa: E402

from ..nwor.steps import (  # noqa: E402
    LAYOUTS,
    Layout,
    Step,
    assert_passes_over_what_is_no_slot,
    assert_restores,
    assert_zeroes,
    by_number,
    by_sampled,
)
from .ops.kernel_checks import load_kernel  # noqa: E402

pytestmark = pytest.mark.gpu
COUNTS = {"by-number": by_number, "by-what-was-sampled": by_sampled}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    for kernel in (KERNELS["log_draft_rows"], KERNELS["restore_draft_rows"]):
        load_kernel(kernel)


def cases(first: str) -> pytest.MarkDecorator:
    """Every layout with both counts of what was rejected; the sanitizer has each layout once, the counts in turn."""
    counts = [first, *(name for name in COUNTS if name != first)]
    made = [
        pytest.param(
            layout,
            COUNTS[count],
            marks=[pytest.mark.sanitizer] if index % 2 == counts.index(count) else [],
            id=f"{name.replace(' ', '-')}-{count}",
        )
        for index, (name, layout) in enumerate(LAYOUTS.items())
        for count in counts
    ]
    return pytest.mark.parametrize(("layout", "rejected"), made)


def graph_of(call: Callable[[], None]) -> Callable[[], None]:
    """Its replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def restoring(
    layout: Layout, rejected: Callable[[str], Rejected]
) -> tuple[Step, Callable[[], None], Callable[[], None]]:
    torch.manual_seed(0)
    step, counts = Step(layout, True, KernelRows, "cuda"), rejected("cuda")
    return step, lambda: step.rows.log(5), lambda: step.rows.restore(counts)


@cases("by-number")
def test_the_caches_are_as_if_rejected_drafts_had_never_been_written(
    layout: Layout, rejected: Callable[[str], Rejected]
) -> None:
    assert_restores(*restoring(layout, rejected))


@pytest.mark.parametrize("rejected", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_nor_where_both_launches_are_graphs(layout: Layout, rejected: Callable[[str], Rejected]) -> None:
    step, log, restore = restoring(layout, rejected)
    assert_restores(step, graph_of(log), graph_of(restore))


@cases("by-what-was-sampled")
def test_rejected_drafts_become_zeros_and_nothing_else_does(
    layout: Layout, rejected: Callable[[str], Rejected]
) -> None:
    torch.manual_seed(0)
    step, counts = Step(layout, False, KernelRows, "cuda"), rejected("cuda")
    assert_zeroes(step, lambda: step.rows.restore(counts))


@pytest.mark.sanitizer
@pytest.mark.parametrize("keep", [True, False], ids=["restore", "scrub"])
def test_what_no_step_has_mapped_is_passed_over(keep: bool) -> None:
    torch.manual_seed(0)
    step, counts = Step(LAYOUTS["token by token"], keep, KernelRows, "cuda"), by_number("cuda")
    log = (lambda: step.rows.log(5)) if keep else (lambda: None)
    assert_passes_over_what_is_no_slot(step, log, lambda: step.rows.restore(counts))
