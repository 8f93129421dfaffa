"""The pages are what the results files say: those of the tree, and those of files that say something else."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.pages import ResultsError, outdated, pages
from vllm_hwplugin_lab.bench import read_results
from vllm_hwplugin_lab.bench.table import rows

ENGINES = "benchmarks/results/engines-h200-vllm-0.26.0-eagle3-0.6b.json"
SERVED = "benchmarks/results/serve-h200-vllm-0.33.0-eagle3-8b.json"
STARTS = "benchmarks/results/starts-h200-vllm-0.33.0-0.6b.json"


def change(path, by):
    """Let `by` change the results in a file."""
    results = read_results(path.read_text())
    by(results)
    path.write_text(json.dumps(results))


def fail(case):
    """As after a crash of the patched side."""
    side = case["sides"]["patched"]
    side |= {"error": "killed by SIGSEGV", "batches": dict.fromkeys(side["batches"])}


def table_of(page):
    """Of each row of the first table: vLLM, runner, target, drafter -> what it says."""
    page = page.partition("Speedup by batch size")[0]
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    return {tuple(row[:4]): row[4] for row in found if len(row) == 6}


def test_the_pages_in_the_tree_are_made_of_its_results_files():
    assert outdated() == [], "'make docs' writes them again"


def readme_rows(tree):
    """README's targets -> their cells."""
    page = pages(tree)["README.md"]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    assert rows[0] == ["concurrent requests", "1", "16", "64", "128", "256", "GPU busy, unpatched"]
    return {name: cells for name, *cells in rows[2:]}


def test_readme_has_the_newest_vllm_on_a_machine_with_one_load(tree):
    """A row joins a target's files; a loss where the API server is the limit is marked."""
    row = "Qwen3-8B, Eagle3 k=3 (V2)"
    before = readme_rows(tree)
    assert all("×" in cell for cell in before[row][:5])
    assert before["Qwen3-0.6B, Eagle3 k=3 (V2)"][4].endswith("(2.02 / 1.17)*")
    assert not [name for name in before if "gpt-oss" in name], "measured next to another load"
    # Of another target, and not of the newest vLLM.
    for name, vllm in (("other", "0.33.0"), ("older", "0.32.0")):
        copy = tree / SERVED.replace("8b", name)
        copy.write_text((tree / SERVED).read_text())

        def measured(results, name=name, vllm=vllm):
            results["host"]["vllm"] = vllm
            results["settings"] |= {"shape": None, "target": name}

        change(copy, measured)
    after = readme_rows(tree)
    assert after.keys() - before.keys() == {"other, Eagle3 k=3 (V2)"}
    assert after["other, Eagle3 k=3 (V2)"][:5] == [*before[row][:4], "-"]
    change(tree / SERVED.replace("8b", "other"), lambda results: results.update(conditions="busy host"))
    assert readme_rows(tree) == before


def test_the_first_figure_is_of_the_model_runner_that_vllm_chooses(tree):
    def faster(results):
        for load in results["cases"][0]["sides"]["patched"]["loads"].values():
            load["tokens_per_second"]["best"] *= 10

    before = pages(tree)["README.md"].partition("the tokens/s of unpatched vLLM")[0]
    change(tree / SERVED.replace("8b", "0.6b-v1"), faster)
    assert pages(tree)["README.md"].partition("the tokens/s of unpatched vLLM")[0] == before


def test_a_feature_row_has_the_acceptance_that_was_set(tree):
    """Otherwise rows with few and with many accepted drafts look alike."""
    name, words = "docs/draft-schedule.md", "2.7 tokens per step"
    assert words not in pages(tree)[name]
    file = tree / SERVED.replace("8b", "8b-draft-schedule-accepted")
    change(file, lambda results: results["settings"].update(acceptance_length=2.7))
    assert words in pages(tree)[name]


def test_readme_has_the_newest_start_of_each_engine(tree):
    """Of the newest vLLM, whatever an older file of the same engine says."""

    def of(starts, seconds):
        def longer(results):
            for case in results["cases"]:
                for side, found in case["sides"].items():
                    for start in found["alone"]:
                        start["seconds"] = 10.0 + (seconds if side.endswith("patched") else 0)

        change(tree / STARTS.replace("vllm-0.33.0-0.6b", starts), longer)

    of("vllm-0.33.0-0.6b", 2)
    of("vllm-0.33.0-0.6b-none", 5)
    assert "in part on a loaded machine, startup time changes by +2 to +5 s" in pages(tree)["README.md"]
    change(tree / STARTS, lambda results: results.update(conditions="busy host"))
    assert "caches, on a loaded machine, startup" in pages(tree)["README.md"]
    # It has an engine with drafts, too.
    change(tree / STARTS.replace("0.6b", "0.6b-none"), lambda results: results.update(date="2027-01-01T00:00:00+00:00"))
    assert "startup time changes by +5 s" in pages(tree)["README.md"]


def test_a_loss_is_called_a_loss(tree):
    def halve(results):
        for row in rows(results):
            row.sides["patched"]["step_ms"]["best"] = 2 * row.sides["stock"]["step_ms"]["best"]

    before = table_of(pages(tree)["docs/benchmarks.md"])
    change(tree / ENGINES, halve)
    after = table_of(pages(tree)["docs/benchmarks.md"])
    key = ("0.26.0", "V1", "Qwen3-0.6B", "Eagle3 k=3")
    assert "slower" not in before[key]
    assert after[key] == "0.50× (**slower**)"
    # Every other row says what it said, but for the one that compares with this side.
    assert {k for k in before if before[k] != after[k]} == {key, ("0.26.0", "V2", "Qwen3-0.6B", "Eagle3 k=3")}


def test_the_newest_file_counts_and_one_that_failed_does_not(tree):
    key = ("0.26.0", "V1", "Qwen3-0.6B", "Eagle3 k=3")
    before = table_of(pages(tree)["docs/benchmarks.md"])[key]
    again = tree / ENGINES.replace("eagle3", "eagle3-again")
    results = read_results((tree / ENGINES).read_text()) | {"date": "2027-01-01T00:00:00+00:00"}
    for case in results["cases"]:
        fail(case)
    again.write_text(json.dumps(results))
    assert table_of(pages(tree)["docs/benchmarks.md"])[key] == before

    def twice(results):
        for row in rows(results):
            row.sides["patched"]["step_ms"]["best"] = row.sides["stock"]["step_ms"]["best"] / 2

    for date, said in (("2020", before), ("2027", "2.00×")):
        again.write_text((tree / ENGINES).read_text())
        change(again, twice)
        change(again, lambda results, date=date: results.update(date=f"{date}-01-01T00:00:00+00:00"))
        assert table_of(pages(tree)["docs/benchmarks.md"])[key] == said


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("engines-x.json", "not JSON", "not JSON"),
        ("engines-x.json", "[]", "format 'list', expected 3"),
        ("engines-x.json", '{"format": 0}', "format 0, expected 3"),
        ("engines-x.json", '{"format": 3, "cases": []}', "no date, commit, plugin, host, settings"),
        ("kernels-ops-x.json", '{"format": 1}', "kernels_format None, expected 2"),
        ("soak-x.json", '{"format": 1}', "format 1, expected 'soak 2'"),
        ("h100.json", "{}", "of no known kind"),
    ],
)
def test_a_file_that_is_broken_or_of_something_else_is_named(tree, name, text, said):
    path = tree / "benchmarks" / "results" / name
    path.write_text(text)
    with pytest.raises(ResultsError, match=re.escape(f"{path}: ")) as error:
        pages(tree)
    assert said in str(error.value)
