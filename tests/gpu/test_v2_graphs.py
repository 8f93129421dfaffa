# SPDX-License-Identifier: Apache-2.0
"""On a real GPU, more graphs on Model Runner V2 change no token and no draft, under a load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.version import Version

from ..musa_sim import loads
from ..musa_sim.loads import Load, Run
from ..musa_sim.test_drafters import adapter, dspark
from .engines import needs, vllm_version
from .mixed_load import CASES, METHODS, SMALL, compare, options, run_each, serve_256

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

#: Bound on the difference of a log probability by rounding: logits of 16 have steps of 0.125 in bfloat16.
_ROUNDED: Final = 0.25


def graphs(method: str) -> list[str]:
    """The features of this vLLM. From 0.28 on it drafts in one graph itself."""
    fused = method == "eagle3" and vllm_version() < Version("0.28")
    return ["v2-step-inputs", "v2-tail-graph", *(["v2-fused-drafts"] if fused else [])]


def assert_same_up_to_ties(expected: Run, found: Run) -> None:
    """Compare each request's log probabilities, and its tokens up to the first that rounding may have changed."""
    for name, answer in expected.answers.items():
        other = found.answers[name]
        for token, others, left, right in zip(
            answer["tokens"], other["tokens"], answer["logprobs"], other["logprobs"], strict=True
        ):
            assert abs(left[str(token)][1] - right[str(token)][1]) < _ROUNDED, (name, left, right)
            if token != others:
                # Later tokens follow from it.
                break


@pytest.mark.parametrize(("method", "mode", "sleeps"), CASES)
def test_more_graphs_change_nothing(method: str, mode: str, sleeps: bool, tmp_path: Path) -> None:
    """Some versions make anew, after a sleep, what graphs read of block tables."""
    made = {**options(method, mode), "enable_sleep_mode": sleeps}
    load = [*loads.mixed(), *loads.two_alone(), *loads.asking_for_more()]
    assert compare(Load(made, load, sleeps), tmp_path, "V2", graphs(method)).preempted


def test_graphs_serve_256_concurrent_requests(tmp_path: Path) -> None:
    paths = ("v2-tail-graph sampling", "v2-tail-graph drafting", "v2-step-inputs inputs")
    found = serve_256(tmp_path, "V2", graphs("eagle3"), paths)
    assert found.counted["v2-tail-graph sampling"]["served"] > 0.9 * len(found.steps)


def test_mixed_graphs_serve_512_concurrent_requests(tmp_path: Path) -> None:
    """More than have graphs of decode batches. With vLLM's own capture sizes, so texts may part at a tie."""
    needs("0.26")
    made = {**options("eagle3", "FULL_AND_PIECEWISE"), "max_model_len": 2048, "max_num_batched_tokens": 4096}
    del made["num_gpu_blocks_override"], made["compilation_config"]["cudagraph_capture_sizes"]
    asked = {"temperature": 0.0, "logprobs": 5}
    load = [replace(one, params={**one.params, **asked}) for one in loads.crowd(512)]
    features = ["v2-mixed-graphs"]
    sides = {"off": {}, "on": dict.fromkeys(features, "on")}
    runs = run_each(
        Load({**made, "max_num_seqs": 512, "kv_cache_memory_bytes": 4 << 30}, load), tmp_path, "V2", sides, features
    )
    found = runs["on"]
    assert max(found.widths()) == 512
    # A PIECEWISE graph is one replay for each layer.
    steps, replays = found.counts["steps"], found.counts["graph_replays"]["target"]
    assert 0.9 * steps < replays <= steps, found.counts
    assert_same_up_to_ties(runs["off"], found)


def test_nor_where_vllm_has_warmed_up_with_larger_batches(tmp_path: Path) -> None:
    """Its kernels for top-k and top-p then work in other memory than when the graphs were recorded."""
    load = [*loads.mixed(), *loads.two_alone(top_k=20, top_p=0.9)]
    compare(Load(options("eagle3", "FULL_AND_PIECEWISE", captured=(1, 2)), load), tmp_path, "V2", graphs("eagle3"))


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_nor_do_full_graphs_of_mixed_batches(method: str, tmp_path: Path) -> None:
    """With PIECEWISE graphs of the same sizes, so that both sides round alike."""
    needs("0.26")
    made = options(method, "FULL_AND_PIECEWISE")
    made["compilation_config"]["cudagraph_capture_sizes"] = [32, 64, 96]
    compare(Load(made, [*loads.mixed(), *loads.two_alone()]), tmp_path, "V2", ["v2-mixed-graphs"])


