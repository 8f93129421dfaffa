# SPDX-License-Identifier: Apache-2.0
"""On a real GPU, the plugin ends no start that stock vLLM survives, and a failed recording leaves nothing behind."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from ..musa_sim import loads
from ..musa_sim.loads import Load, Process, Run
from .engines import PROFILED_ENGINE, undisturbed
from .mixed_load import SMALL, environment, options

# All of its engines start in one process of the tests.
pytestmark = pytest.mark.xdist_group("starts")

_FEW = [dataclasses.replace(one, at=0, params={**one.params, "max_tokens": 14}) for one in loads.two_alone()]
#: Of a `VllmConfig`: no pool of graphs that a sleep offloads.
NO_SLEEP = SimpleNamespace(use_cumem_cudagraph_pool=False)
_V1, _V2 = "vllm_hwplugin.spec_decode.v1", "vllm_hwplugin.spec_decode.v2"


def _profiled(method: str, k: int, **compilation: Any) -> dict[str, Any]:
    """An engine for which vLLM measures memory, with its own capture sizes unless others are given."""
    draft = {"method": method, "model": str(SMALL.drafter(method)), "num_speculative_tokens": k}
    own = {
        "model": str(SMALL.target),
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        # What the others take meanwhile counts as its own; its cache is small all the same.
        "gpu_memory_utilization": 0.6,
        "num_gpu_blocks_override": 512,
    }
    return {**PROFILED_ENGINE, **own, "speculative_config": draft, "compilation_config": compilation}


#: name -> runner, options, functions that no graph can hold, features that are lost, and some that are not.
STARTS: dict[str, tuple[str, dict[str, Any], list[str], list[str], list[str]]] = {
    "piecewise": ("V2", _profiled("eagle3", 3, cudagraph_mode="PIECEWISE"), [], ["v2-tail-graph"], []),
    "short sizes": (
        "V2",
        _profiled("eagle3", 3, cudagraph_capture_sizes=[1, 2, 4, 8, 16]),
        [],
        [],
        ["v2-tail-graph", "v2-step-inputs"],
    ),
    "many drafts": ("V2", _profiled("dflash", 15), [], [], ["v2-tail-graph", "capture-sizes"]),
    "no drafting": (
        "V2",
        options("eagle3", "FULL_AND_PIECEWISE"),
        [f"{_V2}.tail_capture:TailRecorder._draft"],
        ["v2-tail-graph", "v2-step-inputs"],
        [],
    ),
    "no inputs": (
        "V2",
        options("eagle3", "FULL_AND_PIECEWISE"),
        [f"{_V2}.step_inputs:prepare_pos_seq_lens"],
        ["v2-step-inputs"],
        ["v2-tail-graph"],
    ),
    "no passes": (
        "V1",
        options("eagle3", "FULL_AND_PIECEWISE"),
        [f"{_V1}.pass_graphs:PassGraphs._call_model"],
        ["draft-full-graph", "v1-draft-phase"],
        ["v1-step-inputs"],
    ),
    # The largest shapes, which vLLM measures, have no phase.
    "large batches": ("V1", _profiled("eagle3", 3), [], [], ["v1-draft-phase", "v1-step-inputs", "capture-sizes"]),
    "no chain": (
        "V1",
        options("eagle3", "FULL_AND_PIECEWISE"),
        [f"{_V1}.draft_loop_graph:eagle_step_update_slot_mapping_and_metadata"],
        ["draft-loop-graph", "v1-draft-phase"],
        ["draft-full-graph", "v1-step-inputs"],
    ),
    "no context": (
        "V1",
        options("dflash", "FULL_AND_PIECEWISE"),
        [f"{_V1}.dflash_full_graph:ContextGraphs.precompute"],
        ["dflash-full-graph", "v1-draft-phase"],
        ["draft-full-graph", "v1-step-inputs"],
    ),
    "no sampling": (
        "V1",
        options("eagle3", "FULL_AND_PIECEWISE"),
        [f"{_V1}.draft_phase_graphs:PhaseRecorder._sample"],
        ["v1-draft-phase"],
        ["draft-full-graph", "v1-step-inputs"],
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """All start at the same time."""
    folder = tmp_path_factory.mktemp("starts")

    def run(name: str) -> Run:
        runner, asked, waits, _, _ = STARTS[name]
        process = Process({name: Load(asked, _FEW, waits=waits)}, environment(folder, name, runner))
        return undisturbed(process.run, folder / name)[name]

    with concurrent.futures.ThreadPoolExecutor(len(STARTS)) as pool:
        return dict(zip(STARTS, pool.map(run, STARTS), strict=True))


@pytest.mark.gpu
@pytest.mark.engine
@pytest.mark.parametrize("name", STARTS)
def test_an_engine_starts_and_serves(name: str, runs: dict[str, Run]) -> None:
    _, _, _, lost, kept = STARTS[name]
    found = runs[name]
    assert set(lost) <= set(found.unused), found.used
    assert set(kept) <= set(found.used), found.unused
    assert len(found.answers) == len(_FEW)
    assert found.accepted()[0] > 0


@pytest.mark.gpu
def test_a_capture_that_cuda_has_ended_leaves_nothing_behind() -> None:
    import torch

    pytest.importorskip("vllm")
    from vllm_hwplugin.spec_decode.graph_recording import RecordingFailed, record_graph, reserved_memory

    ones = torch.ones(1 << 10, device="cuda")

    def waits() -> None:
        held = torch.empty(100 << 20, device="cuda")
        if torch.cuda.is_current_stream_capturing():
            held[0].item()

    with torch.cuda.stream(torch.cuda.Stream()):
        before = reserved_memory()
        said = ""
        try:
            record_graph(waits, torch.cuda.graph_pool_handle(), NO_SLEEP)
        except RecordingFailed as failure:
            # The failure itself would hold the frames, and these the memory.
            said = str(failure)
        assert "not permitted" in said
        assert reserved_memory() <= before + (4 << 20)
        # Both refuse in a capture that torch takes to be under way.
        assert torch.rand(3, device="cuda").sum().item() > 0
        out = torch.zeros_like(ones)
        graph = record_graph(lambda: out.copy_(ones * 2), torch.cuda.graph_pool_handle(), NO_SLEEP)
        graph.replay()
        assert out.sum().item() == 2 << 10
