"""docs/kernel-benchmarks.md is what the results files say, and so are the operations that are on by default."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vllm_hwplugin.bench.micro import _report, _results, _verdict
from vllm_hwplugin.ops._override_catalog import OPS

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "benchmarks" / "results").glob("kernels-*.json"))
PAGE = ROOT / "docs" / "kernel-benchmarks.md"


def test_the_page_is_made_from_the_results_files():
    assert PAGE.exists() == bool(FILES), "'make docs' writes the page where there are results"
    if FILES:
        page = _report.markdown([_results.read(file) for file in FILES])
        assert PAGE.read_text(encoding="utf-8") == page, "old: 'make docs' writes it again"


def test_make_docs_writes_the_page():
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "KERNEL_RESULTS := $(sort $(wildcard benchmarks/results/kernels-*.json))" in recipe
    assert "bench kernel-report $(KERNEL_RESULTS) --markdown docs/kernel-benchmarks.md" in recipe


def test_every_file_says_where_it_comes_from():
    for file in FILES:
        results = _results.read(file)
        assert results["commit"]
        assert results["host"]["vllm"]
        assert results["host"]["driver"]
        assert all("copy_bandwidth" in process for process in results["processes"])


def on_by_default_without_a_gain(default_on, verdicts):
    """Operation and device, where the one is on by default on the other and no file says gain, or one says loss."""
    wrong = []
    for op, devices in default_on.items():
        for device in devices:
            said = {one.verdict for one in verdicts if (one.op, one.device) == (op, device)}
            if said != {"gain"}:
                wrong.append((op, device))
    return wrong


def off_without_a_reason(ops, verdicts):
    """Operation and device, where every file says gain, and which is neither on by default nor kept off on purpose."""
    gains = dict.fromkeys((one.op, one.device) for one in verdicts if one.verdict == "gain")
    losses = {(one.op, one.device) for one in verdicts if one.verdict == "loss"}
    return [
        (op, device)
        for op, device in gains
        if (op, device) not in losses and device not in ops[op].default_on and not ops[op].kept_off
    ]


def test_the_operations_that_are_on_by_default_are_those_that_gain():
    # Any file ends the skip, one of `bench attention` too: an operation is then on without a verdict, which is a fault.
    if not FILES:
        pytest.skip("no kernels-*.json in benchmarks/results: nothing was measured yet")
    found = [_results.read(file) for file in FILES]
    verdicts = [one for results in found if results["kind"] == "ops" for one in _verdict.verdicts(results).values()]
    assert on_by_default_without_a_gain({name: op.default_on for name, op in OPS.items()}, verdicts) == []
    assert off_without_a_reason(OPS, verdicts) == []


def test_what_is_kept_off_is_on_nowhere():
    kept_off = [op for op in OPS.values() if op.kept_off]
    assert [op.name for op in kept_off] == ["rotary_embedding"]
    assert all(not op.default_on for op in kept_off)


def test_the_rule_itself(results):
    def seconds(kernel, case):
        return 1.0 if kernel == "vllm" or case.startswith("merge_attn_states") else 0.5

    verdicts = list(_verdict.verdicts(results("ops", seconds)).values())
    default_on = {
        "topk_softmax": ("NVIDIA H200", "NVIDIA H100"),
        "merge_attn_states": ("NVIDIA H200",),
        "rotary_embedding": (),
    }
    assert on_by_default_without_a_gain(default_on, verdicts) == [
        ("topk_softmax", "NVIDIA H100"),
        ("merge_attn_states", "NVIDIA H200"),
    ]
    # Nothing measured is no gain.
    assert on_by_default_without_a_gain({"topk_softmax": ("NVIDIA H200",)}, []) == [("topk_softmax", "NVIDIA H200")]


def test_the_rule_itself_the_other_way_round(results):
    verdicts = list(
        _verdict.verdicts(results("ops", lambda kernel, case: 0.5 if kernel == "hwplugin" else 1.0)).values()
    )
    slow = list(_verdict.verdicts(results("ops", lambda kernel, case: 1.0)).values())
    ops = {name: replace(op, default_on=(), kept_off="") for name, op in OPS.items()}
    ops["topk_softmax"] = replace(ops["topk_softmax"], default_on=("NVIDIA H200",))
    ops["rotary_embedding"] = replace(ops["rotary_embedding"], kept_off="it rounds otherwise")
    left = [name for name in OPS if name not in ("topk_softmax", "rotary_embedding")]
    assert off_without_a_reason(ops, verdicts) == [(name, "NVIDIA H200") for name in left]
    assert off_without_a_reason(ops, [*verdicts, *slow]) == []
