"""The pages are what the results files say: those of the tree, and those of files that say something else."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks.pages import PARTS, RESULTS, ROOT, ResultsError, gains, outdated, pages, read_all
from vllm_hwplugin_lab.bench import read_results, rows, serve, step_ms

ENGINES = "benchmarks/results/engines-h200-vllm-0.26.0-eagle3-0.6b.json"
DFLASH = "benchmarks/results/engines-h200-vllm-0.26.0-dflash-0.6b.json"
COSTS = "benchmarks/results/cost-nwor-h200-vllm-0.26.0-eagle3.json"
ATTENTION = "benchmarks/results/kernels-attention-h200-vllm-0.26.0.json"


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
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    return {tuple(row[:4]): row[4] for row in found if len(row) == 5}


def test_the_pages_in_the_tree_are_made_of_its_results_files():
    assert outdated() == [], "'make docs' writes them again"


def test_a_page_that_is_old_is_named(tree):
    assert outdated(tree) == []
    (tree / "docs" / "benchmarks.md").write_text("old")
    assert outdated(tree) == ["docs/benchmarks.md"]


def test_the_chart_shows_every_step_of_the_results_files():
    shown = re.findall(r">([\d.]+)</text>", (ROOT / "docs" / "benchmarks.svg").read_text(encoding="utf-8"))
    times = [
        step_ms(side)
        for one in gains(read_all(RESULTS, "engines-"))
        for row in one.rows
        for side in row.sides.values()
        if side is not None
    ]
    wanted = [f"{ms:.3g}" if ms >= 10 else f"{ms:.2f}" for ms in times]
    # Those of the axes are there too.
    assert [one for one in set(wanted) if shown.count(one) < wanted.count(one)] == [], "'make docs' draws it"


def test_a_loss_is_called_a_loss(tree):
    def halve(results):
        for row in rows(results):
            row.sides["patched"]["step_ms"]["best"] = 2 * row.sides["stock"]["step_ms"]["best"]

    before = table_of(pages(tree)["README.md"])
    change(tree / ENGINES, halve)
    after = table_of(pages(tree)["README.md"])
    key = ("0.26.0", "V1", "Qwen3-0.6B", "Eagle3 k=3")
    assert "loss" not in before[key]
    assert after[key] == "**a loss**: 0.50 times stock's"
    # Every other row says what it said, but for the one that compares with this side.
    assert {k for k in before if before[k] != after[k]} == {key, ("0.26.0", "V2", "Qwen3-0.6B", "Eagle3 k=3")}


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


def test_a_runner_without_the_plugins_side_has_no_gain(tree):
    key = ("0.26.0", "V2", "Qwen3-0.6B", "DFlash k=7")
    assert "times stock's" in table_of(pages(tree)["README.md"])[key]

    def without(results):
        results["settings"]["sides"].remove("mrv2-patched")
        for case in results["cases"]:
            del case["sides"]["mrv2-patched"]

    change(tree / DFLASH, without)
    said = table_of(pages(tree)["README.md"])[key]
    assert said.startswith("not measured; stock V2 gives ")


def of_round_figures(results):
    """Four sides, each round's step, and what the GPU does of it."""
    for case in results["cases"]:
        stock = case["sides"]["stock"]
        case["sides"] = {
            side: {**stock, "batches": {batch: entry(2.0 / speed) for batch in stock["batches"]}}
            for side, speed in (("stock", 1.0), ("patched", 1.25), ("mrv2", 2.0), ("mrv2-patched", 4.0))
        }


def entry(step):
    return {
        "rounds": 2,
        "step_ms": {"best": step, "median": step * 1.1, "all": [step, step * 1.1]},
        "tokens_per_step": 2.5,
        "tokens_per_second": {"best": 2500 / step, "median": 2300 / step, "all": []},
        "host_us": [500.0, 600.0],
        "drafts": 9,
        "acceptance_length": 2.5,
        "acceptance_per_position": [0.9, 0.6],
        "profile": {"steps": 3, "gpu_busy_ms": 0.25, "graph_launches": 1, "kernel_launches": 5},
        "gpu_idle_share": 1 - 0.25 / step,
    }


