# SPDX-License-Identifier: Apache-2.0
"""An engine that stock vLLM starts starts with the plugin, whatever graphs it has or cannot have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from vllm_hwplugin.spec_decode.kv_cache_room import TOO_SMALL

from . import loads
from .loads import Engine, Load, Process, Run

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

_FEW = [dataclasses.replace(one, at=0, params={**one.params, "max_tokens": 14}) for one in loads.two_alone()]
_OURS = "vllm_hwplugin.spec_decode"


def _load(*waits: str, graphs_of: Sequence[int] = (1, 2, 4, 6)) -> Load:
    return Load(Engine("eagle3", graphs_of=graphs_of).on_musa(), _FEW, waits=[f"{_OURS}.{one}" for one in waits])


#: Sizes are the plugin's above eight tokens. vLLM's own graphs take 4 MiB, a request 0.3, and the plugin's graphs 40.
_SMALL = Engine("eagle3", more={"num_gpu_blocks_override": None})
_NO_ROOM = Load(
    {**_SMALL.on_musa(), "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE", "mode": 3, "backend": "eager"}},
    _FEW,
    # It stays for the process's later engines.
    ceiling=8,
    memory=6 << 20,
)

#: By model runner. A wait for the device breaks a capture.
ENGINES = {
    "V1": {
        "no chain, no inputs": _load(
            "v1.draft_loop_graph:eagle_step_update_slot_mapping_and_metadata", "v1.step_inputs:StepInputs._advance"
        ),
        "no room": _NO_ROOM,
    },
    "V2": {
        # A memory profile is taken before there is a KV cache, on some of the target's graphs. It records no more.
        "no inputs, short sizes": _load("v2.step_inputs:prepare_pos_seq_lens", graphs_of=(1, 2)),
        "no room": _NO_ROOM,
    },
}


@pytest.fixture(scope="module")
def runs(musa_host: None, newest: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Run]:
    """By model runner and name: stock vLLM, and each engine with gates as they are by default."""
    folder, processes = tmp_path_factory.mktemp("starts"), {}
    for runner, engines in ENGINES.items():
        chosen = {
            "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "V2")),
            # As on CUDA.
            "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "1",
        }
        on = loads.musa(folder / f"host, {runner}", newest, **chosen)
        stock = loads.musa(folder / f"stock host, {runner}", newest, VLLM_HWPLUGIN="1", **loads.UNPATCHED, **chosen)
        sides = {"stock": (_load(), stock), "stock, no room": (_NO_ROOM, stock)}
        sides |= {name: (load, on) for name, load in engines.items()}
        # One engine each: a later engine of a process finds memory that an earlier one has left.
        processes |= {f"{runner}, {name}": Process({"": load}, host) for name, (load, host) in sides.items()}
    found = loads.side_by_side(processes, folder)
    return {asked: found[asked][""] for asked in processes}


@pytest.mark.parametrize(
    ("runner", "name", "lost", "kept"),
    [
        ("V1", "no chain, no inputs", ["draft-loop-graph", "v1-draft-phase", "v1-step-inputs"], ["draft-full-graph"]),
        ("V2", "no inputs, short sizes", ["v2-step-inputs"], ["v2-tail-graph"]),
    ],
)
def test_a_recording_that_fails_costs_its_graphs_and_those_built_on_them(
    runner: str, name: str, lost: list[str], kept: list[str], runs: Mapping[str, Run]
) -> None:
    expected, found = runs[f"{runner}, stock"], runs[f"{runner}, {name}"]
    assert expected.runner == found.runner == runner
    loads.assert_same(expected, found)
    assert set(lost) <= set(found.unused)
    assert set(kept) <= set(found.used)


@pytest.mark.parametrize("runner", ENGINES)
def test_graphs_beside_which_no_request_has_room_are_left_out(runner: str, runs: Mapping[str, Run]) -> None:
    expected, found = runs[f"{runner}, stock, no room"], runs[f"{runner}, no room"]
    loads.assert_same(expected, found)
    lost = {
        "V1": ["capture-sizes", "draft-full-graph", "draft-loop-graph", "v1-draft-phase", "v1-step-inputs"],
        "V2": ["capture-sizes", "v2-tail-graph", "v2-mixed-graphs"],
    }[runner]
    assert all(TOO_SMALL in found.unused[feature] for feature in lost)
    assert found.counts["graph_replays"] == expected.counts["graph_replays"]
