"""The pages are what the results files say: those of the tree, and those of files that say something else."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.pages import RESULTS, ROOT, ResultsError, drawings, outdated, pages
from vllm_hwplugin_lab.bench import read_results
from vllm_hwplugin_lab.bench.micro import attention_cases, op_cases
from vllm_hwplugin_lab.bench.table import rows

ENGINES = "benchmarks/results/engines-h200-vllm-0.26.0-eagle3-0.6b.json"
DFLASH = "benchmarks/results/engines-h200-vllm-0.26.0-dflash-0.6b.json"
COSTS = "benchmarks/results/cost-nwor-h200-vllm-0.26.0-eagle3.json"
ATTENTION = "benchmarks/results/kernels-attention-h200-vllm-0.26.0.json"
OPS = "benchmarks/results/kernels-ops-h200-vllm-0.20.2.json"


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
    page = page.partition("Tokens/s of patched by stock's")[0]
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    return {tuple(row[:4]): row[4] for row in found if len(row) == 5}


def test_the_pages_in_the_tree_are_made_of_its_results_files():
    assert outdated() == [], "'make docs' writes them again"


@pytest.mark.parametrize(("file", "plan"), [(ATTENTION, attention_cases.plan()), (OPS, op_cases.plan())])
def test_what_was_measured_of_kernels_is_measured_again_in_that_order(file, plan):
    """Kernels of a case stand side by side, and the plugin's own before what a run loses whose time is over."""
    measured = [(cell["kernel"], cell["case"]) for cell in read_results((ROOT / file).read_text())["cells"]]
    assert len(plan) == len(set(plan))
    assert [cell for cell in plan if cell in measured] == measured


def test_a_page_that_is_old_is_named(tree):
    assert outdated(tree) == []
    (tree / "docs" / "benchmarks.md").write_text("old")
    assert outdated(tree) == ["docs/benchmarks.md"]


def test_a_loss_is_called_a_loss(tree):
    def halve(results):
        for row in rows(results):
            row.sides["patched"]["step_ms"]["best"] = 2 * row.sides["stock"]["step_ms"]["best"]

    before = table_of(pages(tree)["docs/benchmarks.md"])
    change(tree / ENGINES, halve)
    after = table_of(pages(tree)["docs/benchmarks.md"])
    key = ("0.26.0", "V1", "Qwen3-0.6B", "Eagle3 k=3")
    assert "loss" not in before[key]
    assert after[key] == "**a loss**: 0.50 times stock's"
    # Every other row says what it said, but for the one that compares with this side.
    assert {k for k in before if before[k] != after[k]} == {key, ("0.26.0", "V2", "Qwen3-0.6B", "Eagle3 k=3")}


def test_the_first_screen_has_a_row_for_each_target(tree):
    def rows_of(name):
        part = pages(tree)["README.md"].partition(f"<!-- {name}: made")[2].partition(f"<!-- {name}: end")[0]
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines() if line[:2] == "| "][2:]

    before = {target: cells for target, *cells in rows_of("gains")}
    assert before["Qwen3-30B-A3B"][1] == "not measured"
    assert before["Qwen3-8B"][0].startswith("next to nothing: ")

    def halve(results):
        for row in rows(results):
            row.sides["patched"]["step_ms"]["best"] = 2 * row.sides["stock"]["step_ms"]["best"]

    change(tree / ENGINES, halve)
    after = {target: cells for target, *cells in rows_of("gains")}
    assert after["Qwen3-0.6B"][0].startswith("0.50 to ")
    assert after["Qwen3-0.6B"][0].endswith("**a loss** at some size")
    assert [before[name] == after[name] for name in before] == [False, True, True]


def test_the_first_screen_has_what_clients_over_http_saw(tree):
    def live():
        part = pages(tree)["README.md"].partition("<!-- live: made")[2].partition("<!-- live: end")[0]
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines() if line[:2] == "| "]

    before = live()
    name = "serve-h200-vllm-0.26.0-eagle3-0.6b.json"
    results = read_results((RESULTS / name).read_text())
    results["settings"] |= {"client": []}
    sides = results["cases"][0]["sides"]
    load = next(iter(sides["patched"]["loads"]))
    for side, speed, busy in (("stock", 100.0, None), ("patched", 250.0, 0.96)):
        sides[side]["loads"][load] |= {"tokens_per_second": {"best": speed, "all": [speed]}, "gpu_busy": busy}
    sides["mrv2"]["loads"][load]["rounds"] = 1
    (tree / "benchmarks" / "results" / name).write_text(json.dumps(results))
    found = [row for row in live() if row not in before and row[0] == "0.26.0"]
    v1, v2 = ([row for row in found if row[1] == runner] for runner in ("V1", "V2"))
    assert (len(v1), len(v2)) == (1, 1)
    assert v1[0][3].split(" / ")[0] == load.partition(" ")[0]
    assert (v1[0][4].split(" / ")[0], v1[0][7].split(" / ")[0]) == ("2.50", "-")
    # The best of fewer rounds is held to none.
    assert len(v2[0][4].split(" / ")) == len(v1[0][4].split(" / ")) - 1


