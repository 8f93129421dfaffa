"""What the kernels are held to, and why decode shapes miss it: one figure that is spoiled is the one that is named."""

from __future__ import annotations

import pytest

from benchmarks.pages import OPS_BYTES, RESULTS, goals, misses, read_all
from vllm_hwplugin_lab.bench.micro import attention_cases as attention
from vllm_hwplugin_lab.bench.micro import op_cases as ops

BANDWIDTH = 4e12
FEW = "decode b1 c1024 q32 h8/1 d512"  # 2 MiB, 256 rows
MANY = "decode b8 c8192 q16 h8/1 d512"  # 128 MiB, 128 rows
NEXT = "decode b8 c8192 q8 h8/1 d512"  # 128 MiB, 64 rows
EDGE = "decode b1 c32768 q1 h8/1 d512"  # 64 MiB
FILES = [*read_all(RESULTS, "kernels-attention-"), *read_all(RESULTS, "kernels-ops-")]
PROMPT = "prefill b1 c8192 q8192 h8/1 d512"


def at(share, prefill=1e-3, shares=None):
    """Decode at `share` of the bandwidth; every prefill takes the same, at head size 256 too."""

    def seconds(kernel, key):
        case = attention.CASES[key]
        own = (shares or {}).get(key, share) if kernel == attention.OURS else share
        return case.kv_bytes / BANDWIDTH / own if case.kind == "decode" else prefill

    return seconds


def missed(results):
    return {goal.text.partition(" (")[0]: goal for goal in goals(results) if not goal.met}


@pytest.mark.parametrize(
    ("start", "key", "change"),
    [
        ("error within", "decode b8 c1024 q4 h8/4 d512", {"error_ratio": 2.1}),
        ("decode", "decode b8 c1024 q4 h8/4 d512", {"seconds": 1.0}),
        ("prefill not slower than FLEX", PROMPT, {"seconds": 1.1e-3}),
        ("prefill FLOP/s within 3 times those of FLASH_ATTN 3 at", PROMPT, {"seconds": 7e-3}),
    ],
)
def test_one_figure_that_misses_is_named(kernels, start, key, change):
    found = kernels("attention", at(0.7))
    assert missed(found) == {}
    for cell in found["cells"]:
        if (cell["kernel"], cell["case"]) == (attention.OURS, key):
            cell.update(change)
    (goal,) = [goal for text, goal in missed(found).items() if text.startswith(start)]
    assert (goal.met, goal.count) == (False, goal.total - 1)
    assert goal.worst.startswith(key)


def test_what_failed_meets_no_goal_and_a_rival_that_is_not_there_says_nothing(kernels):
    def seconds(kernel, key):
        return None if (kernel, key) in ((attention.OURS, FEW), (attention.FLEX, PROMPT)) else at(0.7)(kernel, key)

    found = missed(kernels("attention", seconds))
    assert set(found) == {"error within 2 times SDPA's", "decode and verification at 60% of the copy bandwidth or more"}
    nobody = kernels("attention", lambda kernel, key: None if kernel == attention.FLEX else at(0.7)(kernel, key))
    assert {goal.met for goal in missed(nobody).values()} == {None}


def test_no_goal_speaks_of_batches_as_served(kernels):
    found = kernels("attention", at(0.7))
    before = goals(found)
    for cell in found["cells"]:
        if cell["case"] in {case.key for case in attention.AS_SERVED}:
            cell.update(seconds=1.0, error_ratio=9.0)
    assert goals(found) == before


def test_operations_are_held_to_the_bandwidth_where_they_move_many_bytes_and_to_parity(kernels):
    def seconds(kernel, key):
        case = ops.CASES[key]
        slow = case.op in ("topk_softmax", "fused_qk_norm_rope") or case.bytes_moved < 128 << 20
        return case.bytes_moved / BANDWIDTH / (0.5 if slow else 0.85)

    found = kernels("ops", seconds)
    for cell in found["cells"]:
        if cell["case"].startswith("merge_attn_states"):
            cell["mismatch"] = "wrong"
    wrong = {text.split()[0]: goal for text, goal in missed(found).items()}
    assert {op: goal.met for op, goal in wrong.items()} == {
        "fused_qk_norm_rope": False,
        "merge_attn_states": False,
        "topk_softmax": None,  # k selections in each row bound it, not memory
    }


def test_each_shape_that_misses_is_in_the_first_group_that_fits(kernels):
    found = misses(kernels("attention", at(0.6, 2e-3, {FEW: 0.1, MANY: 0.4, NEXT: 0.5, EDGE: 0.59})))
    groups = [[miss.case.key for miss in group] for group in (found.small, found.arithmetic, found.rest)]
    assert groups == [[FEW], [MANY], [EDGE, NEXT]]
    (miss,) = found.arithmetic
    # Four operations for each of the 8 heads, 512 elements and 16 tokens, by the 2 KiB of a key and its value.
    each = attention.CASES[MANY].flops / attention.CASES[MANY].kv_bytes
    assert each == pytest.approx(128, rel=2e-3)
    assert (miss.share, miss.needed) == (pytest.approx(0.4), pytest.approx(each * 0.6 * BANDWIDTH))
    assert found.prefill == pytest.approx(max(case.flops for case in attention.PREFILL) / 2e-3)


def test_the_misses_of_the_results_file_are_those_that_its_goal_counts():
    for file in read_all(RESULTS, "kernels-attention-"):
        (goal,) = [goal for goal in goals(file.results) if goal.text.startswith("decode")]
        found = misses(file.results)
        assert len(found.small) + len(found.arithmetic) + len(found.rest) == goal.total - goal.count


def test_operations_are_held_to_memory_where_the_cache_cannot_serve():
    for op in ops.OPS:
        found = {case.bytes_moved >= OPS_BYTES for case in ops.CASES.values() if case.op == op}
        assert found == ({False} if op in ops.NOT_BY_MEMORY else {False, True}), op
    assert all(process["l2_bytes"] * 2 < OPS_BYTES for file in FILES for process in file.results["processes"])
