# SPDX-License-Identifier: Apache-2.0
"""More than 64 concurrent requests on the simulated device, and starts on an idle and on a loaded machine."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import loads
from .loads import Engine, Load, Process, Request, Run

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

REQUESTS = 65
MANY = Engine("eagle3", graphs_of=(1, REQUESTS), more={"max_num_seqs": REQUESTS, "max_num_batched_tokens": 320})
#: The sizes are the plugin's, and batches with prompts have graphs.
OWN_SIZES = {"cudagraph_mode": "FULL_AND_PIECEWISE", "mode": 3, "backend": "eager"}


def requests(count: int) -> list[Request]:
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    return [Request(f"r{index}", [3 + index, 5 + index, 7], 0, params) for index in range(count)]


LOADS = {
    "many": Load({**MANY.on_musa(), "num_gpu_blocks_override": 96}, requests(REQUESTS)),
    "few": Load({**Engine("eagle3").on_musa(), "compilation_config": OWN_SIZES}, requests(4)),
}


def run(name: str, folder: Path, vllm: tuple[str, Path]) -> Run:
    """Start vLLM with every feature as it is by default, and serve a load."""
    folder.mkdir()
    return Process({name: LOADS[name]}, loads.musa(folder / "host", vllm)).run(folder / "run")[name]


def choices(served: Run) -> dict[str, str]:
    """Return what features decided, without the seconds that it took."""
    return {name: re.sub(r"in [\d.]+ s", "", decision) for name, decision in served.noted.items()}


@contextlib.contextmanager
def loaded_machine() -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.slow
def test_decode_batches_of_65_requests_run_in_graphs(musa_host: None, newest: tuple[str, Path], tmp_path: Path) -> None:
    served = run("many", tmp_path / "many", newest)
    full = [
        step for step in served.steps if len(step["verified"]) == REQUESTS and set(step["verified"].values()) == {3}
    ]
    assert len(full) > 2
    for path in ("v2-step-inputs inputs", "v2-tail-graph sampling", "v2-tail-graph drafting"):
        assert served.counted[path]["served"] >= len(full), served.counted


@pytest.mark.slow
def test_a_start_on_a_loaded_machine_makes_the_same_choices(
    musa_host: None, newest: tuple[str, Path], tmp_path: Path
) -> None:
    first = run("few", tmp_path / "first", newest)
    with loaded_machine():
        second = run("few", tmp_path / "second", newest)
    loads.assert_same(first, second)
    assert second.counted == first.counted
    assert choices(first) == choices(second)
    assert {"capture-sizes", "v2-tail-graph"} <= choices(first).keys()
