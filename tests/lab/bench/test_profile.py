from __future__ import annotations

import pytest

from vllm_hwplugin_lab.bench._profile import DRAFT, OTHER_STEP, STEP, counts_per_step


def span(name, category, start, length):
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": length}


def step(start, *, graphs, kernels, draft_kernels, name=STEP):
    """A step of 100 us: the target's launches first, the draft phase from 50 us to 90 us."""
    yield span(name, "user_annotation", start, 95)
    yield from (span("cudaGraphLaunch", "cuda_runtime", start + 1 + i, 1) for i in range(graphs))
    yield from (span("cudaLaunchKernelExC_v11060", "cuda_runtime", start + 20 + i, 1) for i in range(kernels))
    yield span(DRAFT, "user_annotation", start + 50, 40)
    yield from (span("cuLaunchKernelEx", "cuda_driver", start + 51 + i, 1) for i in range(draft_kernels))
    yield span("cudaMemcpyAsync", "cuda_runtime", start + 91, 1)
    # Two kernels that overlap by 10 us: 40 us of work.
    yield span("gemm", "kernel", start + 10, 30)
    yield span("norm", "kernel", start + 30, 20)


def test_medians_of_the_verify_steps_alone():
    trace = [
        *step(0, graphs=0, kernels=25, draft_kernels=30, name=OTHER_STEP),
        *step(100, graphs=1, kernels=3, draft_kernels=5),
        *step(200, graphs=1, kernels=3, draft_kernels=5),
        *step(300, graphs=1, kernels=9, draft_kernels=7),
        *step(400, graphs=0, kernels=25, draft_kernels=30, name=OTHER_STEP),
        # Not work: the profiler's own picture of the annotations on the GPU, and an operator of torch.
        span(STEP, "gpu_user_annotation", 100, 300),
        span("aten::add", "cpu_op", 130, 2),
        {"ph": "M", "name": "process_name"},
    ]
    counts = counts_per_step(trace)
    assert counts == {
        "steps": 3,
        "step_ms_profiled": pytest.approx(0.1),
        "gpu_busy_ms": pytest.approx(0.04),
        "graph_launches": 1,
        "kernel_launches": 8,
        "copies": 1,
        "draft_graph_launches": 0,
        "draft_kernel_launches": 5,
    }


def test_the_last_step_has_no_end_and_is_left_out():
    assert counts_per_step(list(step(0, graphs=1, kernels=1, draft_kernels=1))) == {"steps": 0}
