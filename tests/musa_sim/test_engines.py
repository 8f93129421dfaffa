# SPDX-License-Identifier: Apache-2.0
"""The real vLLM on a simulated Moore Threads GPU with gates as they are by default: eager and in graphs, with drafters.
Texts have to be those of vLLM on the CPU.

It shows control flow, names, shapes and types. It cannot show numerics, speed, what ``mcc`` and Triton for MUSA
compile, or work that is still under way when the host goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_hwplugin_lab import bench

from .. import releases
from . import loads, simulated
from .loads import Engine, Load, Process, Request, Run

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

TOKENS = 12
#: The model runner that the platform class chooses. Only vLLM's own compilation of the model may call Inductor.
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0", "MUSA_SIM_INDUCTOR": "refuse"}
#: The newest, the first and the last version that need the torch that MUSA has.
VERSIONS = (releases.NEWEST, "0.26.0", "0.20.2")


def requests(tokens: int = TOKENS, prompts: int = 4) -> list[Request]:
    """All at once."""
    texts = json.loads((loads.SMALL / "prompts.json").read_text())["prompt_ids"][:prompts]
    asked = {"temperature": 0.0, "max_tokens": tokens}
    return [Request("abcd"[index], text[:48], 0, asked) for index, text in enumerate(texts)]


def texts(run: Run) -> list[list[int]]:
    return [run.answers[name]["tokens"] for name in sorted(run.answers)]


#: vLLM's compiler, and graphs of prompts piece by piece. Inductor generates no code for MUSA in torch's own build.
PIECES = {"cudagraph_mode": "FULL_AND_PIECEWISE", "mode": 3, "backend": "eager"}
PIECES |= {"cudagraph_capture_sizes": [4, 8, 24, 64]}  # type: ignore[dict-item]
#: Pieces of four sizes of a target of four layers with a drafter of one, and eight whole graphs of each size of both
#: engines, which run one behind the other: two fewer a size than `musa.graph_budget` counts.
GRAPHS = 4 * (5 + 2) + 2 * 4 * 8
DFLASH = Engine("dflash", "FULL", drafts=7, more={"max_num_batched_tokens": 112, "num_gpu_blocks_override": 24})
#: On a vLLM without compiled kernels, as one for MUSA is.
ENGINES = {"Eagle3": {**Engine("eagle3").on_musa(), "compilation_config": PIECES}, "DFlash": DFLASH.on_musa()}


@pytest.fixture(scope="module")
def on_cpu(cpu_host: bench.Host, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The texts of vLLM on the CPU, without speculation and without the plugin."""
    process = Process({"cpu": Load(Engine(None).on_cpu(), requests())}, loads.cpu())
    return texts(process.run(tmp_path_factory.mktemp("cpu") / "cpu")["cpu"])


@pytest.fixture(scope="module")
def on_musa(musa_host: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("musa")
    asked = {name: Load(options, requests()) for name, options in ENGINES.items()}
    environment = loads.musa(folder / "host", None, MUSA_SIM_GRAPHS=str(GRAPHS), **V1)
    return Process(asked, environment).run(folder / "engines")


def assert_on_the_plugins_classes(run: Run) -> None:
    assert (run.platform, run.runner, run.attention) == ("MusaPlatform", "V1", ["MusaFlashAttentionBackend"])


@pytest.mark.parametrize("name", ENGINES)
def test_texts_are_those_of_the_cpu(name: str, on_musa: dict[str, Run], on_cpu: list[list[int]]) -> None:
    assert texts(on_musa[name]) == on_cpu
    assert_on_the_plugins_classes(on_musa[name])


def test_prompts_are_replayed_piece_by_piece(on_musa: dict[str, Run]) -> None:
    counts = on_musa["Eagle3"].counts
    assert counts["graph_replays"]["target"] > counts["steps"]


def test_no_more_graphs_are_captured_than_are_counted(on_musa: dict[str, Run]) -> None:
    """One more ends its capture, and with it what is drafted in one graph."""
    assert all("v1-draft-phase" in run.used for run in on_musa.values())


def test_a_dflash_drafter_runs_in_graphs(on_musa: dict[str, Run]) -> None:
    run = on_musa["DFlash"]
    assert "dflash-full-graph" in run.used
    assert run.accepted()[0] > 0
    assert run.counts["draft_phases_in_graphs"] == run.counts["draft_phases"] > 0


@pytest.mark.smoke
@pytest.mark.parametrize("version", VERSIONS)
def test_each_vllm(
    version: str, released: Callable[[str], tuple[str, Path]], musa_host: None, on_cpu: list[list[int]], tmp_path: Path
) -> None:
    """Its Python, on the torch that is installed here."""
    asked = {"eagle3": Load(Engine("eagle3", "FULL").on_musa(), requests())}
    host = loads.musa(tmp_path / "host", released(version), **V1)
    run = Process(asked, host).run(tmp_path / "engine")["eagle3"]
    assert texts(run) == on_cpu
    assert_on_the_plugins_classes(run)
    assert {"draft-full-graph", "draft-loop-graph"} <= set(run.used)
    assert run.counts["graph_replays"]["target"] > run.counts["steps"] // 2
    assert run.counts["draft_phases_in_graphs"] == run.counts["draft_phases"] > 0


def test_triton_attention_without_mate(musa_host: None, on_cpu: list[list[int]], tmp_path: Path) -> None:
    """And with the compiled kernels that this vLLM has, whose operations the device takes to the CPU's."""
    environment = simulated.environment(tmp_path / "host") | loads.VARIABLES | V1 | {"MUSA_SIM_VLLM_KERNELS": "1"}
    asked = {"eager": Load(Engine(None, graphs=None).on_musa(), requests(tokens=2))}
    run = Process(asked, environment).run(tmp_path / "engine")["eager"]
    assert texts(run) == [text[:2] for text in on_cpu]
    assert run.attention == ["TritonAttentionBackend"]
    assert set(run.counts["graph_replays"].values()) == {0}