def test_each_side_is_compared_with_its_own_runner(tree):
    change(tree / DFLASH, of_round_figures)
    made = pages(tree)
    found = table_of(made["README.md"])
    assert found["0.26.0", "V1", "Qwen3-0.6B", "DFlash k=7"] == "1.25 times stock's"
    said = "2.00 times stock's; stock V2 gives 1.60 times V1's with the plugin"
    assert found["0.26.0", "V2", "Qwen3-0.6B", "DFlash k=7"] == said
    assert found["any other", "either", "any", "any"] == "not measured"
    assert (
        "| 0.26.0 | V2 | Qwen3-0.6B | DFlash k=7 | 1.00 → 0.50 | 0.25 → 0.25 | 75% → 50% |"
        in made["docs/benchmarks.md"]
    )


def test_the_newest_file_counts_and_one_that_failed_does_not(tree):
    key = ("0.26.0", "V1", "Qwen3-0.6B", "Eagle3 k=3")
    before = table_of(pages(tree)["README.md"])[key]
    again = tree / ENGINES.replace("eagle3", "eagle3-again")
    results = read_results((tree / ENGINES).read_text()) | {"date": "2027-01-01T00:00:00+00:00"}
    for case in results["cases"]:
        fail(case)
    again.write_text(json.dumps(results))
    assert table_of(pages(tree)["README.md"])[key] == before

    def twice(results):
        for row in rows(results):
            row.sides["patched"]["step_ms"]["best"] = row.sides["stock"]["step_ms"]["best"] / 2

    for date, said in (("2020", before), ("2027", "2.00 times stock's")):
        again.write_text((tree / ENGINES).read_text())
        change(again, twice)
        change(again, lambda results, date=date: results.update(date=f"{date}-01-01T00:00:00+00:00"))
        assert table_of(pages(tree)["README.md"])[key] == said


def test_what_failed_and_was_not_measured_since_is_said(tree):
    assert "Failed" not in pages(tree)["docs/benchmarks.md"]
    change(tree / DFLASH, lambda results: fail(results["cases"][0]))
    made = pages(tree)
    assert "engines-h200-vllm-0.26.0-dflash-0.6b.json: 0.6b dflash k=7, patched" in made["docs/benchmarks.md"]
    assert ("0.26.0", "V1", "Qwen3-0.6B", "DFlash k=7") not in table_of(made["README.md"])


def test_a_side_that_failed_half_way_is_said_and_is_no_gain(tree):
    key = ("0.26.0", "V1", "Qwen3-0.6B", "DFlash k=7")
    assert key in table_of(pages(tree)["README.md"])

    def fails(results):
        side = results["cases"][0]["sides"]["stock"]
        side["error"] = "exit code 1"
        for batch in side["batches"].values():
            batch["rounds"] = 1

    change(tree / DFLASH, fails)
    made = pages(tree)
    assert "engines-h200-vllm-0.26.0-dflash-0.6b.json: 0.6b dflash k=7, stock" in made["docs/benchmarks.md"]
    assert key not in table_of(made["README.md"])
    # The other runner's sides have all their rounds.
    assert ("0.26.0", "V2", *key[2:]) in table_of(made["README.md"])


def phases_of(*rows):
    return [(len(path.split()) - 1, path.split()[-1], 1.0, us) for path, us in rows]


def looked_at(tree, *engines, **case):
    """A results file of `bench --profile`."""
    key = {"shape": "0.6b", "method": "eagle3", "k": 3}
    case = {**key, "stopped": None, "sides": {}, **case}
    engines = [{**key, "batch": 4, "step_ms": 2.5, "profile": {}, "features": [], **one} for one in engines]
    results = read_results((tree / ENGINES).read_text()) | {"format": "phases 2", "cases": [case], "engines": engines}
    (tree / "benchmarks" / "results" / "phases-x.json").write_text(json.dumps(results))


