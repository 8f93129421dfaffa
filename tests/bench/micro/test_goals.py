"""What the kernels are held to, read from a results file."""

from __future__ import annotations

import pytest

from vllm_hwplugin.bench.micro import _attention_cases as attention
from vllm_hwplugin.bench.micro import _op_cases as ops
from vllm_hwplugin.bench.micro._goals import goals

BANDWIDTH = 4e12


def attention_seconds(share=0.7, prefill=1e-3):
    """Decode at `share` of the bandwidth; every prefill takes the same, at head size 256 too."""

    def seconds(kernel, key):
        case = attention.CASES[key]
        return case.kv_bytes / BANDWIDTH / share if case.kind == "decode" else prefill

    return seconds


def found(results, kind, seconds, change=lambda cell: None):
    made = results(kind, seconds)
    for cell in made["cells"]:
        change(cell)
    return {goal.text: goal for goal in goals(made)}


def the(goals_by_text, start):
    (goal,) = [goal for text, goal in goals_by_text.items() if text.startswith(start)]
    return goal


def test_all_attention_goals_are_met(results):
    every = found(results, "attention", attention_seconds())
    assert {goal.met for goal in every.values()} == {True}
    assert the(every, "decode").count == 90
    # Twice the operations in the same time as at head size 256.
    assert the(every, "prefill FLOP/s within 3 times those of FLASH_ATTN 3 at").worst.endswith(": 2.00")


@pytest.mark.parametrize(
    ("start", "key", "change"),
    [
        ("error within", "decode b8 c1024 q4 h8/4 d512", {"error_ratio": 2.1}),
        ("decode", "decode b8 c1024 q4 h8/4 d512", {"seconds": 1.0}),
        ("prefill not slower than FLEX_ATTENTION", "prefill b4 c2048 q2048 h8/4 d512", {"seconds": 1.1e-3}),
        ("prefill not slower than SDPA (", "prefill b1 c8192 q8192 h8/1 d512", {"seconds": 1.1e-3}),
        ("prefill not slower than SDPA, heads", "prefill b1 c8192 q8192 h8/1 d512", {"seconds": 1.1e-3}),
        (
            "prefill FLOP/s within 3 times those of FLASH_ATTN 3 at",
            "prefill b1 c8192 q8192 h8/1 d512",
            {"seconds": 7e-3},
        ),
        (
            "prefill FLOP/s within 3 times those of FLASH_ATTN 3, contiguous",
            "prefill b1 c8192 q8192 h8/1 d512",
            {"seconds": 7e-3},
        ),
    ],
)
def test_one_figure_that_misses_is_named(results, start, key, change):
    def spoil(cell):
        if (cell["kernel"], cell["case"]) == (attention.OURS, key):
            cell.update(change)

    goal = the(found(results, "attention", attention_seconds(), spoil), start)
    assert (goal.met, goal.count) == (False, goal.total - 1)
    assert goal.worst.startswith(key)


def test_what_failed_does_not_meet_the_goal(results):
    key = "decode b8 c1024 q4 h8/4 d512"

    def seconds(kernel, case):
        return None if (kernel, case) == (attention.OURS, key) else attention_seconds()(kernel, case)

    every = found(results, "attention", seconds)
    assert (the(every, "decode").met, the(every, "decode").count, the(every, "decode").total) == (False, 89, 90)
    assert the(every, "error").met is False


def test_no_goal_speaks_of_the_batches_as_served(results):
    served = {case.key for case in attention.AS_SERVED}

    def spoil(cell):
        if cell["case"] in served:
            cell.update(seconds=1.0, error_ratio=9.0)

    every = found(results, "attention", attention_seconds())
    assert (the(every, "error").total, the(every, "decode").total) == (94, 90)
    assert found(results, "attention", attention_seconds(), spoil) == every


def test_a_rival_that_is_not_there_says_nothing(results):
    every = found(
        results, "attention", lambda kernel, key: None if kernel == attention.FLEX else attention_seconds()(kernel, key)
    )
    assert the(every, "prefill not slower than FLEX").met is None
    assert the(every, "prefill not slower than SDPA (").met is True


def test_operations_are_held_to_the_bandwidth_where_they_move_many_bytes_and_to_parity(results):
    def seconds(kernel, key):
        case = ops.CASES[key]
        slow = case.op in ("topk_softmax", "fused_qk_norm_rope") or case.bytes_moved < 128 << 20
        return case.bytes_moved / BANDWIDTH / (0.5 if slow else 0.85)

    def spoil(cell):
        if cell["case"].startswith("merge_attn_states"):
            cell["mismatch"] = "wrong"

    every = found(results, "ops", seconds, spoil)
    # 8192 tokens with 4/1 heads move 22 MiB: no figure of memory.
    rotary = the(every, "rotary_embedding at 80% of the copy bandwidth, from 128 MiB on")
    assert (rotary.met, rotary.count, rotary.total) == (True, 5, 5)
    fused = the(every, "fused_qk_norm_rope at")
    assert (fused.met, fused.count, fused.total) == (False, 0, 3)
    assert fused.worst.endswith(": 0.50")
    assert the(every, "topk_softmax at").met is None
    assert the(every, "topk_softmax at").worst == "no goal: k selections in each row bound it, not memory"
    assert the(every, "rotary_embedding agrees").met is True
    assert (the(every, "merge_attn_states agrees").met, the(every, "merge_attn_states agrees").count) == (False, 0)
