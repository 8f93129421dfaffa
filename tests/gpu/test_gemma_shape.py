# SPDX-License-Identifier: Apache-2.0
"""A model of gemma-4's shape with a DFlash draft on FLASH_ATTN, in FULL graphs, on a real GPU; stock vLLM next to it.

The weights are random, so almost no draft is accepted, and the text says nothing of the drafts. Texts are therefore
held to those of stock vLLM without speculation on its Triton kernels; the drafts in graphs to those of the same engine
without graphs.

Random weights give near-ties everywhere. float16 leaves a tenth of bfloat16's rounding errors to tip them over, and two
texts are compared up to where they part: there, the choice of the one must be as good as a tie to the other.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from vllm_hwplugin_lab.bench import engine_environment
from vllm_hwplugin_lab.bench._entry_points import provide
from vllm_hwplugin_lab.bench._launch import child_environment

from . import gemma_shape
from .drafts import same_drafts
from .engines import SMALL_ENGINE
from .findings import keep

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

OWN = "vllm_hwplugin.attention.cuda.CudaFlashAttentionBackend"
#: Head size, KV heads and window of the target's layers and then of the draft's.
LAYERS = [
    [512, 2, None] if kind == "full_attention" else [256, 8, gemma_shape.WINDOW] for kind in gemma_shape.LAYER_TYPES
] + [[256, 8, None]] * gemma_shape.DRAFT_LAYERS
REQUESTS = 48
#: In nats, and the least share of tokens before two texts have parted. vLLM on a CPU gave 0.04 and 0.83 for float16
#: against float32, and 0.17 and 0.49 with the scale of the full layers alone 10 % too large.
TIE, COMPARED = 0.1, 0.65
SAME_DRAFTS = 0.9
AT_ONCE = 4

# FlashAttention 4 is in vLLM's wheel, and these compile it.
FA4_NEEDS = [name for name in ("cutlass", "quack") if importlib.util.find_spec(name) is None]


def vllm_version() -> Version:
    return Version(importlib.metadata.version("vllm"))


def v2_drafts() -> bool:
    """Whether Model Runner V2 has DFlash."""
    return vllm_version() >= Version("0.24")


def flash_attn() -> dict[str, Any]:
    return {"attention_config": {"backend": "FLASH_ATTN"}}


def cases() -> dict[str, dict[str, Any]]:
    """What is started, the slow first."""
    full = {"compilation_config": {"cudagraph_mode": "FULL"}}
    eager = {"enforce_eager": True}
    return {
        "patched": {"draft": True, "images": True, "options": {**flash_attn(), **full}},
        "stock named": {"draft": True, "images": True, "options": {**flash_attn(), **full}},
        "stock default": {"draft": True, "images": True, "options": full},
        "stock text": {"draft": True, "images": False, "options": {**flash_attn(), **eager}},
        "patched eager": {"draft": True, "images": False, "options": {**flash_attn(), **eager}},
        "patched default": {"draft": True, "images": True, "options": eager},
        "patched plain": {"draft": False, "images": True, "options": {**flash_attn(), **eager}},
        "stock plain": {
            "draft": False,
            "images": True,
            "options": {"attention_config": {"backend": "TRITON_ATTN"}, **eager},
        },
        # FULL, so that a class that promises too much of its graphs shows.
        "patched V2": {"draft": True, "images": True, "v2_runner": True, "options": {**flash_attn(), **full}},
    }


def requests() -> tuple[list[list[int]], list[int]]:
    """Prompts and how many tokens each gets: more requests than fit at once, some longer than the window."""
    dice = random.Random(0)
    lengths = [dice.randrange(560, 800) if i % 8 == 5 else dice.randrange(8, 96) for i in range(REQUESTS)]
    prompts = [[dice.randrange(4, gemma_shape.VOCABULARY) for _ in range(length)] for length in lengths]
    return prompts, [dice.randrange(12, 28) for _ in prompts]


def run(folder: Path, name: str, case: dict[str, Any]) -> dict[str, Any]:
    """An engine of its own process: its answer, or `{"error": its log}`."""
    folder.mkdir()
    target, draft = gemma_shape.write_configs(folder / "model", images=case["images"])
    options = {
        **SMALL_ENGINE,
        "kv_cache_memory_bytes": 2 << 30,
        "dtype": "float16",
        **({"speculative_config": gemma_shape.speculation(draft)} if case["draft"] else {}),
        **case["options"],
    }
    # The model's own, as the child knows them.
    del options["max_model_len"]
    prompts, tokens = requests()
    job = {"model": str(target), "options": options, "prompts": prompts, "tokens": tokens}
    (folder / "job.json").write_text(json.dumps(job))
    environment = engine_environment("cuda", patched=name.startswith("patched"), v2_runner=case.get("v2_runner", False))
    with (folder / "log").open("wb") as stream:
        ended = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("gemma_shape_child.py")), "job.json", "answer.json"],
            cwd=folder,
            env=child_environment(environment, provide(folder / "metadata")),
            stdout=stream,
            stderr=subprocess.STDOUT,
            timeout=300,
            check=False,
        )
    if ended.returncode != 0:
        return {"error": (folder / "log").read_text(errors="replace")}
    result: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    return result


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    if Version("0.21") <= vllm_version() < Version("0.24"):
        pytest.skip("what stock vLLM 0.21 to 0.23 makes of this shape is not known")
    folder = tmp_path_factory.mktemp("gemma")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        started = {
            name: pool.submit(run, folder / name.replace(" ", "-"), name, case)
            for name, case in cases().items()
            if v2_drafts() or not case.get("v2_runner")
        }
        answers = {name: future.result() for name, future in started.items()}
    for name, answer in answers.items():
        keep(f"gemma shape {name}", reported(answer, answers))
    return answers


def reported(answer: dict[str, Any], answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    if "error" in answer:
        return {"error": answer["error"][-6000:]}
    facts = {key: value for key, value in answer.items() if key not in ("texts", "choices", "drafts")}
    if "error" not in answers["stock plain"]:
        gaps, compared = parted(answers["stock plain"], answer)
        facts |= {"gaps": sorted(gaps), "compared": compared}
    if answer["drafts"] and "error" not in answers["patched eager"]:
        facts |= {"same_drafts": same_drafts(requests()[0], answers["patched eager"], answer)}
    return facts


def started(answer: dict[str, Any]) -> dict[str, Any]:
    assert "error" not in answer, answer["error"][-4000:]
    return answer


def refused(answer: dict[str, Any]) -> str:
    return str(answer.get("error", "it started"))


def lacks_fa4(error: str) -> bool:
    return "No module named 'cutlass'" in error or "No module named 'quack'" in error


def parted(reference: dict[str, Any], other: dict[str, Any]) -> tuple[list[float], float]:
    """Where texts part, how far the other's token is below the reference's own; and the share of tokens before."""
    gaps, same, count = [], 0, 0
    for one, choices, text in zip(reference["texts"], reference["choices"], other["texts"], strict=True):
        count += len(one)
        differ = [at for at, (first, second) in enumerate(zip(one, text, strict=True)) if first != second]
        same += differ[0] if differ else len(one)
        if differ:
            likely = {token: logprob for logprob, token in choices[differ[0]]}
            gaps.append(likely[one[differ[0]]] - likely.get(text[differ[0]], float("-inf")))
    return gaps, same / count


def agree(reference: dict[str, Any], other: dict[str, Any]) -> None:
    gaps, compared = parted(reference, other)
    assert max(gaps, default=0.0) <= TIE
    assert compared >= COMPARED


def test_stock_vllm_fails_and_the_plugin_serves_in_full_graphs(engines: dict[str, dict[str, Any]]) -> None:
    default, named, text = (refused(engines[f"stock {name}"]) for name in ("default", "named", "text"))
    if vllm_version() < Version("0.21"):
        # vLLM names TRITON_ATTN for the model, and asks the target for what only the draft needs.
        assert "non-causal attention not supported" in default
        assert "partial multimodal token full attention not supported" in named
    elif FA4_NEEDS:
        # Named by vLLM for all layers, and then not there when the first batch comes.
        assert lacks_fa4(default)
        assert lacks_fa4(named)
    else:
        agree(started(engines["stock plain"]), started(engines["stock default"]))
    if FA4_NEEDS:
        assert lacks_fa4(text)

    patched = started(engines["patched"])
    assert patched["platform"].startswith("vllm_hwplugin.")
    assert patched["graph_modes"] == {"target": "FULL", "drafter": "FULL"}
    assert patched["captured"] > 0, patched["decisions"]
    assert patched["draft_phases_in_graphs"] > 0.9 * patched["draft_phases"] > 0
    assert patched["graph_replays"]["target"] > 0.8 * patched["steps"]
    agree(started(engines["stock plain"]), patched)


def test_each_layer_is_on_its_kernel(engines: dict[str, dict[str, Any]]) -> None:
    layers = started(engines["patched"])["layers"]
    assert [[layer["head_size"], layer["kv_heads"], layer["window"]] for layer in layers] == LAYERS
    # A draft that selects for itself, from 0.21 on, may take another backend.
    target = layers if vllm_version() < Version("0.21") else layers[: -gemma_shape.DRAFT_LAYERS]
    assert {layer["backend"] for layer in target} == {"FLASH_ATTN"}
    for layer in layers:
        assert (layer["class"] == OWN) == (layer["head_size"] == 512), layer
    stock = started(engines["stock plain"])["layers"]
    assert {layer["backend"] for layer in stock} == {"TRITON_ATTN"}


def test_graphs_draft_as_none_do(engines: dict[str, dict[str, Any]]) -> None:
    eager, patched = started(engines["patched eager"]), started(engines["patched"])
    assert set(eager["graph_replays"].values()) == {0}
    found = same_drafts(requests()[0], eager, patched)
    assert found["compared"] > 1000
    assert found["share"] >= SAME_DRAFTS
    # Else there would be nothing to tell right drafts from wrong ones by.
    assert len({tuple(tokens) for *_, tokens in patched["drafts"]}) > len(patched["drafts"]) / 2


def test_without_graphs_and_without_a_draft_the_text_is_stocks(engines: dict[str, dict[str, Any]]) -> None:
    stock, plain = started(engines["stock plain"]), started(engines["patched plain"])
    assert {layer["class"] for layer in plain["layers"] if layer["head_size"] == 512} == {OWN}
    agree(stock, plain)
    agree(stock, started(engines["patched eager"]))


def test_without_a_named_backend_the_text_is_right_or_there_is_none(engines: dict[str, dict[str, Any]]) -> None:
    """vLLM 0.20 then names TRITON_ATTN for the target, whose cache is laid out unlike FLASH_ATTN's of the draft.

    The layers of a hybrid model share their memory across groups, so two layouts in it overwrite each other's blocks.
    From 0.24 on all layers are on FLASH_ATTN, and where FlashAttention 4 cannot run the plugin takes it back.
    """
    found = engines["patched default"]
    if "error" not in found:
        agree(started(engines["stock plain"]), found)
        return
    assert vllm_version() < Version("0.21") or not FA4_NEEDS, found["error"][-4000:]
    assert "DFlashConfigError" in found["error"], found["error"][-4000:]


def test_model_runner_v2_serves_it_in_the_graphs_that_are_right_there(engines: dict[str, dict[str, Any]]) -> None:
    """Up to 0.30 it would capture mixed batches as such with one token a request, so the class declares none."""
    if not v2_drafts():
        pytest.skip("Model Runner V2 has DFlash from vLLM 0.24 on")
    found = started(engines["patched V2"])
    # Which of the two vLLM falls back to depends on how it compiled the model.
    decodes = {"FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"}
    assert found["graph_modes"]["target"] in ({"FULL"} if vllm_version() >= Version("0.31") else decodes)
    assert found["graph_replays"]["target"] > 0
    assert found["mixed_steps"] > 0
    assert {layer["class"] for layer in found["layers"] if layer["head_size"] == 512} == {OWN}
    agree(started(engines["stock plain"]), found)
