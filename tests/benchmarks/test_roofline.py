# SPDX-License-Identifier: Apache-2.0
"""What attention is held to, from a results file alone: the least time of a shape, and what it is bound by."""

from __future__ import annotations

import pytest

from benchmarks.pages import goals
from vllm_hwplugin_lab.bench.micro import attention_cases as cases
from vllm_hwplugin_lab.bench.micro import find, roofline

COPY = 4e12  # of the fixture's process

# 2 * 32768 keys and values of 1 KiB; queries and results besides.
KV = 64 * 2 * 32768 * 1024


@pytest.mark.parametrize(
    ("case", "seconds", "bound"),
    [
        ("decode b64 c32768 q1 h8/1 d512", (KV + 64 * 2 * 8 * 1024) / COPY, "memory"),
        # Queries 0 to 31 of a request see 32737 to 32768 keys; a key costs a head 512 products and sums twice.
        ("decode b64 c32768 q32 h8/1 d512", 64 * 8 * 32 * (32768 - 15.5) * 2 * 2 * 512 / 700e12, "products"),
        ("decode b1 c1024 q1 h8/1 d512", 6e-6, "launches"),
    ],
)
def test_the_least_time_follows_from_the_shape_and_the_copy(kernels, case, seconds, bound):
    results = kernels("attention", lambda kernel, key: 1e-3)
    found = roofline(results, cases.CASES[case], find(results, cases.OURS, case))
    assert found == (pytest.approx(seconds), bound)


def test_a_goal_counts_the_shapes_within_its_factor_by_what_binds_them(kernels):
    late = {"decode b64 c32768 q1 h8/1 d512", "decode b1 c1024 q1 h8/1 d512"}

    def taken(kernel, key):
        case = cases.CASES[key]
        return max(case.bytes_each / COPY, case.flops / 700e12, 6e-6) * (1.68 if key in late else 1.66)

    found = [goal for goal in goals(kernels("attention", taken)) if "roofline" in goal.text or "bound by" in goal.text]
    assert [(goal.met, goal.total - goal.count) for goal in found] == [(False, 2), (False, 1), (True, 0), (False, 1)]
    assert found[0].total == sum(goal.total for goal in found[1:]) == len(cases.DECODE)
