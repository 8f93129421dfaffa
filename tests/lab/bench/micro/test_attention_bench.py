"""Times and errors of attention kernels, on the CPU with a made-up clock."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_hwplugin_lab.bench.micro import _attention_cases as cases
from vllm_hwplugin_lab.bench.micro._attention_bench import AttentionBench, kernels
from vllm_hwplugin_lab.bench.micro._attention_cases import AttentionCase
from vllm_hwplugin_lab.bench.micro._attention_inputs import Pool
from vllm_hwplugin_lab.bench.micro._copies import Copies

VERIFY = AttentionCase("decode", 3, 70, 4, 2, head_size=32)
PREFILL = AttentionCase("prefill", 2, 33, 33, 2, head_size=32)
#: Its requests have 47, 164, 34 and 40 keys.
UNEVEN = AttentionCase("decode", 4, 95, 4, 2, head_size=32, spread=1.0)
HUGE = AttentionCase("decode", 64, 4096, 1, 4, head_size=512)


class Plain:
    """Attention in float32, with a fault if asked for."""

    name = "plain"

    def __init__(self, fault=None):
        self.fault = fault

    def missing(self):
        return None

    def refuses(self, case):
        return None

    def prepare(self, batch):
        def call():
            case = batch.case
            for request in range(case.batch):
                keys, values = (one.float() for one in batch.gathered(request))
                if self.fault == "first block twice":
                    keys[16:32] = keys[:16]
                rows = slice(request * case.query, (request + 1) * case.query)
                length = case.lengths[request]
                ends = torch.arange(case.query) + length - case.query - int(self.fault == "mask")
                hidden = torch.arange(length)[None] > ends[:, None]
                for head in range(case.heads):
                    of = head * case.kv_heads // case.heads
                    scores = batch.query[rows, head].float() @ keys[:, of].T * batch.scale
                    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
                    batch.output[rows, head] = (weights @ values[:, of]).to(torch.bfloat16)
            if isinstance(self.fault, int):
                batch.output.unflatten(0, (case.batch, case.query))[self.fault] += 0.5
            return batch.output

        return call


class Lazy(Plain):
    """Writes when it is first launched only, as a kernel would that caches its answer."""

    def prepare(self, batch):
        call, done = super().prepare(batch), []

        def once():
            if len(done) < 2:
                done.append(call())
            return batch.output

        return once


@pytest.fixture
def bench(monkeypatch, fake_timer, quick):
    monkeypatch.setattr(cases, "CASES", {case.key: case for case in (VERIFY, PREFILL, UNEVEN, HUGE)})

    def make(*rivals):
        copies = Copies(fake_timer(), "cpu", 1 << 12, quick, large=1 << 16)
        return AttentionBench(copies, 0, 1 << 15, rivals={one.name: one for one in rivals})

    return make


@pytest.mark.parametrize(("case", "sets"), [(VERIFY, 2), (PREFILL, 2), (UNEVEN, 1)])
def test_a_right_kernel_is_as_close_as_sdpa(bench, case, sets):
    facts = bench(Plain()).measure(("plain", case.key))
    assert 0 < facts["error_ratio"] < 1.5
    assert (facts["sets"], facts["eager"]) == (sets, None)
    assert set(facts) >= {"seconds", "fastest", "slowest", "launches", "repeats", "copy_seconds"}


@pytest.mark.parametrize("fault", ["mask", "first block twice", -1])
def test_a_wrong_kernel_is_not_reported_as_right(bench, fault):
    assert bench(Plain(fault)).measure(("plain", VERIFY.key))["error_ratio"] > 2


@pytest.mark.parametrize("request_of_the_batch", range(4))
def test_the_longest_and_the_shortest_request_are_looked_at_too(bench, request_of_the_batch):
    assert bench(Plain(request_of_the_batch)).measure(("plain", UNEVEN.key))["error_ratio"] > 2


def test_the_error_is_that_of_the_timed_launches(bench):
    assert bench(Lazy()).measure(("plain", VERIFY.key))["error_ratio"] == math.inf


def test_a_case_that_the_cache_has_no_room_for_is_refused(bench):
    assert "no room" in bench(Plain()).refuses(("plain", HUGE.key))
    assert bench(Plain()).refuses(("plain", VERIFY.key)) is None


def test_sets_have_blocks_of_their_own_in_no_order():
    batches = Pool(1 << 16, "cpu", 0).batches(VERIFY, 2)
    used = [set(batch.block_table.flatten().tolist()) for batch in batches]
    assert [len(one) for one in used] == [3 * 5, 3 * 5]
    assert not used[0] & used[1]
    assert batches[0].block_table.flatten().tolist() != sorted(used[0])
    assert bool(batches[0].output.isnan().all())
    assert not torch.equal(batches[0].query, batches[1].query)
    assert float((batches[0].keys == 0).float().mean()) < 0.01


def test_requests_of_unequal_length_have_as_many_blocks_as_they_need():
    pool = Pool(59 * 16 * 2 * 32, "cpu", 0)
    assert pool.sets(UNEVEN) == 2
    batches = pool.batches(UNEVEN, 2)
    used = []
    for batch in batches:
        assert batch.seq_lens.tolist() == [47, 164, 34, 40]
        assert (batch.seq_lens.dtype, batch.block_table.dtype) == (torch.int32, torch.int32)
        rows = batch.block_table.tolist()
        assert [len(row) for row in rows] == [11] * 4
        assert [row[pages:] for row, pages in zip(rows, (3, 11, 3, 3), strict=True)] == [[0] * 8, [], [0] * 8, [0] * 8]
        used += [block for row, pages in zip(rows, (3, 11, 3, 3), strict=True) for block in row[:pages]]
        assert [batch.gathered(request)[0].shape[0] for request in range(4)] == [47, 164, 34, 40]
        keys, values = batch.gathered(1)
        assert torch.equal(keys[10 * 16], batch.keys[rows[1][10], 0])
        assert torch.equal(values[10 * 16], batch.values[rows[1][10], 0])
    assert len(set(used)) == len(used) == 40


def test_every_kernel_of_the_plan_is_there():
    assert set(kernels()) == {kernel for kernel, _ in cases.plan()}
