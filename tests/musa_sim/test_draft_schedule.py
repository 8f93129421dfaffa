# SPDX-License-Identifier: Apache-2.0
"""The number of drafts by load, on Model Runner V2 on the simulated device: the texts are those of a fixed number."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin.base.features import DRAFT_SCHEDULE, gate_of

from . import loads, random_drafts
from .loads import Engine, Load, Process, Request, Run

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

GRAPHS = ("v2-step-inputs", "v2-tail-graph")
ALSO = ("backport-draft-count-graphs", "engine-report", "v2-graph-addresses")
ON = {gate_of(feature): "on" for feature in (*ALSO, *GRAPHS, DRAFT_SCHEDULE)}


def alone() -> list[Request]:
    """Return greedy requests that decode one after the other, and at the end three at a time."""
    texts = json.loads((loads.SMALL / "prompts.json").read_text())["prompt_ids"]
    begins = (0, 60, 120, 180, 181, 182)
    return [
        Request("abcdef"[number], texts[number][:20], at, {"temperature": 0.0, "max_tokens": 100 if at < 180 else 24})
        for number, at in enumerate(begins)
    ]


@pytest.fixture(scope="module")
def sides(
    musa_host: None, newest: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Run]]:
    folder = tmp_path_factory.mktemp("draft schedule")
    options: Mapping[str, Any] = {**Engine("eagle3").on_musa(), "num_gpu_blocks_override": 60}
    together = [dataclasses.replace(one, params={**one.params, "temperature": 0.0}) for one in loads.by_temperature()]
    at_random = f"{random_drafts.RandomDrafts.__module__}.{random_drafts.RandomDrafts.__qualname__}"
    # What else is in the batch makes no difference to a greedy text.
    at_once = [dataclasses.replace(one, at=0) for one in alone()]
    fixed = {"alone": Load(options, at_once, autotuned=False), "together": Load(options, together, autotuned=False)}
    changing = {
        "alone": Load(options, alone(), autotuned=False),
        "together": Load({**options, "scheduler_cls": at_random}, together, autotuned=False),
    }
    return loads.side_by_side(
        {
            "fixed": Process(fixed, loads.musa(folder / "host, fixed", newest, **loads.UNPATCHED)),
            "changing": Process(changing, loads.musa(folder / "host, changing", newest, **loads.UNPATCHED | ON)),
        },
        folder,
    )


def verified(run: Run) -> Counter[int]:
    """Count the steps in which each request verified the same number of drafts, by this number."""
    numbers = [{step["verified"].get(one, 0) for one in step["scheduled"]} for step in run.steps]
    return Counter(number.pop() for number in numbers if len(number) == 1)


@pytest.mark.parametrize("name", ["alone", "together"])
def test_texts_are_those_of_a_fixed_number(name: str, sides: dict[str, dict[str, Run]]) -> None:
    """One by one with trials of other numbers, and several at a time with a number at random in each step."""
    fixed, changing = sides["fixed"][name], sides["changing"][name]
    assert changing.texts(changing.answers) == fixed.texts(fixed.answers)
    assert verified(fixed).keys() == {0, 3}
    assert all(verified(changing)[number] > 2 for number in (1, 2, 3))


def test_each_number_has_graphs_for_any_batch(sides: dict[str, dict[str, Run]]) -> None:
    run = sides["changing"]["alone"]
    assert DRAFT_SCHEDULE in run.used
    drafting = run.counted["v2-tail-graph drafting"]
    assert drafting.keys() == {"served", "prompt", "fewer_drafts"}
    # A trial begins and ends with a step that makes another number of drafts than it verifies.
    assert drafting["fewer_drafts"] <= 15 < 100 < drafting["served"]
    assert run.noted["v2-tail-graph"].startswith("9 shapes of at most 6 requests")
