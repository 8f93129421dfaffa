"""Why decode shapes miss their share of the bandwidth: read from the figures, in groups and in words."""

from __future__ import annotations

import pytest

from vllm_hwplugin.bench.micro import _attention_cases as attention
from vllm_hwplugin.bench.micro import _report
from vllm_hwplugin.bench.micro._decode_misses import misses, rows

BANDWIDTH = 4e12

FEW = "decode b1 c1024 q32 h8/1 d512"  # 2 MiB, 256 rows
MANY = "decode b8 c8192 q16 h8/1 d512"  # 128 MiB, 128 rows
NEXT = "decode b8 c8192 q8 h8/1 d512"  # 128 MiB, 64 rows
EDGE = "decode b1 c32768 q1 h8/1 d512"  # 64 MiB
SHARES = {FEW: 0.1, MANY: 0.4, NEXT: 0.5, EDGE: 0.59}


@pytest.fixture
def made(results):
    def make(shares=SHARES, copies=0.9, prefill=2e-3):
        def seconds(kernel, key):
            case = attention.CASES[key]
            if case.kind == "prefill":
                return prefill
            return case.kv_bytes / BANDWIDTH / (shares.get(key, 0.6) if kernel == attention.OURS else 0.7)

        found = results("attention", seconds)
        for cell in found["cells"]:
            if cell["status"] == "measured":
                moved = attention.CASES[cell["case"]].kv_bytes
                cell["copy_seconds"] = None if copies is None else moved / BANDWIDTH / copies
        return found

    return make


def keys(group):
    return [miss.case.key for miss in group]


def test_each_shape_is_in_the_first_group_that_fits(made):
    found = misses(made())
    assert (keys(found.small), keys(found.arithmetic), keys(found.rest)) == ([FEW], [MANY], [EDGE, NEXT])
    assert rows(attention.CASES[MANY]) == 128
    (miss,) = found.arithmetic
    assert (miss.share, miss.copy_share) == (pytest.approx(0.4), pytest.approx(0.9))
    # Four operations for each of the 8 heads, 512 elements and 16 tokens, by the 2 KiB of a key and its value.
    each = attention.CASES[MANY].flops / attention.CASES[MANY].kv_bytes
    assert each == pytest.approx(128, rel=2e-3)
    assert miss.needed == pytest.approx(each * 0.6 * BANDWIDTH)
    assert miss.speed == pytest.approx(each * 0.4 * BANDWIDTH)
    assert found.prefill == pytest.approx(max(case.flops for case in attention.PREFILL) / 2e-3)


def test_nothing_is_said_where_none_misses(made):
    found = misses(made({}))
    assert (found.small, found.arithmetic, found.rest) == ((), (), ())
    assert "below 60% of the copy" not in _report.markdown([made({})])


def test_batches_as_served_are_no_misses(made):
    found = misses(made({case.key: 0.1 for case in attention.AS_SERVED}))
    assert (found.small, found.arithmetic, found.rest) == ((), (), ())


def test_the_words_are_the_figures(made):
    page = _report.markdown([made()])
    assert "4 shapes, each in the first group that fits:" in page
    few = "- **Few bytes**, keys and values of less than 32 MiB: 1. A copy of as many bytes reaches 90% of the large"
    assert f"{few} one's bandwidth, less than 60% for 0 of these shapes." in page
    assert "Of such a copy's bandwidth the kernel reaches 11%." in page
    assert "heads of a KV head): 1. At 60% of the bandwidth they would run at 307 TFLOP/s; they reach 205." in page
    assert "1 of them would need more than the 275 of the kernel's fastest prefill." in page
    rest = "- **The rest**: 2. Share of the large copy's bandwidth, and of a copy's of their size:"
    assert f"{rest}\n  - {EDGE}: 59%, 66%\n" in page
    assert f"  - {NEXT}: 50%, 56%\n" in page


def test_a_copy_that_is_slow_itself_and_a_prefill_that_is_fast_are_said(made):
    page = _report.markdown([made(copies=0.55, prefill=1e-3)])
    assert "reaches 55% of the large one's bandwidth, less than 60% for 1 of these shapes" in page
    assert "0 of them would need more than the 550 of the kernel's fastest prefill." in page


def test_copies_that_were_not_measured_are_no_figure(made):
    page = _report.markdown([made(copies=None)])
    assert "Copies of their sizes were not measured." in page
    assert f"  - {EDGE}: 59%, not measured\n" in page


def test_what_was_not_measured_is_no_miss(results):
    found = misses(results("attention", lambda kernel, case: None))
    assert (found.small, found.arithmetic, found.rest, found.prefill) == ((), (), (), None)
