"""The page: every figure of the files, and a reason for each that is missing."""

from __future__ import annotations

from vllm_hwplugin.bench.micro import _attention_cases as attention
from vllm_hwplugin.bench.micro import _op_cases as ops
from vllm_hwplugin.bench.micro import _report

LONGEST = "32/8 heads of 128 t65536"


def attention_seconds(kernel, key):
    case = attention.CASES[key]
    if kernel in (attention.FLASHINFER, attention.FA4):
        return None
    return case.kv_bytes / 2e12 if case.kind == "decode" else case.flops / 250e12


def test_the_attention_chapter(results):
    made = results("attention", attention_seconds)
    for cell in made["cells"]:
        if cell["kernel"] == attention.SDPA and cell["status"] == "measured":
            cell["eager"] = "it synchronizes"
        if cell["kernel"] == attention.FA4:
            cell |= {"status": "missing", "reason": "cute is not importable"}
    page = _report.markdown([made])
    assert "## Attention at head size 512: NVIDIA H200, vLLM 0.26.0" in page
    assert '`vllm-hwplugin bench attention --kind "decode" --seconds 75 --seed 0`, 2026-01-02, commit `abc123`' in page
    assert "driver 580.1; torch 2.11.0, triton 3.6.0. Copy: 4000 GB/s; L2 cache: 60 MiB." in page
    assert "| decode and verification at 60% of the copy bandwidth or more | **no** | 0 of 90 |" in page
    # A row for each kernel, with ms, TFLOP/s and error: SDPA could not be captured.
    kernels = "| kernel | 1 x 8192 tokens, 1 KV head | 4 x 2048 tokens, 1 KV head | 1 x 8192 tokens, 4 KV heads |"
    assert kernels in page
    assert "| hwplugin | 2.199 (250), 0.90 |" in page
    assert "| hwplugin, Triton | 2.199 (250), 0.90 |" in page
    assert "| SDPA | 2.199 (eager) (250), 0.90 |" in page
    assert "| FLASH_ATTN 3, head size 256 | 1.100 (250), 0.90 |" in page
    # 512 MiB of keys and values at 2 of 4 TB/s; the copy of the same size takes half of that.
    row = next(line for line in decode(page, 4) if line.startswith("| 8 | 8192 | 4 |"))
    assert row == "| 8 | 8192 | 4 | 268.4 | 2000 | 50% | 50% | 16.0 | 0.90 | 268.4 | 268.4 |"
    assert len([line for line in decode(page, 1) if line.startswith("| ")]) == 2 + 45
    assert "- FLASH_ATTN 4: missing: cute is not importable" in page
    assert "- FLASHINFER: failed (94 cells): ValueError: no \\| such &lt;shape>" in page
    assert "FLASHINFER us" not in page


def decode(page, kv_heads):
    """The lines under the table's heading."""
    _, _, rest = page.partition(f"### Decode and verification, 8 query heads on {kv_heads} KV head")
    return rest.partition("\n### ")[0].splitlines()


def test_a_shape_without_our_figure_shows_the_rivals(results):
    key = "decode b8 c8192 q4 h8/4 d512"

    def seconds(kernel, case):
        return None if (kernel, case) == (attention.OURS, key) else attention_seconds(kernel, case)

    page = _report.markdown([results("attention", seconds)])
    row = next(line for line in decode(page, 4) if line.startswith("| 8 | 8192 | 4 |"))
    assert row == "| 8 | 8192 | 4 | - | - | - | - | - | - | 268.4 | 268.4 |"


def test_a_kernel_that_is_faster_somewhere_is_named(results):
    def seconds(kernel, key):
        taken = attention.CASES[key].kv_bytes / 3e12
        few = key in ("decode b8 c8192 q4 h8/4 d512", "decode b8 c8192 q8 h8/4 d512")
        return taken * (0.8 if few else 1.2) if kernel == attention.TRITON else taken

    page = _report.markdown([results("attention", seconds)])
    assert "TRITON_ATTN is faster on 2 of 90 shapes of these tables: it takes 0.80 of the plugin's time there." in page
    assert "hwplugin, Triton is faster" not in page


HEADING = "### Decode and verification, other batch sizes and unequal lengths"


def served(page):
    """The lines of the table."""
    return [line for line in page.partition(HEADING)[2].splitlines() if line.startswith("| ")]


