"""docs/benchmarks.md is what the results files say."""

from __future__ import annotations

from pathlib import Path

from vllm_hwplugin.bench import _report, _results

ROOT = Path(__file__).parents[2]


def test_the_page_is_made_from_the_results_files():
    files = sorted((ROOT / "benchmarks" / "results").glob("h200-*.json"))
    assert files
    page = _report.markdown([_results.read(file) for file in files], "benchmarks.svg")
    assert (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8") == page, "old: 'make docs' writes it again"


def test_every_file_says_where_it_comes_from():
    for file in (ROOT / "benchmarks" / "results").glob("h200-*.json"):
        results = _results.read(file)
        assert results["commit"]
        assert results["host"]["vllm"]
        assert results["host"]["driver"]
