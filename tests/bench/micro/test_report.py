"""The page: every figure of the files, and a reason for each that is missing."""

from __future__ import annotations

import pytest

from vllm_hwplugin.bench.micro import _attention_cases as attention
from vllm_hwplugin.bench.micro import _op_cases as ops
from vllm_hwplugin.bench.micro import _report

CASES = {"attention": attention.CASES, "ops": ops.CASES}


def rows(page):
    """Of each line of a table its cells."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("kind", CASES)
def test_every_time_that_was_measured_is_in_a_table(results, kind):
    times = {}

    def seconds(kernel, case):
        # No two are alike, in microseconds and in milliseconds as they are printed.
        return times.setdefault((kernel, case), (1000 + len(times)) * 1e-6)

    found = {word for row in rows(_report.markdown([results(kind, seconds)])) for cell in row for word in cell.split()}
    printed = {key: {f"{time * 1e6:.1f}", f"{time * 1e3:.3f}"} for key, time in times.items()}
    assert [key for key, texts in printed.items() if not texts & found] == []


def attention_seconds(kernel, key):
    case = attention.CASES[key]
    return case.kv_bytes / 2e12 if case.kind == "decode" else case.flops / 250e12


def test_what_follows_from_a_time_is_by_the_bytes_and_the_operations_of_its_case(results):
    page = _report.markdown([results("attention", attention_seconds)])
    # 512 MiB of keys and values at 2 of the 4 TB/s that the copy has; the copy of the same size takes half of that.
    _, _, four_heads = page.partition("### Decode and verification, 8 query heads on 4 KV heads")
    (row,) = [row for row in rows(four_heads.partition("\n### ")[0]) if row[:3] == ["8", "8192", "4"]]
    assert row[3:8] == ["268.4", "2000", "50%", "50%", "16.0"]
    assert "2.199 (250), 0.90" in {cell for row in rows(page) for cell in row}


def test_a_kernel_without_a_figure_has_no_column_and_its_reason_below(results):
    def seconds(kernel, key):
        return None if kernel == attention.FLASHINFER else attention_seconds(kernel, key)

    page = _report.markdown([results("attention", seconds)])
    assert not [row for row in rows(page) if "FLASHINFER us" in row]
    # As Markdown shows it: neither a column nor a tag.
    assert "FLASHINFER: failed (94 cells): ValueError: no \\| such &lt;shape>" in page


def test_a_shape_without_our_figure_shows_the_rivals(results):
    key = "decode b8 c8192 q4 h8/4 d512"

    def seconds(kernel, case):
        return None if (kernel, case) == (attention.OURS, key) else attention_seconds(kernel, case)

    (row,) = [
        row for row in rows(_report.markdown([results("attention", seconds)])) if row[:4] == ["8", "8192", "4", "-"]
    ]
    assert "268.4" in row


def test_it_is_counted_where_a_rival_is_faster(results):
    def seconds(kernel, key):
        taken = attention.CASES[key].kv_bytes / 3e12
        few = key in ("decode b8 c8192 q4 h8/4 d512", "decode b8 c8192 q8 h8/4 d512")
        return taken * (0.8 if few else 1.2) if kernel == attention.TRITON else taken

    page = _report.markdown([results("attention", seconds)])
    assert "TRITON_ATTN is faster on 2 of 90 shapes of these tables: it takes 0.80 of the plugin's time there." in page
    assert "hwplugin, Triton is faster" not in page


def test_an_operation_that_is_wrong_somewhere_gains_nothing_whatever_its_times(results):
    made = results(
        "ops",
        lambda kernel, key: ops.CASES[key].bytes_moved / 3e12 * {ops.VLLM: 1.5, ops.VLLM_FLOAT32: 1.2}.get(kernel, 1),
    )
    for cell in made["cells"]:
        if (cell["kernel"], cell["case"]) == (ops.OURS, "topk_softmax 8 of 128 t8"):
            cell["mismatch"] = "topk_weights: 1 of 64"
    found = rows(_report.markdown([made]))
    # By the faster of vLLM's two.
    assert ["`rotary_embedding`", "gain", "1.20", "1.20", "-"] in found
    (verdict,) = [row for row in found if row[0] == "`topk_softmax`"]
    assert (verdict[1], "topk_weights: 1 of 64" in verdict[-1]) == ("loss", True)
    assert [row[-1] for row in found if row[:2] == ["8 of 128", "8"]] == ["**no**"]


def test_a_run_whose_process_never_was_ready_still_has_a_page(results):
    made = results("ops", lambda kernel, case: None)
    made["processes"] = [{"error": "exit code 1", "log_tail": "no GPU"}]
    page = _report.markdown([made])
    assert "Copy: not measured" in page
    assert "32/8 heads of 128" in {row[0] for row in rows(page)}