def test_the_drawings_are_made_of_the_tree(tree):
    pytest.importorskip("matplotlib")
    drawn = drawings()
    assert set(drawn) == {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.svg")}
    assert all(text.startswith("<svg") and "<title>" in text for text in drawn.values())
    # Words are words, so a reader and a search find them.
    assert ">v2-tail-graph<" in drawn["docs/compatibility.svg"]


def test_what_a_feature_costs_is_held_to_the_plugin_without_it(tree):
    def slower(results):
        for case in results["cases"]:
            for batch, without in case["sides"]["mrv2-plugin"]["batches"].items():
                found = case["sides"]["mrv2-patched"]["batches"][batch]
                found["step_ms"] = {key: without["step_ms"][key] * 1.25 for key in ("best", "median")}
            del case["sides"]["plugin"]

    change(tree / COSTS, slower)
    k3 = [line for line in pages(tree)["docs/nwor.md"].splitlines() if "| eagle3 k=3 |" in line]
    assert [line.split("|")[4].strip() for line in k3] == ["V2"] * 4
    assert all(line.endswith("| +25.0% (+25.0%) |") for line in k3)
    # The best of fewer rounds is held to none.
    change(tree / COSTS, lambda results: next(rows(results)).sides["mrv2-plugin"].update(rounds=1))
    assert len([line for line in pages(tree)["docs/nwor.md"].splitlines() if "| eagle3 k=3 |" in line]) == 3


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

    for date, said in (("2020", before), ("2027", "2.00 times stock's")):
        again.write_text((tree / ENGINES).read_text())
        change(again, twice)
        change(again, lambda results, date=date: results.update(date=f"{date}-01-01T00:00:00+00:00"))
        assert table_of(pages(tree)["docs/benchmarks.md"])[key] == said


def test_what_failed_and_was_not_measured_since_is_said(tree):
    assert "Failed" not in pages(tree)["docs/benchmarks.md"]
    change(tree / DFLASH, lambda results: fail(results["cases"][0]))
    made = pages(tree)
    assert "engines-h200-vllm-0.26.0-dflash-0.6b.json: 0.6b dflash k=7, patched" in made["docs/benchmarks.md"]
    assert ("0.26.0", "V1", "Qwen3-0.6B", "DFlash k=7") not in table_of(made["docs/benchmarks.md"])


def test_a_side_that_failed_half_way_is_said_and_is_no_gain(tree):
    key = ("0.26.0", "V1", "Qwen3-0.6B", "DFlash k=7")
    assert key in table_of(pages(tree)["docs/benchmarks.md"])

    def fails(results):
        side = results["cases"][0]["sides"]["stock"]
        side["error"] = "exit code 1"
        for batch in side["batches"].values():
            batch["rounds"] = 1

    change(tree / DFLASH, fails)
    made = pages(tree)
    assert "engines-h200-vllm-0.26.0-dflash-0.6b.json: 0.6b dflash k=7, stock" in made["docs/benchmarks.md"]
    assert key not in table_of(made["docs/benchmarks.md"])
    # The other runner's sides have all their rounds.
    assert ("0.26.0", "V2", *key[2:]) in table_of(made["docs/benchmarks.md"])


def test_the_steps_of_a_load_are_shown_where_the_file_has_them(tree):
    name = "serve-h200-vllm-0.26.0-eagle3-tiny.json"
    results = read_results((RESULTS / name).read_text())
    sides = results["cases"][0]["sides"]
    load = next(iter(sides["patched"]["loads"]))
    times = ({"steps": 60, "seconds": 1.0, "host_seconds": 0.5}, {"steps": 20, "seconds": 3.0, "host_seconds": 2.0})
    sides["patched"]["loads"][load]["kinds"] = [
        {"kind": kind, "graph": graph, "paths": {"v1-draft-phase drafting": made}, **time}
        for kind, graph, made, time in zip(
            ("fewer_drafts", "prompt"), ("FULL", "PIECEWISE"), ("served", "prompt"), times, strict=True
        )
    ]
    (tree / "benchmarks" / "results" / name).write_text(json.dumps(results))
    lines = pages(tree)["benchmarks/results/serve.md"].splitlines()
    (line,) = [line for line in lines if "v1-draft-phase" in line]
    assert line.endswith("| patched | v1-draft-phase drafting | 75% / 25% | prompt 25% / 75% |")
    (line,) = [line for line in lines if "75% / 25%, 16.67 (8.33)" in line]
    assert line.endswith(
        "| patched |  |  | 75% / 25%, 16.67 (8.33) | 25% / 75%, 150.00 (100.00) | 75% / 25% | 25% / 75% |  |"
    )


def test_a_wrong_answer_and_a_cell_without_a_figure_are_said(tree):
    def spoil(results):
        results["cells"][2] |= {"status": "failed", "reason": "no | such <shape>"}

    change(tree / ATTENTION, spoil)
    for name in ("docs/kernel-benchmarks.md", "benchmarks/results/kernels.md"):
        # As Markdown shows it: neither a column nor a tag.
        assert "failed (1 cells): no \\| such &lt;shape>" in pages(tree)[name]


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


def test_results_of_the_other_kind_of_kernels_are_named(tree):
    path = tree / ATTENTION
    path.rename(path.with_name("kernels-ops-x.json"))
    with pytest.raises(ResultsError, match=r"kernels-ops-x\.json: holds results of `bench attention`"):
        pages(tree)


def test_a_readme_without_the_tables_place_is_an_error(tree):
    (tree / "README.md").write_text("# vllm-hwplugin\n")
    with pytest.raises(ResultsError, match=r"README\.md: the lines"):
        pages(tree)
