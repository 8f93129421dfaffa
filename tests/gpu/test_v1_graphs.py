# SPDX-License-Identifier: Apache-2.0
"""On a real GPU, more graphs on Model Runner V1 change no token and no draft, under a load.

Beside what the simulated device shows, this has vLLM's own kernels, compiled models, and work that is still under way
when the host goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin.bench import engine_environment, find_checkpoints
from vllm_hwplugin.bench._entry_points import provide
from vllm_hwplugin.bench._launch import child_environment
from vllm_hwplugin.spec_decode.features import gate_of

from ..musa_sim import loads
from ..musa_sim.loads import Load, Process
from .engines import SMALL_ENGINE

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

SMALL = find_checkpoints(None)
#: Beside the drafters' own graphs, which both sides have.
GRAPHS = ("v1-step-inputs", "v1-draft-phase")
SIDES = {side: {gate_of(feature): side for feature in GRAPHS} for side in ("off", "on")}
METHODS = {"eagle3": 3, "dflash": 7}
# So few that six requests at a time do not fit; how many each needs depends on its drafts.
NUM_BLOCKS = {"eagle3": 19, "dflash": 24}
MODES = ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY")


def load(method: str, mode: str, *, asynchronous: bool = True, after_sleep: bool = False) -> Load:
    options: dict[str, Any] = {
        **SMALL_ENGINE,
        "model": str(SMALL.target),
        "max_model_len": 128,
        "max_num_seqs": 6,
        # Longer prompts come in pieces.
        "max_num_batched_tokens": 112,
        "block_size": 16,
        "num_gpu_blocks_override": NUM_BLOCKS[method],
        "enable_prefix_caching": True,
        "async_scheduling": asynchronous,
        "speculative_config": {
            "method": method,
            "model": str(SMALL.drafter(method)),
            "num_speculative_tokens": METHODS[method],
        },
        "compilation_config": {"cudagraph_mode": mode},
    }
    if after_sleep:
        options["enable_sleep_mode"] = True
    return Load(options, loads.mixed(), after_sleep)


def compare(made: Load, folder: Path) -> None:
    """Run a load without the graphs and with them, and let nothing differ."""

    def process(side: str) -> Process:
        variables = {**loads.VARIABLES, "VLLM_USE_V2_MODEL_RUNNER": "0", **SIDES[side]}
        environment = engine_environment("cuda", patched=True, extra=variables)
        return Process({side: made}, child_environment(environment, provide(folder / f"metadata {side}")))

    runs = loads.side_by_side({side: process(side) for side in SIDES}, folder)
    expected, found = (runs[side][side] for side in SIDES)
    assert (expected.runner, found.runner) == ("V1", "V1")
    loads.assert_same(expected, found)
    assert set(GRAPHS) <= set(found.used)
    assert expected.accepted()[1] > 0
    assert expected.preempted or made.requests != loads.mixed()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_more_graphs_change_nothing(method: str, mode: str, tmp_path: Path) -> None:
    compare(load(method, mode), tmp_path)


@pytest.mark.parametrize("method", METHODS)
def test_nor_where_the_scheduler_waits_for_each_step(method: str, tmp_path: Path) -> None:
    compare(load(method, MODES[0], asynchronous=False), tmp_path)


def test_nor_do_they_after_a_sleep(tmp_path: Path) -> None:
    """Which gives up the memory of the KV cache."""
    compare(load("eagle3", MODES[0], after_sleep=True), tmp_path)


@pytest.mark.parametrize("method", METHODS)
def test_nor_where_drafts_are_drawn_by_temperature(method: str, tmp_path: Path) -> None:
    made = load(method, MODES[0])
    speculation = {**made.options["speculative_config"], "draft_sample_method": "probabilistic"}
    compare(Load({**made.options, "speculative_config": speculation}, loads.by_temperature()), tmp_path)
