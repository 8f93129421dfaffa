# SPDX-License-Identifier: Apache-2.0
"""On a real GPU, graphs change no token and no draft of hybrids, mixtures of experts, MLA, FP8 or an assistant, or are
refused.

Each case says which features its engine uses, and why not the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ..musa_sim import loads
from ..musa_sim.loads import Request, Run
from .engines import needs
from .mixed_load import run_each
from .small_shapes import CASES, V1_GRAPHS, V2_GRAPHS

pytestmark = [pytest.mark.gpu, pytest.mark.engine]


def compare(name: str, folder: Path, runner: str, expected: Mapping[str, str], features: tuple[str, ...]) -> None:
    """Run a case without the features and with them: they change nothing, and each is used or refused as expected."""
    case = CASES[name]
    needs(case.since)
    needs("0.24" if runner == "V2" else "0.20")
    made = case.load(folder / "model")
    sides: dict[str, dict[str, str]] = {"off": {}, "auto": dict.fromkeys(features, "auto")}
    runs = run_each(made, folder, runner, sides, features, **case.variables)
    stock, graphs = runs["off"], runs["auto"]
    loads.assert_same(stock, graphs)
    assert (stock.runner, graphs.runner) == (runner, runner)
    assert set(features).isdisjoint(stock.used)
    assert_means_something(stock, case.k)
    for feature, reason in expected.items():
        assert (feature in graphs.used) == (not reason), graphs.unused.get(feature)
        assert reason in graphs.unused.get(feature, "")


def assert_means_something(run: Run, k: int) -> None:
    """Drafts were accepted and rejected, and neither they nor the texts are one token over and over."""
    accepted = run.accepted()
    assert len(accepted) == k
    assert 0 < accepted[-1] < accepted[0]
    tokens = {token for answer in run.answers.values() for token in answer["tokens"]}
    drafts = {token for step in run.steps for drafted in step["drafts"].values() for token in drafted}
    assert min(len(tokens), len(drafts)) > 10


@pytest.mark.parametrize("name", CASES)
def test_v1(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path, "V1", CASES[name].v1, V1_GRAPHS)


@pytest.mark.parametrize("name", CASES)
def test_v2(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path, "V2", CASES[name].v2, V2_GRAPHS)


def test_mixed_graphs_over_mla(tmp_path: Path) -> None:
    """With PIECEWISE graphs of the same sizes, so that both sides round alike."""
    needs("0.31")
    case, sizes = CASES["MLA"], list(range(32, 641, 32))
    made = case.load(tmp_path / "model")
    options = {**made.options, "max_model_len": 1024, "max_num_batched_tokens": 640}
    options["compilation_config"] = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": sizes}
    long = [
        Request(f"l{tokens}", [3 + place % 1000 for place in range(tokens)], at, {"temperature": 0.0, "max_tokens": 8})
        for at, tokens in ((8, 512), (16, 513), (24, 700))
    ]
    load = replace(made, options=options, requests=[*made.requests, *long])
    features = ("v2-mixed-graphs",)
    variables = {**case.variables, "VLLM_HWPLUGIN_MORE_GRAPHS": "mla-prompts"}
    runs = run_each(load, tmp_path, "V2", {"off": {}, "on": dict.fromkeys(features, "on")}, features, **variables)
    expected, found = runs["off"], runs["on"]
    replays = {side: run.counts["graph_replays"]["target"] for side, run in runs.items()}
    longest = [max(step["scheduled"].values()) for step in found.steps]
    loads.assert_same(expected, found)
    assert set(features) <= set(found.used)
    assert_means_something(expected, case.k)
    assert {512, 513} <= set(longest)
    # A step is one replay, or with a longer request as many more as the model has pieces.
    more, rest = divmod(replays["on"] - len(longest), sum(count > 512 for count in longest))
    assert (more > 0, rest) == (True, 0)
    assert replays["off"] > replays["on"]
