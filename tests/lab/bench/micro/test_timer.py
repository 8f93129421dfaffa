"""What is timed: warm launches in rotation over more than the cache holds, as one graph; and copies beside them."""

from __future__ import annotations

import pytest
import torch

from vllm_hwplugin_lab.bench.micro._timer import Copies

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
def test_sets_are_together_larger_than_four_times_the_cache_where_that_fits(fake_timer, each, room, count):
    assert fake_timer(l2_bytes=60 * MIB).sets(each, room) == count
    assert fake_timer(l2_bytes=None).sets(2 * MIB, 1 << 34) == 128


def test_warm_launches_rotate_over_the_sets_in_whole_rounds_and_the_last_ones_output_is_kept(fake_timer):
    timer = fake_timer(cost=6e-4, compile_cost=100.0)
    order = []
    calls = timer.wrapped([lambda name=name: order.append(name) or name for name in "abc"])
    facts, output = timer.measure(calls)
    # 2 ms are 4 launches: two rounds. 40 ms are 11 replays.
    assert (facts["launches"], facts["repeats"], facts["sets"]) == (6, 11, 3)
    assert facts["seconds"] == facts["slowest"] == pytest.approx(6e-4)
    assert order[-6:] == list("abcabc")
    assert output == "c"


@pytest.mark.parametrize(("cost", "launches", "repeats"), [(1e-7, 512, 50), (1.0, 2, 5), (0.0, 512, 50)])
def test_the_number_of_launches_and_of_replays_has_bounds(fake_timer, cost, launches, repeats):
    timer = fake_timer(cost=cost)
    facts, _ = timer.measure(timer.wrapped([lambda: None, lambda: None]))
    assert (facts["launches"], facts["repeats"]) == (launches, repeats)


def test_what_the_warm_up_wrote_is_spoiled_before_the_timed_launches(fake_timer):
    timer = fake_timer(cost=1e-3)
    counts = []
    timer.measure(timer.wrapped([lambda: None]), lambda: counts.append(len(timer.launched)))
    # Two warm rounds and the capture of two launches come before.
    assert counts == [1 + 1 + 2]


@pytest.fixture
def by_bytes(fake_timer, quick, monkeypatch):
    """A device on which one of the two ways to copy costs more; notes where the sources lie."""

    def make(copy=1e-9, negate=1e-9):
        timer, real = fake_timer(l2_bytes=1 << 14), (torch.Tensor.copy_, torch.neg)
        timer.sources = set()

        def copied(target, source):
            timer.now += copy * source.numel()
            return real[0](target, source)

        def negated(source, out):
            timer.now += negate * source.numel()
            timer.sources.add(source.data_ptr())
            assert bool(source.any()), "nothing is copied from zeros"
            return real[1](source, out=out)

        monkeypatch.setattr(torch.Tensor, "copy_", copied)
        monkeypatch.setattr(torch, "neg", negated)
        return timer

    return make


@pytest.mark.parametrize(("copy", "negate"), [(1e-9, 3e-9), (3e-9, 1e-9)])
def test_the_bandwidth_counts_bytes_read_and_written_by_the_faster_way(by_bytes, copy, negate):
    # 4 bytes read and 4 written for each element.
    assert Copies(by_bytes(copy, negate)).bandwidth() == pytest.approx(8 / 1e-9)


def test_a_small_copy_moves_the_bytes_that_were_asked_for_over_several_places(by_bytes):
    timer = by_bytes()
    copies = Copies(timer)
    assert copies.seconds(4096) == pytest.approx(512 * 1e-9)
    assert len(timer.sources) == 3
    assert copies.seconds((1 << 17) + 2) is None, "the buffers cannot hold that"
