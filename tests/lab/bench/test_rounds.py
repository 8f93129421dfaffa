"""From what an engine answers to an entry of the results file, and which part of a run counts."""

from __future__ import annotations

import pytest

from vllm_hwplugin_lab.bench import Job, Outcome, Workload
from vllm_hwplugin_lab.bench._serving import Moment, Window, added
from vllm_hwplugin_lab.bench.results import phases_entry, rounds_entry
from vllm_hwplugin_lab.bench.table import Row

JOB = Job("x", True, {}, {}, (Workload("w", ((1,),), max_tokens=8, batch=1),))


class Engine:
    """Half a second, one step and six tokens further at each look."""

    def __init__(self):
        self.looks = 0

    def __call__(self):
        self.looks += 1
        return Moment(at=self.looks / 2, steps=self.looks, tokens=6 * self.looks)


def test_a_window_begins_with_the_last_first_token_and_ends_with_the_first_last_one():
    engine = Engine()
    window = Window(3, engine)
    for _ in range(2):
        window.begun()
    assert engine.looks == 0
    window.begun()
    for _ in range(9):
        engine()
    window.finished()
    window.finished()
    assert window.facts() == {"seconds": 5.0, "steps": 10, "tokens": 60}
    assert engine.looks == 11


def test_a_batch_that_never_was_whole_counts_nothing():
    window = Window(2, Engine())
    window.begun()
    window.finished()
    window.begun()
    assert window.facts() == {"seconds": 0.0, "steps": 0, "tokens": 0}
    assert added([window.facts(), {"seconds": 2.0, "steps": 3, "tokens": 4}])["steps"] == 3


def measured(number, seconds, steps, tokens, accepted):
    return {
        "event": "measured",
        "workload": "w",
        "round": number,
        "host_us": 500.0 + number,
        "seconds": seconds,
        "steps": steps,
        "tokens": tokens,
        "drafts": 10,
        "accepted_per_position": accepted,
    }


def test_the_best_step_counts_and_the_acceptance_of_all_rounds():
    events = (
        # The lucky round is not the fast one.
        measured(0, 0.4, 100, 300, [10, 10]),
        measured(1, 0.2, 100, 200, [6, 4]),
        measured(2, 0.3, 100, 250, [8, 6]),
        {"event": "profiled", "workload": "w", "gpu_busy_ms": 1.5},
    )
    entry = rounds_entry(Outcome(JOB, events, 1.0), "w")
    assert entry["step_ms"]["all"] == pytest.approx([4.0, 2.0, 3.0])
    assert (entry["step_ms"]["best"], entry["step_ms"]["median"]) == pytest.approx((2.0, 3.0))
    assert entry["tokens_per_step"] == pytest.approx(2.5)
    assert entry["tokens_per_second"]["best"] == pytest.approx(1250)
    assert entry["tokens_per_second"]["median"] == pytest.approx(2500 / 3)
    assert entry["tokens_per_second"]["all"] == pytest.approx([750, 1000, 2500 / 3])
    assert entry["host_us"] == [500.0, 501.0, 502.0]
    assert entry["acceptance_per_position"] == [0.8, pytest.approx(2 / 3)]
    assert entry["gpu_idle_share"] == pytest.approx(0.25)


def test_the_phases_are_those_of_the_round_whose_steps_were_the_quickest():
    def phases(number, us):
        return {**measured(number, us / 1e6, 1, 2, [8, 4]), "event": "phases", "rows": [(0, "step", 1.0, us)]}

    events = (phases(0, 3000.0), phases(1, 2000.0), phases(2, 4000.0))
    entry = phases_entry(Outcome(JOB, events, 1.0), "w")
    assert (entry["phases"][0][3], entry["host_us"], entry["step_ms"]) == (2000.0, 501.0, pytest.approx(2.0))
    assert (entry["rounds"], entry["drafts"]) == (3, 30)
    assert phases_entry(Outcome(JOB, (), 1.0), "w") is None


@pytest.mark.parametrize(("synthetic", "ratio"), [(2.5, 2.0), (None, 1.5)])
def test_a_coin_that_fell_better_on_one_side_is_no_gain(synthetic, ratio):
    sides = {
        "stock": {"rounds": 2, "step_ms": {"best": 4.0}, "tokens_per_step": 4.0, "tokens_per_second": {"best": 1000.0}},
        "patched": {
            "rounds": 2,
            "step_ms": {"best": 2.0},
            "tokens_per_step": 3.0,
            "tokens_per_second": {"best": 1500.0},
        },
    }
    row = Row({"synthetic_acceptance_length": synthetic}, "1", sides)
    assert row.ratio() == ratio
    # One of them failed half-way: the best of fewer rounds is worse by chance.
    sides["stock"]["rounds"] = 1
    assert row.ratio() is None
