from __future__ import annotations

import dataclasses
import json

import pytest
from rich.console import Console

from vllm_hwplugin.bench import _report, _results


def side(best, *, error=None, launches=None, length=2.5):
    batch = None
    if error is None:
        batch = {
            "tokens_per_second": {"best": best, "median": best - 10, "all": [best, best - 10]},
            "step_ms": 1e3 * length / best,
            "steps": 10,
            "drafts": 10,
            "acceptance_per_position": [0.9, 0.6],
            "acceptance_length": length,
        }
        if launches:
            batch["profile"] = {
                "gpu_busy_ms": 2.046,
                "graph_launches": 1,
                "kernel_launches": launches,
                "draft_graph_launches": None,
                "draft_kernel_launches": 7.5,
            }
    process = {"pid": 7, "role": "parent", "features": {"draft-full-graph": {"state": "live", "reason": ""}}}
    tail = "Traceback\nRuntimeError: boom\n[rank0] a warning at the end\n" if error else ""
    return {"error": error, "log_tail": tail, "batches": {"1": batch}, "processes": [process]}


@pytest.fixture
def results(gpu_host, settings):
    found = _results.new(gpu_host, settings) | {"commit": "abc123", "date": "2026-01-02T03:04:05+00:00"}
    found["settings"] = json.loads(json.dumps(dataclasses.asdict(settings)))
    whole = {"stock": side(400, launches=121), "patched": side(600, launches=40)}
    half = {"stock": side(300), "patched": side(0, error="exit code 1")}
    found["cases"] = [
        {"shape": "0.6b", "method": "eagle3", "k": 3, "sides": whole},
        {"shape": "8b", "method": "eagle3", "k": 3, "sides": half},
    ]
    return found


def test_the_page_has_both_sides_their_ratio_and_the_crash(results):
    page = _report.markdown([results], "benchmarks.svg")
    assert "![patched against stock tokens/s](benchmarks.svg)" in page
    assert "## vLLM 0.26.0, NVIDIA H200" in page
    assert "driver 580.1" in page
    assert "at abc123" in page
    assert "both sides with `BOTH=1`; patched with `ONE=2`" in page
    assert "| 0.6b eagle3 k=3 | 1 | 400 (390) | 600 (590) | 1.500 | 6.25 | 4.17 |" in page
    assert "| 0.6b eagle3 k=3 | 1 | 2.500 (0.900 0.600) | 2.500 (0.900 0.600) |" in page
    assert "| 0.6b eagle3 k=3 | 1 | stock | 2.05 | 1 (-) | 121 (7.5) |" in page
    assert "| 0.6b eagle3 k=3 | 1 | patched | 2.05 | 1 (-) | 40 (7.5) |" in page
    assert "| 8b eagle3 k=3 | 1 | 300 (290) | - | - | 8.33 | - |" in page
    assert "**8b eagle3 k=3, patched: failed** (exit code 1): `RuntimeError: boom`" in page
    assert "Live in the patched processes: draft-full-graph." in page


@pytest.fixture
def three_sides(results):
    results["cases"][0]["sides"]["mrv2"] = side(480, launches=50)
    return results


def test_the_third_side_has_its_columns_and_a_ratio(three_sides):
    page = _report.markdown([three_sides], None)
    assert (
        "| case | batch | stock tok/s | patched tok/s | MRV2 tok/s | ratio | patched / MRV2 | step ms stock |" in page
    )
    assert "| 0.6b eagle3 k=3 | 1 | 400 (390) | 600 (590) | 480 (470) | 1.500 | 1.250 | 6.25 | 4.17 | 5.21 |" in page
    assert "| 8b eagle3 k=3 | 1 | 300 (290) | - | - | - | - | 8.33 | - | - |" in page
    assert "| acceptance length (per position) stock | patched | MRV2 |" in page
    assert "| 0.6b eagle3 k=3 | 1 | MRV2 | 2.05 | 1 (-) | 50 (7.5) |" in page
    assert "all sides with `BOTH=1`" in page
    console = Console(width=200, record=True)
    console.print(_report.table(three_sides))
    text = console.export_text()
    assert "121 → 40 → 50" in text
    assert "1.25" in text


def test_the_platform_class_of_the_patched_engines_is_named(results):
    assert "Platform class" not in _report.markdown([results], None)
    results["cases"][0]["sides"]["patched"]["platform"] = "vllm_hwplugin.x.Cuda"
    results["cases"][0]["sides"]["stock"]["platform"] = "vllm.platforms.cuda.NvmlCudaPlatform"
    page = _report.markdown([results], None)
    assert "Platform class of the patched engines: `vllm_hwplugin.x.Cuda`." in page
    assert "NvmlCudaPlatform" not in page


def test_the_third_side_is_marked_in_the_chart(three_sides, tmp_path):
    pytest.importorskip("matplotlib")
    from vllm_hwplugin.bench import _chart

    _chart.draw([three_sides], tmp_path / "three.svg")
    assert b"Model Runner V2, stock" in (tmp_path / "three.svg").read_bytes()
    del three_sides["cases"][0]["sides"]["mrv2"]
    _chart.draw([three_sides], tmp_path / "two.svg")
    assert b"Model Runner V2" not in (tmp_path / "two.svg").read_bytes()


def test_without_a_profile_there_is_no_table_of_launches(results):
    del results["cases"][0]
    assert "Launches a step" not in _report.markdown([results], None)
    assert "![" not in _report.markdown([results], None)


def test_the_terminal_table_shows_the_half_that_there_is(results):
    console = Console(width=200, record=True)
    console.print(_report.table(results))
    text = console.export_text()
    assert "1.50" in text
    assert "121 → 40" in text
    assert "300 (290)" in text


def test_the_chart_is_drawn_and_is_the_same_each_time(results, tmp_path):
    pytest.importorskip("matplotlib")
    from vllm_hwplugin.bench import _chart

    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    _chart.draw([results], first)
    _chart.draw([results], second)
    assert first.read_bytes() == second.read_bytes()
    assert b"0.6b eagle3 k=3" in first.read_bytes()
    assert b"8b eagle3 k=3" not in first.read_bytes()
    del results["cases"][0]
    with pytest.raises(_chart.ChartError, match="both a stock and a patched"):
        _chart.draw([results], first)
