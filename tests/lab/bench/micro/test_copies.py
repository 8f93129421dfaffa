"""The yardstick: bytes read and written by a copy."""

from __future__ import annotations

import pytest
import torch

from vllm_hwplugin_lab.bench.micro import _copies
from vllm_hwplugin_lab.bench.micro._copies import Copies


class ByBytes:
    """A device on which one of the two ways to copy costs more; notes the tensors."""

    def __init__(self, monkeypatch, copy, negate):
        self.now, self.sources = 0.0, set()
        real = torch.neg

        def neg(source, out):
            self.now += negate * source.numel()
            self.sources.add(source.data_ptr())
            return real(source, out=out)

        monkeypatch.setattr(torch, "neg", neg)
        timer = self

        def seconds(replay, repeats):
            found = []
            for _ in range(repeats):
                start = timer.now
                replay()
                found.append(timer.now - start)
            return found

        self.seconds = seconds
        self.copy = copy
        real_copy = torch.Tensor.copy_

        def copy_(target, source):
            self.now += self.copy * source.numel()
            return real_copy(target, source)

        monkeypatch.setattr(torch.Tensor, "copy_", copy_)

    def capture(self, calls):
        def replay():
            for call in calls:
                call()

        return replay, None


@pytest.mark.parametrize(("copy", "negate"), [(1e-9, 3e-9), (3e-9, 1e-9)])
def test_the_bandwidth_counts_bytes_read_and_written_by_the_faster_way(monkeypatch, quick, copy, negate):
    copies = Copies(ByBytes(monkeypatch, copy, negate), "cpu", 1 << 10, quick, large=1 << 16)
    # 4 bytes read and 4 written for each element.
    assert copies.bandwidth() == pytest.approx(8 / 1e-9)


def test_a_small_copy_moves_the_bytes_that_were_asked_for_over_several_places(monkeypatch, quick):
    device = ByBytes(monkeypatch, 1e-9, 1e-9)
    copies = Copies(device, "cpu", 1 << 14, quick, large=1 << 16)
    assert copies.seconds(4096) == pytest.approx(512 * 1e-9)
    assert len(device.sources) == 3
    assert copies.known() == [{"bytes": 4096, "seconds": pytest.approx(512 * 1e-9)}]


def test_what_the_buffers_cannot_hold_has_no_time(monkeypatch, quick):
    copies = Copies(ByBytes(monkeypatch, 1e-9, 1e-9), "cpu", 1 << 10, quick, large=1 << 16)
    assert copies.seconds((1 << 17) + 2) is None


def test_nothing_is_copied_from_zeros(monkeypatch, quick):
    copies = Copies(ByBytes(monkeypatch, 1e-9, 1e-9), "cpu", 1 << 10, quick, large=1 << 16)
    assert float((copies._source == 0).float().mean()) < 0.01
    assert _copies.LARGE >= 2 << 30
