# SPDX-License-Identifier: Apache-2.0
"""The load of `musa_sim.loads` on a GPU: a small engine, whose KV cache does not hold all requests at a time.

Beside what the simulated device shows, this has vLLM's own kernels, compiled models, and work that is still under way
when the host goes on.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from packaging.version import Version

from vllm_hwplugin.base.features import gate_of
from vllm_hwplugin_lab.bench import engine_environment, find_checkpoints
from vllm_hwplugin_lab.bench._entry_points import provide
from vllm_hwplugin_lab.bench._launch import child_environment

from ..musa_sim import loads
from ..musa_sim.loads import Load, Process, Run
from .engines import SMALL_ENGINE, undisturbed

SMALL = find_checkpoints(None)
METHODS: Final = {"eagle3": 3, "dflash": 7}
# Else Inductor chooses by time how a sum is split, and two processes may round otherwise. torch 2.11 cannot have it:
# vLLM asks it to time kernels that run as one (`benchmark_combo_kernel`), and in this mode it refuses.
_ALIKE: Final = {"TORCHINDUCTOR_DETERMINISTIC": "1"} if Version(version("torch")) >= Version("2.13") else {}
#: Of graphs: method, mode, and whether the engine sleeps, which gives up the KV cache's memory, and serves once more.
CASES: Final = (
    ("eagle3", "FULL_AND_PIECEWISE", True),
    ("eagle3", "FULL_DECODE_ONLY", False),
    ("dflash", "FULL_AND_PIECEWISE", False),
    ("dflash", "FULL_DECODE_ONLY", False),
)
# So few that six requests at a time do not fit; how many each needs depends on its drafts.
_NUM_BLOCKS: Final = {"eagle3": 19, "dflash": 24}
#: Requests of the batches that have graphs. The largest is vLLM's own choice, for batches with prompts. Three and five
#: of Eagle3's are padded; DFlash's logits are of twice as many rows, and a GPU may round them otherwise when padded.
_CAPTURED: Final = {"eagle3": (1, 2, 4, 6, 12), "dflash": (1, 2, 3, 4, 5, 6, 12)}


def options(method: str, mode: str, captured: Sequence[int] | None = None) -> dict[str, Any]:
    """Arguments of `LLM`: a target with a drafter of `METHODS`, a `cudagraph_mode`, and requests of the batches that
    have graphs.
    """
    return {
        **SMALL_ENGINE,
        "model": str(SMALL.target),
        "max_model_len": 128,
        "max_num_seqs": 6,
        # Longer prompts come in pieces.
        "max_num_batched_tokens": 112,
        "block_size": 16,
        "num_gpu_blocks_override": _NUM_BLOCKS[method],
        "enable_prefix_caching": True,
        "speculative_config": {
            "method": method,
            "model": str(SMALL.drafter(method)),
            "num_speculative_tokens": METHODS[method],
        },
        "compilation_config": {
            "cudagraph_mode": mode,
            "cudagraph_capture_sizes": [(1 + METHODS[method]) * requests for requests in captured or _CAPTURED[method]],
        },
    }


def environment(folder: Path, name: str, runner: str, **variables: str) -> dict[str, str]:
    """Of a process of this name, on V1 or V2, whose features are on where variables do not say otherwise.

    vLLM does not write its compile cache atomically: processes that may run at the same time have different caches.
    """
    chosen = {
        **loads.VARIABLES,
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "V2" else "0",
        **_ALIKE,
        **variables,
    }
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    caches = {"VLLM_CACHE_ROOT": str(Path(tempfile.gettempdir(), "vllm-hwplugin-tests", worker, name))}
    patched = engine_environment("cuda", patched=True, extra={**chosen, **caches})
    return child_environment(patched, provide(folder / f"metadata {name}"))


def run_each(
    made: Load,
    folder: Path,
    runner: str,
    sides: Mapping[str, Mapping[str, str]],
    features: Collection[str],
    **variables: str,
) -> dict[str, Run]:
    """Run a load on V1 or V2 at the same time with several choices for `features`.

    Args:
        made: the load.
        folder: for what the runs write.
        runner: V1 or V2.
        sides: name -> feature -> its gate's value, `off` where none is given.
        features: those that differ.
        variables: of all sides.
    """

    def process(side: str) -> Process:
        gates = {gate_of(feature): sides[side].get(feature, "off") for feature in features}
        return Process({side: made}, environment(folder, side, runner, **gates, **variables))

    processes = {side: process(side) for side in sides}
    runs = loads.at_once(
        {side: partial(undisturbed, process.run, folder / side) for side, process in processes.items()}
    )
    return {side: runs[side][side] for side in sides}


def compare(made: Load, folder: Path, runner: str, graphs: Collection[str]) -> Run:
    """Run a load on V1 or V2 without the features `graphs` and with them, and let nothing differ.

    Returns:
        The run without them.
    """
    runs = run_each(made, folder, runner, {"off": {}, "on": dict.fromkeys(graphs, "on")}, graphs)
    expected, found = runs["off"], runs["on"]
    loads.assert_same(expected, found)
    assert (expected.runner, found.runner) == (runner, runner)
    assert set(graphs) <= set(found.used)
    assert expected.accepted()[1] > 0
    return expected


def serve_256(folder: Path, runner: str, graphs: Collection[str], paths: Collection[str], **more: Any) -> Run:
    """Have 256 requests decode at the same time, with vLLM's own capture sizes and one long context among short ones.

    A padded batch may round its logits otherwise, so a few texts may part at a tie.

    Args:
        paths: parts of features that no batch may be too large for.

    Returns:
        The run with `graphs`.
    """
    made = {**options("eagle3", "FULL_AND_PIECEWISE"), "max_model_len": 2048, "max_num_batched_tokens": 4096, **more}
    del made["num_gpu_blocks_override"], made["compilation_config"]["cudagraph_capture_sizes"]
    load = Load({**made, "max_num_seqs": 256}, loads.crowd(256))
    runs = run_each(load, folder, runner, {"off": {}, "on": dict.fromkeys(graphs, "on")}, graphs)
    expected, found = runs["off"], runs["on"]
    assert max(found.widths()) == 256
    for path in paths:
        assert "larger_batch" not in found.counted[path], found.counted
    names = expected.answers.keys()
    same = [name for name in names if expected.answers[name]["tokens"] == found.answers[name]["tokens"]]
    assert len(same) > 0.95 * len(names)
    return found
