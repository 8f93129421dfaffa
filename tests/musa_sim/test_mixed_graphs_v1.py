# SPDX-License-Identifier: Apache-2.0
"""FULL graphs of mixed batches on Model Runner V1, on the simulated device: nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_hwplugin.base.features import gate_of

from .. import releases
from . import loads
from .loads import Engine, Load, Run
from .test_model_runner_v1 import DFLASH, GRAPHS, INPUTS, PHASE, STOCK

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

MIXED = "v1-mixed-graphs"
WITH_MIXED = GRAPHS | {gate_of("capture-sizes"): "mixed", gate_of(MIXED): "auto"}
#: The last three sizes are only for batches with prompts: 32, 48 and 64 tokens.
EAGLE3 = Engine("eagle3", graphs_of=(1, 2, 4, 6, 8, 12, 16))
SMALLEST, DECODE = 32, 4
#: Decode batches, too, have graphs of 32 and 48 tokens.
OF_BLOCKS = replace(DFLASH, graphs_of=(1, 2, 4, 6, 8, 16))


def load(mode: str, unknown: str = "any batch", engine: Engine = EAGLE3) -> Load:
    options = {**replace(engine, graphs=mode).on_musa(), "async_scheduling": True}
    if mode == "FULL_AND_PIECEWISE":
        # PIECEWISE graphs need vLLM's compilation.
        options["compilation_config"] = {**options["compilation_config"], "mode": 3, "backend": "eager"}
    return Load(options, [*loads.mixed(), *loads.two_alone()], unknown=unknown)


def mixed_steps(run: Run) -> int:
    """Steps of a prompt or of unequal draft counts that have as many tokens as the graphs of mixed batches."""
    counts = [list(step["scheduled"].values()) for step in run.steps]
    # More tokens are padded to the next size, which has a graph.
    return sum(sum(step) > SMALLEST - 8 and set(step) != {DECODE} for step in counts)


@pytest.mark.parametrize("version", [releases.NEWEST, "0.20.2", "0.26.0"])
def test_graphs_of_mixed_batches_change_nothing(
    version: str, released: Callable[[str], tuple[str, Path]], musa_host: None, tmp_path: Path
) -> None:
    # What makes attention of any batch stays for a process, so the refused engine is the first one.
    asked = {"refused": load("FULL_DECODE_ONLY", unknown="")}
    asked |= {mode: load(mode) for mode in ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")}
    if version != "0.20.2":
        # A fourth engine there still finds memory of the third one, and ends its start when that is freed.
        asked["dflash"] = load("FULL_DECODE_ONLY", engine=OF_BLOCKS)
    runs = loads.run_both(asked, STOCK, WITH_MIXED, tmp_path, released(version))
    for expected, found in runs.values():
        loads.assert_same(expected, found)
        assert (expected.runner, found.runner) == ("V1", "V1")
        assert expected.accepted()[1] > 0
        assert expected.preempted
        assert {PHASE, INPUTS} <= set(found.used)

    _, refused = runs["refused"]
    assert "MusaFlashAttentionMetadataBuilder supports UNIFORM_BATCH" in refused.unused[MIXED]
    expected, found = runs["FULL_DECODE_ONLY"]
    assert MIXED in found.used
    assert found.noted[MIXED] == "3 shapes of at most 64 tokens and 6 requests"
    more = replays(found) - replays(refused)
    assert more == mixed_steps(found) > len(found.steps) // 10
    # Each FULL graph replaces some PIECEWISE graphs.
    expected, found = runs["FULL_AND_PIECEWISE"]
    assert MIXED in found.used
    assert replays(found) < replays(expected)
    if "dflash" in runs:
        expected, found = runs["dflash"]
        assert MIXED in found.used
        assert replays(found) > replays(expected) + len(found.steps) // 10
        assert found.counted[f"{PHASE} drafting"].keys() == {"prompt", "served"}


def replays(run: Run) -> int:
    counted: int = run.counts["graph_replays"]["target"]
    return counted
