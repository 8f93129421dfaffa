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


@pytest.fixture
def three_sides(results):
    results["cases"][0]["sides"]["mrv2"] = side(480, launches=50)
    return results


def rows(page, case):
    """Of each line of a table that is about the case, its other cells."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    return [cells[1:] for cells in lines if cells[0] == case]


def test_the_page_has_what_each_side_measured_and_the_ratio_of_the_best(results):
    speed, acceptance, *launches = rows(_report.markdown([results], None), "0.6b eagle3 k=3")
    assert speed == ["1", "400 (390)", "600 (590)", "1.500", "6.25", "4.17"]
    assert acceptance == ["1", *["2.500 (0.900 0.600)"] * 2]
    assert [row[1:] for row in launches] == [
        ["stock", "2.05", "1 (-)", "121 (7.5)"],
        ["patched", "2.05", "1 (-)", "40 (7.5)"],
    ]


def test_the_third_side_has_a_ratio_of_its_own(three_sides):
    speed, _, *launches = rows(_report.markdown([three_sides], None), "0.6b eagle3 k=3")
    assert speed[3:6] == ["480 (470)", "1.500", "1.250"]
    assert [row[1] for row in launches] == ["stock", "patched", "MRV2"]


def test_a_side_that_failed_has_its_error_and_the_other_its_figures(results):
    page = _report.markdown([results], None)
    assert rows(page, "8b eagle3 k=3")[0] == ["1", "300 (290)", "-", "-", "8.33", "-"]
    assert "**8b eagle3 k=3, patched: failed** (exit code 1): `RuntimeError: boom`" in page
    console = Console(width=200, record=True)
    console.print(_report.table(results))
    assert "300 (290)" in console.export_text()


def test_the_page_says_where_it_was_measured_and_with_what(results):
    results["cases"][0]["sides"]["patched"]["platform"] = "vllm_hwplugin.x.Cuda"
    results["cases"][0]["sides"]["stock"]["platform"] = "vllm.platforms.cuda.NvmlCudaPlatform"
    page = _report.markdown([results], None)
    for said in ("vLLM 0.26.0, NVIDIA H200", "driver 580.1", "abc123", "`BOTH=1`", "`ONE=2`", "`vllm_hwplugin.x.Cuda`"):
        assert said in page
    assert "NvmlCudaPlatform" not in page


def test_the_chart_shows_what_there_is_and_is_the_same_each_time(three_sides, tmp_path):
    pytest.importorskip("matplotlib")
    from vllm_hwplugin.bench import _chart

    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    _chart.draw([three_sides], first)
    _chart.draw([three_sides], second)
    assert first.read_bytes() == second.read_bytes()
    assert b"0.6b eagle3 k=3" in first.read_bytes()
    assert b"8b eagle3 k=3" not in first.read_bytes()
    assert b"Model Runner V2, stock" in first.read_bytes()
    del three_sides["cases"][0]
    with pytest.raises(_chart.ChartError, match="both a stock and a patched"):
        _chart.draw([three_sides], first)
