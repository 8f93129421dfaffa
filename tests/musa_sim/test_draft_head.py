# SPDX-License-Identifier: Apache-2.0
"""Drafts by an FP8 copy of the target's head, and by rows of it, on Model Runner V2 on the simulated device."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_hwplugin.base.features import V2_DRAFT_HEAD, gate_of

from . import loads
from .loads import Engine, Load, Process, Request, Run

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

GRAPHS = {gate_of(name): "on" for name in ("engine-report", "v2-graph-addresses", "v2-step-inputs", "v2-tail-graph")}


def greedy() -> list[Request]:
    texts = json.loads((loads.SMALL / "prompts.json").read_text())["prompt_ids"]
    params = {"temperature": 0.0, "max_tokens": 40}
    return [Request("abcdef"[number], texts[number][:40], 3 * number, params) for number in range(6)]


LOAD = Load(Engine("eagle3", more={"num_gpu_blocks_override": 60}).on_musa(), greedy(), autotuned=False)


def draws(seed: int) -> Load:
    """Return one prompt's answers of four tokens, 150 times."""
    prompt = json.loads((loads.SMALL / "prompts.json").read_text())["prompt_ids"][0][:40]
    params = {"temperature": 1.0, "max_tokens": 4}
    requests = [Request(f"r{number}", prompt, 0, {**params, "seed": seed + number}) for number in range(150)]
    return Load(LOAD.options, requests, autotuned=False)


#: By form, the loads of its process.
LOADS = {
    "off": {"greedy": LOAD, "draws": draws(0)},
    "copy": {"greedy": LOAD},
    "rows": {"greedy": LOAD, "draws": draws(1000)},
}


def sides_of(folder: Path, vllm: tuple[str, Path], *forms: str) -> dict[str, dict[str, Run]]:
    processes = {
        form: Process(
            LOADS[form],
            loads.musa(folder / f"host, {form}", vllm, **loads.UNPATCHED | GRAPHS | {gate_of(V2_DRAFT_HEAD): form}),
        )
        for form in forms
    }
    return loads.side_by_side(processes, folder)


@pytest.fixture(scope="module")
def sides(
    musa_host: None, newest: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Run]]:
    return sides_of(tmp_path_factory.mktemp("draft head"), newest, *LOADS)


def assert_drafts_by(form: str, sides: dict[str, dict[str, Run]]) -> None:
    whole, found = sides["off"]["greedy"], sides[form]["greedy"]
    assert V2_DRAFT_HEAD in found.used
    assert form == "copy" or " had a row" in found.noted[V2_DRAFT_HEAD]
    assert found.texts(found.answers) == whole.texts(whole.answers)
    # Without rows for what running requests sample it is 0.91.
    assert sum(found.accepted()) > 0.93 * sum(whole.accepted())


@pytest.mark.parametrize("form", ["copy", "rows"])
def test_texts_stay(form: str, sides: dict[str, dict[str, Run]]) -> None:
    assert_drafts_by(form, sides)


def test_copy_is_the_plugins_before_0_33(
    released: Callable[[str], tuple[str, Path]], sides: dict[str, dict[str, Run]], tmp_path: Path
) -> None:
    assert_drafts_by("copy", {**sides, **sides_of(tmp_path, released("0.32.0"), "copy")})


def distance(left: Run, right: Run) -> float:
    """Return by how many standard deviations two runs' tokens differ (chi-squared, each position's frequent tokens)."""
    chi, freedom = 0.0, 0
    for position in range(4):
        counts = [Counter(answer["tokens"][position] for answer in run.answers.values()) for run in (left, right)]
        frequent = [token for token in counts[0] | counts[1] if counts[0][token] + counts[1][token] >= 10]
        pairs = [(counts[0][token], counts[1][token]) for token in frequent]
        pairs.append((150 - sum(pair[0] for pair in pairs), 150 - sum(pair[1] for pair in pairs)))
        chi += sum((one - other) ** 2 / max(one + other, 1) for one, other in pairs)
        freedom += len(pairs) - 1
    return (chi - freedom) / math.sqrt(2 * freedom)


def test_the_distribution_stays(sides: dict[str, dict[str, Run]]) -> None:
    """Draws at another temperature (0.6) are more than 6 standard deviations away."""
    expected, found = sides["off"]["draws"], sides["rows"]["draws"]
    assert V2_DRAFT_HEAD in found.used
    assert sum(found.accepted()) > 100
    assert distance(expected, found) < 3
