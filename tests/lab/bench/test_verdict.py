"""What a comparison ends with: which sides are compared, by what, and the cause."""

from __future__ import annotations

import pytest

from vllm_hwplugin_lab.bench import read_results
from vllm_hwplugin_lab.bench.table import of_engines, of_loads, verdict, worth

pytest.importorskip("numpy")

from benchmarks.pages import RESULTS


def load(best, slowest=None, busy=None, rounds=2, kinds=()):
    speeds = {"best": best, "all": [best, slowest or best]}
    return {"tokens_per_second": speeds, "gpu_busy": busy, "rounds": rounds, "kinds": list(kinds)}


def compared(**sides):
    named = {name.replace("_", "-"): {"loads": dict(enumerate(loads))} for name, loads in sides.items()}
    return list(of_loads({"k": 3, "sides": named}))


def test_sides_of_one_runner_are_compared_where_both_have_all_their_rounds():
    some = [load(1), load(2), load(4)]
    (one,) = compared(stock=some, mrv2_patched=some, mrv2=[load(1, busy=0.5), None, load(2, rounds=1)])
    assert (one.sides, one.ratios, one.busy) == (("mrv2-patched", "mrv2"), [1.0], [[], [0.5]])
    assert compared(stock=some, mrv2_patched=some) == compared(server=some) == []


@pytest.mark.parametrize(
    ("ratios", "nothing", "loss"),
    [([0.98, 1.02], True, False), ([1.01, 1.5], False, False), ([0.9, 1.5], False, True), ([0.9, 0.91], False, True)],
)
def test_what_is_nothing_and_what_is_a_loss(ratios, nothing, loss):
    assert ("nothing" in worth(ratios), "loss" in worth(ratios)) == (nothing, loss)


def test_the_cause_is_the_gpu_or_the_steps_that_were_left_to_vllm():
    steps = [
        {"steps": 3, "paths": {"a drafting": "prompt", "b steps": "served"}},
        {"steps": 1, "paths": {"a drafting": "no_free_row"}},
        {"steps": 12, "paths": {"a drafting": "prompt"}},
    ]

    def cause(before, kinds=(), slowest=None):
        (one,) = compared(patched=[load(101, slowest, 0.6, kinds=kinds)], stock=[load(100, None, before)])
        return verdict(one, "cuda")

    assert "leaves nothing to win" in cause(0.95, steps)
    assert "left 81% of the steps to vLLM, most of them for `prompt`" in cause(0.6, steps)
    assert "bench --profile" in cause(0.6)
    for words in ("1.35 times apart", "not known"):
        assert [words in cause(0.6, slowest=slowest) for slowest in (None, 75)] == [False, True]
    (gain,) = compared(patched=[load(200, busy=0.9)], stock=[load(100, busy=0.5)])
    assert "50% of the time with stock, 90% with patched" in verdict(gain, "cuda")
    (unknown,) = compared(patched=[load(200)], stock=[load(100)])
    assert ["CUDA graphs" in verdict(unknown, device) for device in ("cpu", "cuda")] == [True, False]


def test_each_case_of_a_file_of_engines_has_its_own():
    results = read_results((RESULTS / "engines-h200-vllm-0.26.0-eagle3-8b.json").read_text())
    v1, v2 = of_engines(results)
    assert (v1.case, v1.sides, v2.sides) == ("8b eagle3 k=3", ("patched", "stock"), ("mrv2-patched", "mrv2"))
    assert [len(one.ratios) for one in (v1, v2)] == [3, 3]
    assert "leaves nothing to win" in verdict(v1, "cuda")