def cells(page):
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("|")]
    return [[cell.replace("&nbsp;", "").strip(" `*") for cell in row] for row in rows]


V1 = "step UniProcExecutor.execute_model Worker.execute_model GPUModelRunner.execute_model"
V2_TAIL = "step UniProcExecutor.sample_tokens Worker.sample_tokens GPUModelRunner.sample_tokens"


def test_every_microsecond_of_a_step_is_in_one_part_of_it(tree):
    stock = phases_of(
        ("step", 5000.0),
        ("step AsyncScheduler.schedule", 100.0),
        (V1.rpartition(" ")[0].rpartition(" ")[0], 4000.0),
        (V1.rpartition(" ")[0], 3990.0),
        (V1, 3970.0),
        (f"{V1} GPUModelRunner._prepare_inputs", 1000.0),
        (f"{V1} GPUModelRunner._prepare_inputs GPUModelRunner._get_valid_sampled_token_count", 30.0),
        (f"{V1} GPUModelRunner.propose_draft_token_ids", 2000.0),
        # What drafting does is drafting, whatever it is.
        (f"{V1} GPUModelRunner.propose_draft_token_ids EagleProposer._determine_batch_execution_and_padding", 50.0),
        ("step Future.result", 20.0),
    )
    patched = phases_of(
        ("step", 1000.0),
        (V2_TAIL.rpartition(" ")[0].rpartition(" ")[0], 480.0),
        (V2_TAIL.rpartition(" ")[0], 480.0),
        (V2_TAIL, 480.0),
        (f"{V2_TAIL} TailGraphs.sample", 100.0),
        (f"{V2_TAIL} TailGraphs.propose", 200.0),
        ("step Future.result", 500.0),
    )
    looked_at(
        tree,
        # As the command writes them: an engine's batches one after the other.
        {"side": "stock", "phases": stock},
        {"side": "stock", "batch": 16, "phases": phases_of(("step", 7000.0))},
        {"side": "mrv2-patched", "phases": patched, "profile": {"gpu_busy_ms": 1.8}, "features": ["v2-tail-graph"]},
        {"side": "mrv2-patched", "batch": 16, "phases": phases_of(("step", 3000.0))},
        stopped="an interrupt",
        sides={"mrv2": {"error": "exit code 7"}},
    )
    page = pages(tree)["docs/host-time.md"]
    of_four, _, of_sixteen = page.partition("### Qwen3-0.6B, eagle3 k=3, batch 16")
    assert ["the step", "7000", "3000"] in cells(of_sixteen)
    found = {row[0]: row[1:] for row in cells(of_four) if len(row) == 3}
    assert found.pop("us a step") == ["stock", "MRV2 patched"]
    assert {name: figures for name, figures in found.items() if figures != ["0", "0"] and "---" not in name} == {
        "scheduling": ["100", "0"],
        "inputs": ["970", "0"],
        "sampling": ["0", "100"],
        "drafting": ["2000", "200"],
        "other lines of `execute_model` and `sample_tokens`; on V1 logits, too": ["970", "180"],
        "waiting for the GPU, and its tokens for the host": ["50", "500"],
        "engine core, executor, worker": ["910", "20"],
        "the step": ["5000", "1000"],
        "GPU busy": ["-", "1800"],
    }
    (tree / "docs" / "host-time.md").write_text("old")
    assert "docs/host-time.md" in outdated(tree)


def served(speed, concurrency, temperature):
    spread = {"mean": 1.0, "p50": 1000 / speed, "p99": 2000 / speed}
    return {
        "rounds": 2,
        "concurrency": concurrency,
        "request_rate": 0.0,
        "temperature": temperature,
        "seconds": [1.0, 2.0],
        "tokens_per_second": {"best": speed, "all": [speed, speed / 2]},
        **dict.fromkeys(serve.LATENCIES, spread),
        "acceptance_length": 2.5,
    }