def test_batches_as_served_have_a_table_of_their_own(results):
    def seconds(kernel, key):
        return attention.CASES[key].kv_bytes / 2e12 * (1.5 if kernel == attention.TRITON else 1)

    names, _, *rows = served(_report.markdown([results("attention", seconds)]))
    where = "| batch | mean length | longest | lengths | query tokens | KV heads | "
    assert names == f"{where}us | GB/s | % of copy | % of same size | TFLOP/s | error | TRITON_ATTN us | ratio |"
    assert len(rows) == 32
    # Of 7777 keys at 2 of 4 TB/s, which the copy of the same size takes half of.
    lengths = attention.UNEVEN[0].lengths
    assert (len(lengths), sum(lengths), max(lengths)) == (8, 7777, 1973)
    drawn = "| 8 | 972 | 1973 | log-normal, 1.0 | 1 | 1 | "
    assert rows[0] == f"{drawn}8.0 | 2000 | 50% | 50% | 16.0 | 0.90 | 11.9 | 1.50 |"
    assert rows[-2].startswith("| 100 | 8192 | 8192 | equal | 1 | 1 | 838.9 | 2000 | 50% | ")


def test_a_batch_as_served_that_has_no_figure_of_ours_or_of_the_rivals(results):
    ours, theirs = attention.NO_POWER_OF_TWO[-2:]

    def seconds(kernel, key):
        return None if (kernel, key) in ((attention.OURS, ours.key), (attention.TRITON, theirs.key)) else 1e-3

    *_, without, alone = served(_report.markdown([results("attention", seconds)]))
    assert without == "| 100 | 8192 | 8192 | equal | 1 | 1 | - | - | - | - | - | - | 1000.0 | - |"
    assert alone.startswith("| 100 | 8192 | 8192 | equal | 8 | 1 | 1000.0 | ")
    assert alone.endswith(" | 0.90 | - | - |")


def test_a_file_from_before_the_batches_as_served_has_the_page_that_it_had(results):
    made = results("attention", attention_seconds)
    page = _report.markdown([made])
    made["cells"] = [c for c in made["cells"] if attention.CASES[c["case"]] not in attention.AS_SERVED]
    old = _report.markdown([made])
    assert HEADING not in old
    before, _, rest = page.partition(f"\n{HEADING}")
    *_, table_end = served(page)
    assert old == before + rest.partition(f"{table_end}\n")[2]


def test_the_chapter_of_the_operations(results):
    def seconds(kernel, key):
        return ops.CASES[key].bytes_moved / 3e12 * {ops.VLLM: 1.5, ops.VLLM_FLOAT32: 1.2}.get(kernel, 1)

    made = results("ops", seconds)
    for cell in made["cells"]:
        if (cell["kernel"], cell["case"]) == (ops.OURS, "topk_softmax 8 of 128 t8"):
            cell["mismatch"] = "topk_weights: 1 of 64"
    made["host"]["vllm"] = "0.20.2"
    page = _report.markdown([made])
    assert "| `rotary_embedding` | gain | 1.20 | 1.20 | - |" in page
    assert "| `topk_softmax` | loss | 1.50 | 1.50 | 8 of 128 with 8 tokens is wrong: topk_weights: 1 of 64 |" in page
    assert "| 32/8 heads of 128 | 8192 | 56.6 | 3000 | 75% | 50% | 85.0 | 68.0 | 1.20 | yes |" in page
    assert "| 4096 | 8192 | 33.6 | 3000 | 75% | 50% | 50.4 | 1.50 | yes |" in page
    assert "| topk_softmax at 80% of the copy bandwidth | - | - | no goal: k selections in each row bound it" in page
    # What the conversion costs is in no ratio, but said: 0.3 of the time at 3 TB/s.
    least, most = (
        ops.CASES[f"rotary_embedding {shape}"].bytes_moved / 1e7 for shape in ("4/1 heads of 128 t1", LONGEST)
    )
    said = f"For 15 of 15 shapes that costs vLLM's operation {least:.1f} to {most:.1f} us a call more than"
    why = " a table in float32, because it converts the whole table in each call, which vLLM 0.21 no longer does."
    assert f"{said}{why} The ratio leaves that out." in page
    made["host"]["vllm"] = "0.21.0"
    assert f"{said} a table in float32. The ratio leaves that out." in _report.markdown([made])
    row = next(line for line in page.splitlines() if line.startswith("| 8 of 128 | 8 |"))
    assert row.endswith("| **no** |")
    assert "- hwplugin topk_softmax 8 of 128 t8: topk_weights: 1 of 64" in page


def test_nothing_is_said_of_a_conversion_that_costs_nothing(results):
    page = _report.markdown([results("ops", lambda kernel, key: 1e-3)])
    assert "The ratio is by the faster of vLLM's two columns." in page
    assert "The ratio leaves that out" not in page


def test_a_run_whose_process_never_was_ready_still_has_a_page(results):
    made = results("ops", lambda kernel, case: None)
    made["processes"] = [{"error": "exit code 1", "log_tail": "no GPU"}]
    page = _report.markdown([made])
    assert "Copy: not measured" in page
    assert "| 32/8 heads of 128 | 1 | - | - | - | - | - | - | - | - |" in page


def test_the_terminal_has_the_chapter_without_the_explanations(results):
    text = _report.text(results("attention", attention_seconds))
    assert "### Decode and verification" in text
    assert "Generated by" not in text