def test_nor_do_full_graphs_of_mixed_batches_with_adapters(tmp_path: Path) -> None:
    """Up to a tie: on a GPU that other tests used, two tokens of one request changed places, a step of bfloat16 apart.

    A request whose adapter was not applied would have other log probabilities.
    """
    needs("0.26")
    adapted = {"adapter": adapter(tmp_path / "adapter", ["o_proj"])}
    made = {**options("eagle3", "FULL_AND_PIECEWISE"), "enable_lora": True, "max_lora_rank": 8}
    made["compilation_config"]["cudagraph_capture_sizes"] = [32, 64, 96]
    load = [
        replace(one, params={**one.params, "logprobs": 5, **(adapted if number % 2 == 0 else {})})
        for number, one in enumerate([*loads.mixed(), *loads.two_alone()])
        if one.greedy
    ]
    features = ["v2-mixed-graphs"]
    sides = {"off": {}, "on": dict.fromkeys(features, "on")}
    runs = run_each(Load({**made, "lora_target_modules": ["o_proj"]}, load), tmp_path, "V2", sides, features)
    assert "v2-mixed-graphs" in runs["on"].used
    assert_same_up_to_ties(runs["off"], runs["on"])


@pytest.mark.parametrize("mixed", [False, True])
def test_nor_with_dspark(mixed: bool, tmp_path: Path) -> None:
    """Graphs of decode batches; then, without these, graphs of mixed batches, as both sides pad alike there."""
    needs("0.26")
    made = {**options("dflash", "FULL_AND_PIECEWISE"), **dspark(tmp_path / "draft"), "skip_tokenizer_init": False}
    sizes = [32, 64, 96] if mixed else [4, 8, 12, 16, 20, 24]
    made["compilation_config"] = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": sizes}
    features = ["v2-mixed-graphs"] if mixed else graphs("dflash")
    compare(Load(made, [*loads.mixed(), *loads.two_alone()]), tmp_path, "V2", features)


def test_nor_without_a_drafter(tmp_path: Path) -> None:
    """With the plugin's sizes. Both sides pad differently, so a few texts may part at a tie."""
    needs("0.26")
    made = options("eagle3", "FULL_AND_PIECEWISE")
    del made["speculative_config"], made["compilation_config"]["cudagraph_capture_sizes"]
    features = [*graphs("none"), "v2-mixed-graphs"]
    load = Load(made, [*loads.mixed(), *loads.two_alone()])
    sides: dict[str, dict[str, str]] = {"off": {}, "on": dict.fromkeys(features, "on")}
    runs = run_each(load, tmp_path, "V2", sides, features)
    expected, found = (runs[side].answers for side in sides)
    assert set(features) <= set(runs["on"].used)
    same = [name for name in expected if expected[name]["tokens"] == found[name]["tokens"]]
    assert len(same) > 0.8 * len(expected)


@pytest.mark.parametrize(("method", "since"), [("ngram", "0.32.0"), ("draft_model", "0.31.0")])
def test_nor_with_drafters_that_vllm_has_no_graph_for(method: str, since: str, tmp_path: Path) -> None:
    needs(since)
    asked: dict[str, Any] = {"method": method, "num_speculative_tokens": METHODS["eagle3"]}
    asked |= {"prompt_lookup_max": 3} if method == "ngram" else {"model": str(SMALL.target)}
    made = {**options("eagle3", "FULL_AND_PIECEWISE"), "speculative_config": asked}
    compare(Load(made, [*loads.mixed(), *loads.two_alone()]), tmp_path, "V2", graphs(method))


@pytest.mark.parametrize("method", METHODS)
def test_nor_with_a_schedule_of_numbers_of_drafts(method: str, tmp_path: Path) -> None:
    needs("0.32")
    made = options(method, "FULL_AND_PIECEWISE")
    schedule = [[1, 1, METHODS[method]], [2, 3, 2], [4, 6, 1]]
    made["speculative_config"]["num_speculative_tokens_per_batch_size"] = schedule
    compare(Load(made, [*loads.mixed(), *loads.two_alone()]), tmp_path, "V2", graphs(method))
