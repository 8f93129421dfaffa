"""Times and errors of attention kernels, on the CPU with a made-up clock."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_hwplugin_lab.bench.micro import _attention_cases as cases
from vllm_hwplugin_lab.bench.micro._attention_bench import AttentionBench, Pool, pool_elements
from vllm_hwplugin_lab.bench.micro._attention_cases import AttentionCase
from vllm_hwplugin_lab.bench.micro._supervise import Refused
from vllm_hwplugin_lab.bench.micro._timer import Copies

VERIFY = AttentionCase("decode", 3, 70, 4, 2, head_size=32)
PREFILL = AttentionCase("prefill", 2, 33, 33, 2, head_size=32)
#: Its requests have 47, 164, 34 and 40 keys.
UNEVEN = AttentionCase("decode", 4, 95, 4, 2, head_size=32, spread=1.0)
HUGE = AttentionCase("decode", 64, 4096, 1, 4, head_size=512)


def plain(fault=None, launches=None):
    """Attention in float32, with a fault if asked for; after some launches it writes nothing any more."""

    def prepare(batch):
        left = [launches]

        def call():
            case = batch.case
            if left[0] == 0:
                return batch.output
            left[0] = None if launches is None else left[0] - 1
            for request, length in enumerate(case.lengths):
                pair = (
                    one.float().repeat_interleave(case.heads // case.kv_heads, 1) for one in batch.gathered(request)
                )
                keys, values = (one.transpose(0, 1) for one in pair)
                if fault == "first block twice":
                    keys[:, 16:32] = keys[:, :16]
                rows = slice(request * case.query, (request + 1) * case.query)
                seen = torch.ones(case.query, length, dtype=torch.bool).tril(length - case.query - (fault == "mask"))
                query = batch.query[rows].float().transpose(0, 1)
                answer = torch.nn.functional.scaled_dot_product_attention(query, keys, values, seen, scale=batch.scale)
                batch.output[rows] = answer.transpose(0, 1).to(torch.bfloat16)
            if isinstance(fault, int):
                batch.output.unflatten(0, (case.batch, case.query))[fault] += 0.5
            return batch.output

        return call

    return prepare


@pytest.fixture
def measured(monkeypatch, fake_timer, quick):
    """``measured(kernel, case)``: what the results file says of it."""
    monkeypatch.setattr(cases, "CASES", {case.key: case for case in (VERIFY, PREFILL, UNEVEN, HUGE)})

    def measure(kernel, case):
        timer = fake_timer(l2_bytes=1 << 12)
        bench = AttentionBench(timer, Copies(timer), 0, 1 << 15, {"plain": kernel})
        return bench.measure("plain", case.key)

    return measure


@pytest.mark.parametrize(("case", "sets"), [(VERIFY, 2), (PREFILL, 2), (UNEVEN, 1)])
def test_a_right_kernel_is_as_close_as_sdpa(measured, case, sets):
    facts = measured(plain(), case)
    assert 0 < facts["error_ratio"] < 1.5
    assert facts["sets"] == sets
    assert set(facts) >= {"seconds", "fastest", "slowest", "launches", "repeats", "copy_seconds"}


@pytest.mark.parametrize(
    ("fault", "case"), [("mask", VERIFY), ("first block twice", VERIFY), *((number, UNEVEN) for number in range(4))]
)
def test_a_wrong_kernel_is_not_reported_as_right_in_whichever_request_it_is_wrong(measured, fault, case):
    assert measured(plain(fault), case)["error_ratio"] > 2


def test_the_error_is_that_of_the_timed_launches(measured):
    assert measured(plain(launches=2), VERIFY)["error_ratio"] == math.inf


def test_a_case_that_the_cache_has_no_room_for_is_refused(measured):
    with pytest.raises(Refused, match="needs a cache of"):
        measured(plain(), HUGE)


def test_the_cache_has_room_for_a_batch_whose_last_pages_are_not_full(monkeypatch, fake_timer):
    monkeypatch.setattr(cases, "CASES", {UNEVEN.key: UNEVEN})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    assert pool_elements(fake_timer(l2_bytes=1), [UNEVEN.key]) >= UNEVEN.cache_elements


def test_sets_have_inputs_and_blocks_of_their_own_in_no_order_as_many_as_each_request_needs():
    batches = Pool(59 * 16 * 2 * 32, "cpu", 0).batches(UNEVEN, 2)
    assert not torch.equal(batches[0].query, batches[1].query)
    used = []
    for batch in batches:
        assert batch.seq_lens.tolist() == [47, 164, 34, 40]
        assert (batch.seq_lens.dtype, batch.block_table.dtype) == (torch.int32, torch.int32)
        assert bool(batch.output.isnan().all())
        rows = batch.block_table.tolist()
        assert [row[pages:] for row, pages in zip(rows, (3, 11, 3, 3), strict=True)] == [[0] * 8, [], [0] * 8, [0] * 8]
        used += [block for row, pages in zip(rows, (3, 11, 3, 3), strict=True) for block in row[:pages]]
        assert [batch.gathered(request)[0].shape[0] for request in range(4)] == [47, 164, 34, 40]
        keys, values = batch.gathered(1)
        assert torch.equal(keys[10 * 16], batch.keys[rows[1][10], 0])
        assert torch.equal(values[10 * 16], batch.values[rows[1][10], 0])
    assert len(set(used)) == len(used) == 40
    assert used != sorted(used)
    assert float((batches[0].keys == 0).float().mean()) < 0.01
