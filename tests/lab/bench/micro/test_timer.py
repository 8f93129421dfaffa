"""What is timed: warm launches in rotation, as one graph."""

from __future__ import annotations

import pytest

from vllm_hwplugin_lab.bench.micro._timer import Effort, measure

EFFORT = Effort(replay=6e-3, cell=3.05e-2, least=3, most=50)


def test_the_first_launch_of_each_set_is_not_timed(fake_timer):
    timer = fake_timer(cost=1e-3, compile_cost=100.0)
    done = measure(timer, timer.wrapped([lambda: "a", lambda: "b"]), EFFORT)
    assert done.timing.seconds == pytest.approx(1e-3)
    assert done.timing.slowest == pytest.approx(1e-3)


def test_the_launches_rotate_over_the_sets_and_the_last_ones_output_is_kept(fake_timer):
    timer = fake_timer(cost=1e-3)
    order = []
    calls = [lambda name=name: order.append(name) or name for name in "abc"]
    done = measure(timer, timer.wrapped(calls), EFFORT)
    assert (done.timing.launches, done.timing.repeats, timer.captured) == (6, 5, 6)
    assert order[-6:] == list("abcabc")
    assert done.output == "c"
    assert done.eager is None


def test_what_cannot_be_captured_is_timed_launch_by_launch_and_says_why(fake_timer):
    timer = fake_timer(cost=2e-3, refuse="it asks the host")
    done = measure(timer, timer.wrapped([lambda: "a", lambda: "b"]), EFFORT)
    assert done.eager == "it asks the host"
    assert done.timing.seconds == pytest.approx(2e-3)
    assert done.output == "b"


def test_what_the_warm_up_wrote_is_spoiled_before_the_timed_launches(fake_timer):
    timer = fake_timer(cost=1e-3)
    written = []
    counts = []

    def spoil():
        counts.append(len(timer.launched))
        written.clear()

    measure(timer, timer.wrapped([lambda: written.append(1)]), EFFORT, spoil)
    # Two warm rounds and the capture come before; the first replay, which is not timed, and five timed ones after.
    assert counts == [1 + 1 + 6]
    assert len(written) == 6 * 6
