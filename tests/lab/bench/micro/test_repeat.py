"""How often a kernel is launched, and over how many sets of inputs."""

from __future__ import annotations

import pytest

from vllm_hwplugin_lab.bench.micro import _timer
from vllm_hwplugin_lab.bench.micro._timer import Effort

MIB = 1 << 20


@pytest.mark.parametrize(
    ("each", "room", "count"),
    [
        (2 * MIB, 1 << 34, 121),  # 120 would be just four times L2
        (1 << 30, 1 << 34, 2),  # larger than L2: two all the same
        (1 << 34, 1 << 34, 1),  # two do not fit
        (1 << 35, 1 << 34, 1),  # one is taken even where it is larger
        (4096, 1 << 34, 128),  # too small to fill it: the most
        (32 * MIB, 96 * MIB, 3),  # as many as fit
    ],
)
def test_sets_are_together_larger_than_four_times_the_cache_where_that_fits(each, room, count):
    assert _timer.sets(each, 60 * MIB, room, Effort()) == count


@pytest.mark.parametrize(
    ("seconds", "sets", "count"),
    [
        (1e-6, 128, 512),  # capped
        (1e-4, 3, 21),  # 2 ms are 20 launches: whole rounds
        (1e-2, 2, 2),  # long already
        (1.0, 1, 1),
        (0.0, 4, 512),  # a clock that is too coarse
    ],
)
def test_launches_are_whole_rounds_over_the_sets(seconds, sets, count):
    assert _timer.launches(seconds, sets, Effort()) == count


@pytest.mark.parametrize(("seconds", "count"), [(1e-6, 50), (2e-3, 20), (1.0, 5), (0.0, 50)])
def test_repeats_fill_the_time_of_a_cell(seconds, count):
    assert _timer.repeats(seconds, Effort()) == count


def test_the_summary_is_of_one_launch():
    found = _timer.summary([4.0, 2.0, 9.0], 2)
    assert found == _timer.Timing(seconds=2.0, fastest=1.0, slowest=4.5, launches=2, repeats=3)
