"""What a comparison ends with: which sides are compared, by what, and the cause."""

from __future__ import annotations

import pytest

from vllm_hwplugin_lab.bench import read_results
from vllm_hwplugin_lab.bench.table import of_engines, of_loads, outcome, speedup, verdict, worth

pytest.importorskip("numpy")

from benchmarks.pages import RESULTS


def load(best, slowest=None, busy=None, rounds=2, kinds=()):
    speeds = {"best": best, "all": [best, best if slowest is None else slowest]}
    return {"tokens_per_second": speeds, "gpu_busy": busy, "rounds": rounds, "kinds": list(kinds)}


def compared(**sides):
    named = {name.replace("_", "-"): {"loads": dict(enumerate(loads))} for name, loads in sides.items()}
    return list(of_loads({"settings": {"method": "mtp"}, "cases": [{"k": 3, "sides": named}]}))


def test_sides_of_one_runner_are_compared_where_both_have_all_their_rounds():
    some = [load(1), load(2), load(4)]
    (one,) = compared(stock=some, mrv2_patched=some, mrv2=[load(1, busy=0.5), None, load(2, rounds=1)])
    assert (one.case, one.sides) == ("mtp k=3", ("mrv2-patched", "mrv2"))
    assert (one.ratios, one.busy) == ((1.0,), [[], [0.5]])
    assert compared(stock=some, mrv2_patched=some) == compared(server=some) == []


@pytest.mark.parametrize(
    ("ratios", "apart", "found"),
    [
        ([0.98, 1.02], 1.0, "same"),
        ([1.01, 1.5], 1.0, "faster"),
        ([0.9, 1.5], 1.0, "mixed"),
        ([0.9, 1.0], 1.0, "mixed"),
        ([0.9, 0.91], 1.0, "slower"),
        # What rounds of one side differ by is no difference of the sides.
        ([0.9, 1.1], 1.2, "unknown"),
        ([0.9, 1.5], 1.2, "faster"),
        ([0.7, 1.1], 1.2, "mixed"),
    ],
)
def test_how_sides_differ(ratios, apart, found):
    assert outcome(ratios, apart) == found


def test_the_words_of_outcomes_differ():
    """A loss at some load is not a loss, and noise is neither."""
    said = {worth(ratios).partition("×")[2] for ratios in ([0.98, 1.02], [1.1, 1.5], [0.9, 1.5], [0.9, 0.91])}
    assert len(said) == 4


@pytest.mark.parametrize("open_loop", [{"request_rate": 4.0}, {"request_rate": 0, "concurrency": 0}])
def test_requests_at_a_rate_decide_the_tokens_and_not_how_long_one_waits(open_loop):
    before, after = (load(100) | open_loop | {"round_e2e_ms": [ms, 2 * ms]} for ms in (300.0, 200.0))
    assert speedup(after, before) == pytest.approx(1.5)
    assert speedup(load(150) | {"request_rate": 0}, load(100)) == pytest.approx(1.5)


def test_rounds_of_which_one_gave_nothing_say_nothing():
    (one,) = compared(stock=[load(100, 0)], patched=[load(200)])
    assert one.outcome == "unknown"
    assert speedup(load(0), load(100)) is speedup(load(100), load(0)) is None


def test_two_runs_are_as_far_apart_as_the_speed_of_their_host():
    runs = {"before": [load(100) | {"host_us": [500.0, 510.0]}], "after": [load(120) | {"host_us": [400.0, 404.0]}]}
    (one,) = compared(**runs)
    assert (one.sides, one.outcome) == (("after", "before"), "unknown")
    assert one.apart == pytest.approx(505 / 402)
    # Sides of one run take turns on one host.
    (one,) = compared(stock=runs["before"], patched=runs["after"])
    assert one.outcome == "faster"


def test_the_cause_is_the_gpu_or_the_steps_that_were_left_to_vllm():
    steps = [
        {"steps": 3, "paths": {"a drafting": "prompt", "b steps": "served"}},
        {"steps": 1, "paths": {"a drafting": "no_free_row"}},
        {"steps": 12, "paths": {"a drafting": "prompt"}},
    ]

    def cause(before, kinds=(), slowest=None):
        (one,) = compared(patched=[load(101, slowest, 0.6, kinds=kinds)], stock=[load(100, None, before)])
        return verdict(one, "cuda")

    assert "nothing to gain" in cause(0.95, steps)
    assert "left 81% of the steps to vLLM, most of them for `prompt`" in cause(0.6, steps)
    assert "bench --profile" in cause(0.6)
    for words in ("up to 1.35×", "unknown"):
        assert [words in cause(0.6, slowest=slowest) for slowest in (None, 75)] == [False, True]
    (gain,) = compared(patched=[load(200, busy=0.9)], stock=[load(100, busy=0.5)])
    assert "50% of the time (unpatched), 90% (patched)" in verdict(gain, "cuda")
    (unknown,) = compared(patched=[load(200)], stock=[load(100)])
    assert ["CUDA graphs" in verdict(unknown, device) for device in ("cpu", "cuda")] == [True, False]


def test_each_case_of_a_file_of_engines_has_its_own():
    results = read_results((RESULTS / "engines-h200-vllm-0.26.0-eagle3-8b.json").read_text())
    v1, v2 = of_engines(results)
    assert (v1.case, v1.sides, v2.sides) == ("8b eagle3 k=3", ("patched", "stock"), ("mrv2-patched", "mrv2"))
    assert [len(one.ratios) for one in (v1, v2)] == [3, 3]
    assert "nothing to gain" in verdict(v1, "cuda")
