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
from .test_model_runner_v1 import GRAPHS, INPUTS, PHASE, STOCK

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

MIXED = "v1-mixed-graphs"
WITH_MIXED = GRAPHS | {gate_of("capture-sizes"): "mixed", gate_of(MIXED): "auto"}
#: The last three sizes are only for batches with prompts: 32, 48 and 64 tokens.
EAGLE3 = Engine("eagle3", graphs_of=(1, 2, 4, 6, 8, 12, 16))
SMALLEST, DECODE = 32, 4


def load(mode: str, unknown: str = "any batch") -> Load:
    options = {**replace(EAGLE3, graphs=mode).on_musa(), "async_scheduling": True}
    if mode == "FULL_AND_PIECEWISE":
        # PIECEWISE graphs need vLLM's compilation.
        options["compilation_config"] = {**options["compilation_config"], "mode": 3, "backend": "eager"}
    return Load(options, [*loads.mixed(), *loads.two_alone()], unknown=unknown)


def mixed_steps(run: Run) -> int:
    """Steps of a prompt or of unequal draft counts that have as many tokens as the graphs of mixed batches."""
    counts = [list(step["scheduled"].values()) for step in run.steps]
    # More tokens are padded to the next size, which has a graph.
    return sum(sum(step) > SMALLEST - 8 and set(step) != {DECODE} for step in counts)


def runs_of(
    version: str, folder: Path, released: Callable[[str], tuple[str, Path]], asked: dict[str, Load]
) -> dict[str, tuple[Run, Run]]:
    """Return the runs without and with graphs of mixed batches, which have the same tokens and drafts."""
    runs: dict[str, tuple[Run, Run]] = loads.run_both(asked, STOCK, WITH_MIXED, folder, released(version))
    for expected, found in runs.values():
        loads.assert_same(expected, found)
        assert (expected.runner, found.runner) == ("V1", "V1")
        assert expected.accepted()[1] > 0
        assert expected.preempted
        assert {PHASE, INPUTS} <= set(found.used)
    return runs


def test_graphs_of_mixed_batches_change_nothing(
    released: Callable[[str], tuple[str, Path]], musa_host: None, tmp_path: Path
) -> None:
    # What makes attention of any batch stays for a process, so the refused engine is the first one.
    modes = {"refused": load("FULL_DECODE_ONLY", unknown=""), "mixed": load("FULL_DECODE_ONLY")}
    runs = runs_of(releases.NEWEST, tmp_path, released, modes)
    _, refused = runs["refused"]
    assert "MusaFlashAttentionMetadataBuilder supports UNIFORM_BATCH" in refused.unused[MIXED]
    _, found = runs["mixed"]
    assert MIXED in found.used
    assert found.noted[MIXED] == "3 shapes of at most 64 tokens and 6 requests"
    more = replays(found) - replays(refused)
    assert more == mixed_steps(found) > len(found.steps) // 10


def test_nor_do_they_on_the_oldest_vllm(
    released: Callable[[str], tuple[str, Path]], musa_host: None, tmp_path: Path
) -> None:
    expected, found = runs_of("0.20.2", tmp_path, released, {"mixed": load("FULL_AND_PIECEWISE")})["mixed"]
    assert MIXED in found.used
    # Each FULL graph replaces some PIECEWISE graphs.
    assert replays(found) < replays(expected)


def replays(run: Run) -> int:
    counted: int = run.counts["graph_replays"]["target"]
    return counted
