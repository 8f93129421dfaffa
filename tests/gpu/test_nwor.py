# SPDX-License-Identifier: Apache-2.0
"""On a real GPU, in FULL graphs: after each step all bytes of the target's KV cache are those of a run that never wrote
a rejected draft. On both model runners, in formats of one byte too, with the graphs that other features have.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin.base.features import gate_of

from ..musa_sim import loads
from ..nwor.runs import GRAPHS, Job, Run, differing, side_by_side
from .engines import needs
from .mixed_load import environment, options

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

#: Requests of a grammar are left out: compiling it takes another number of steps each time.
REQUESTS = [request for request in loads.mixed() if "structured_outputs" not in request.params]


def compare(folder: Path, runner: str, method: str, mode: str, *, graphs: bool = False, **more: Any) -> dict[str, Run]:
    """A run without the feature, one that never writes what that rejects, and one with it, whose other features are as
    by default; with `graphs` it has none of theirs, and another one has and checks each step. The target's cache is
    compared.

    Each engine has a process of its own: the CUDA graphs of a second one cannot be captured into vLLM's memory pool for
    them, which was given up with those of the first.
    """
    engine = Job(options(method, mode) | more, REQUESTS)

    def process(name: str, job: Job, **variables: str) -> tuple[dict[str, Job], dict[str, str]]:
        chosen = {"VLLM_HWPLUGIN_NWOR_MODE": "off", **variables}
        return {name: job}, environment(folder, name, runner, **chosen)

    def others(choice: str) -> dict[str, str]:
        return {gate_of(feature): choice for feature in GRAPHS[runner]}

    restoring, without = {"VLLM_HWPLUGIN_NWOR_MODE": "restore"}, others("off")
    processes = {
        # Slots are taken where vLLM itself makes them, which it does not where they come out of a graph.
        "off": process("off", engine, **without),
        "never": process("never", dataclasses.replace(engine, oracle="off"), **without),
        "restore": process("restore", engine, **restoring, **(without if graphs else {})),
    }
    if graphs:
        checked = {"VLLM_HWPLUGIN_NWOR_DEBUG_SYNC": "1"}
        processes["with graphs"] = process("with graphs", engine, **restoring, **others("auto"), **checked)
    found = side_by_side(folder, processes)
    assert {one.runner for one in found.values()} == {runner}
    assert found["off"].num_rejected > 100
    assert differing(found["off"], found["never"], "target")
    for restored in found.keys() - {"off", "never"}:
        assert "nwor" in found[restored].used
        assert found[restored].decisions["nwor rows"].startswith("by kernels")
        assert differing(found[restored], found["never"], "target") == []
    return found


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_the_target_holds_no_rejected_draft(runner: str, mode: str, tmp_path: Path) -> None:
    found = compare(tmp_path, runner, "eagle3", mode)
    assert differing(found["restore"], found["never"], "drafter") == []


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_nor_with_the_graphs_of_other_features(runner: str, tmp_path: Path) -> None:
    """The restore is a node of the tail's graph on V2 there."""
    needs("0.24" if runner == "V2" else "0.20")
    found = compare(tmp_path, runner, "eagle3", "FULL_AND_PIECEWISE", graphs=True)
    assert set(GRAPHS[runner]) - {"v2-graph-addresses"} <= set(found["with graphs"].used)
    assert not set(GRAPHS[runner]) & set(found["restore"].used)
    for restored in ("restore", "with graphs"):
        assert differing(found[restored], found["never"], "drafter") == []


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_block_of_drafts(runner: str, tmp_path: Path) -> None:
    compare(tmp_path, runner, "dflash", "FULL_AND_PIECEWISE")


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_a_cache_of_float8(runner: str, tmp_path: Path) -> None:
    compare(tmp_path, runner, "eagle3", "FULL_AND_PIECEWISE", kv_cache_dtype="fp8")
