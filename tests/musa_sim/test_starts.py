# SPDX-License-Identifier: Apache-2.0
"""An engine of Model Runner V2 that stock vLLM starts starts with the plugin, whatever graphs it has or cannot have."""

from __future__ import annotations

import dataclasses

import pytest

from . import loads
from .loads import Engine, Load, Process, Run

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

_FEW = [dataclasses.replace(one, at=0, params={**one.params, "max_tokens": 14}) for one in loads.two_alone()]
_V2 = "vllm_hwplugin.spec_decode.v2"
#: What each is for is said where it is looked at.
ENGINES = {
    "stock": Load(Engine("eagle3").on_musa(), _FEW),
    "short sizes": Load(Engine("eagle3", graphs_of=(1, 2)).on_musa(), _FEW),
    "no drafting": Load(Engine("eagle3").on_musa(), _FEW, waits=[f"{_V2}.tail_graphs:TailGraphs._draft"]),
    "no inputs": Load(Engine("eagle3").on_musa(), _FEW, waits=[f"{_V2}.step_inputs:prepare_pos_seq_lens"]),
}


@pytest.fixture(scope="module")
def runs(musa_host: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("starts")
    stock = Process(
        {"stock": ENGINES["stock"]}, loads.musa(folder / "stock host", VLLM_HWPLUGIN="1", **loads.UNPATCHED)
    )
    # Gates as they are by default.
    ours = Process({name: load for name, load in ENGINES.items() if name != "stock"}, loads.musa(folder / "host"))
    found = loads.side_by_side({"stock": stock, "ours": ours}, folder)
    return {**found["stock"], **found["ours"]}


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "stock"])
def test_what_is_served_is_what_stock_serves(name: str, runs: dict[str, Run]) -> None:
    loads.assert_same(runs["stock"], runs[name])


def test_a_memory_profile_records_no_more_than_the_target_has(runs: dict[str, Run]) -> None:
    """It is taken before there is a KV cache, on some of the target's graphs."""
    assert "v2-tail-graph" in runs["short sizes"].used


@pytest.mark.parametrize(
    ("name", "lost", "kept"),
    [
        ("no drafting", ["v2-tail-graph", "v2-step-inputs"], []),
        ("no inputs", ["v2-step-inputs"], ["v2-tail-graph"]),
    ],
)
def test_a_recording_that_fails_costs_its_graphs_alone(
    name: str, lost: list[str], kept: list[str], runs: dict[str, Run]
) -> None:
    assert set(lost) <= set(runs[name].unused)
    assert set(kept) <= set(runs[name].used)