def test_what_clients_see_is_a_table_a_temperature_and_says_what_is_missing(tree):
    assert "benchmarks/results/serve.md" not in pages(tree)
    settings = {"shape": "0.6b", "method": "eagle3", "prompts": None, "input_len": 128, "output_len": 64, "rounds": 2}
    settings |= {"target": None, "draft": None, "patched_environment": {"A": "on"}, "temperatures": [0.0, 1.0]}
    case = {"k": 3, "stopped": "the time limit of 9 s", "sides": {}}
    for side, factor in (("mrv2-patched", 1.5), ("mrv2", 1.0), ("patched", 0.75)):
        loads = {f"{n} at once, temperature {t}": served(100.0 * n * factor, n, t) for n in (1, 16) for t in (0.0, 1.0)}
        case["sides"][side] = {"error": None, "loads": loads}
    case["sides"]["mrv2-patched"]["loads"]["16 at once, temperature 1.0"] = None
    case["sides"]["patched"]["error"] = "exit code 7"
    case["sides"]["mrv2-patched"]["loads"]["16 at once, temperature 0.0"]["rounds"] = 1
    results = read_results((tree / ENGINES).read_text()) | {"format": "serve 2", "settings": settings, "cases": [case]}
    (tree / "benchmarks" / "results" / "serve-x.json").write_text(json.dumps(results))
    page = pages(tree)["benchmarks/results/serve.md"]
    greedy, sampled = page.split("### Temperature 1")
    rows = [row for row in cells(greedy) if row[0] == "3"]
    latency = "10.00 / 20.00"
    assert rows[:3] == [
        ["3", "1", "-", "patched", "75 (38)", "-", *["13.33 / 26.67"] * 4, "2.500"],
        ["3", "1", "-", "MRV2", "100 (50)", "-", *[latency] * 4, "2.500"],
        ["3", "1", "-", "MRV2 patched", "150 (75)", "1.50", *["6.67 / 13.33"] * 4, "2.500"],
    ]
    # The best of fewer rounds is compared with none.
    assert [row[4:6] for row in rows[3:]] == [["1200 (600)", "-"], ["1600 (800)", "-"], ["2400 (1200)", "-"]]
    assert [row[1:5] for row in cells(sampled) if row[0] == "3"][3:] == [
        ["16", "-", "patched", "1200 (600)"],
        ["16", "-", "MRV2", "1600 (800)"],
        ["16", "-", "MRV2 patched", "-"],
    ]


def test_the_parts_of_a_step_begin_with_functions_that_there_are(vllm_tree):
    files = ["vllm/v1/worker/gpu_model_runner.py", "vllm/v1/spec_decode/llm_base_proposer.py"]
    files += [
        f"vllm/v1/worker/gpu/{name}.py" for name in ("model_runner", "block_table", "cudagraph_utils", "dp_utils")
    ]
    files += [
        f"vllm/v1/worker/gpu/{name}.py"
        for name in ("attn_utils", "model_states/default", "model_states/interface", "spec_decode/utils")
    ]
    texts = [vllm_tree(version).read(file) for version in ("0.26.0",) for file in files]
    texts += [path.read_text() for path in (ROOT / "vllm_hwplugin" / "spec_decode").rglob("*.py")]
    text = "\n".join(texts)
    for pattern in (pattern for part in PARTS for pattern in part.functions):
        name = pattern.rpartition(".")[2].strip("*")
        # The rest is of Python's library or a whole class.
        assert not name or pattern == "Future.result" or re.search(rf"def \w*{name}\w*\(", text), pattern


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
        ("kernels-ops-x.json", '{"format": 1}', "kernels_format None, expected 1"),
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
