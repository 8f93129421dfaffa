# SPDX-License-Identifier: Apache-2.0
"""A small DeepSeek V3 on the simulated device: MLA over mate, with experts. Texts are those of float32.

Prompts come in pieces, and one out of the prefix cache, so that new tokens see keys of the cache as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from . import checkpoints, flash_mla, loads
from .checkpoints import DEEPSEEK
from .loads import Engine, Load, Process, Request, Run
from .test_engines import V1, texts

pytestmark = [pytest.mark.musa_sim, pytest.mark.engine]

LAYERS, HIDDEN, VOCABULARY = (DEEPSEEK[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size"))
ON_V2 = {"VLLM_HWPLUGIN_MORE_GRAPHS": "mla-prompts"}


def write(folder: Path, **more: Any) -> Path:
    """The second layer has experts, and so has the one that drafts."""
    chance = torch.Generator().manual_seed(5)
    vocabulary = torch.randn(VOCABULARY, HIDDEN, generator=chance)
    drafts = {"enorm.weight": torch.ones(HIDDEN), "hnorm.weight": torch.ones(HIDDEN)}
    drafts |= {"eh_proj.weight": torch.randn(HIDDEN, 2 * HIDDEN, generator=chance) / (2 * HIDDEN) ** 0.5}
    drafts |= {"shared_head.norm.weight": torch.ones(HIDDEN), "shared_head.head.weight": vocabulary / HIDDEN**0.5}
    drafts |= {"embed_tokens.weight": vocabulary}
    drafter = f"model.layers.{LAYERS}."
    drafts = {drafter + name: weight for name, weight in drafts.items()}
    return checkpoints.by_chance(folder, DEEPSEEK | more, LAYERS - 1, drafter, drafts)


def requests() -> list[Request]:
    asked = {"temperature": 0.0, "max_tokens": 8}
    chance = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, VOCABULARY, (3, 150), generator=chance).tolist()
    return [
        Request("a", tokens[0], 0, asked),
        Request("b", tokens[1][:30], 0, asked),
        Request("c", [*tokens[0][:140], *tokens[2][:7]], 8, asked),
    ]


def options(model: Path, graphs_of: Sequence[int] = (3, 6, 12)) -> dict[str, Any]:
    engine = Engine(None, graphs_of=graphs_of, more={"max_model_len": 256, "max_num_seqs": 4})
    made = {**engine.on_musa(), "model": str(model), "skip_tokenizer_init": True}
    # The backend says how many tokens a page has.
    made.pop("block_size", None)
    return made | {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}


def mixed_load(model: Path, unknown: str = "FLASH_ATTN_MLA") -> Load:
    """Prompts in pieces, some of them longer than the decode way takes; requests come while others decode."""
    more = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 60}
    engine = Engine(None, graphs_of=(3, 6, 12, 96), more=more)
    made = {**engine.on_musa(), "model": str(model), "skip_tokenizer_init": True}
    made["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 2}
    chance = torch.Generator().manual_seed(0)
    lengths = {"a": (30, 0), "b": (140, 1), "c": (1, 3), "d": (flash_mla.LONGEST, 5), "e": (flash_mla.LONGEST + 1, 12)}
    asked = [
        Request(
            name,
            torch.randint(3, VOCABULARY, (length,), generator=chance).tolist(),
            at,
            {"max_tokens": 9, "logprobs": 2} | ({"temperature": 0.0} if name != "c" else {"seed": 3}),
        )
        for name, (length, at) in lengths.items()
    ]
    return Load(made, asked, unknown=unknown)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("mla") / "model")


@pytest.fixture(scope="module")
def runs(
    musa_host: None,
    newest: tuple[str, Path],
    released: Callable[[str], tuple[str, Path]],
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Run, Run]]:
    """By engine, runs without features and with them: V1 of the vLLM for MUSA's torch, and V2 of the newest."""
    folder = tmp_path_factory.mktemp("runs")
    load = Load(options(model), requests())
    # The stand-in for FlashAttention stays, so its engine is the last one.
    asked = {"V1": {"V1": load}, "V2": {"V2": load, "FLASH_ATTN_MLA": mixed_load(model)}}
    used = {"V1": V1, "V2": ON_V2}
    vllm = {"V1": released("0.26.0"), "V2": newest}
    processes = {
        f"{side}, {runner}": Process(
            asked[runner], loads.musa(folder / f"host, {side} {runner}", vllm[runner], **given)
        )
        for runner in asked
        for side, given in {"stock": {**used[runner], **loads.UNPATCHED}, "on": used[runner]}.items()
    }
    found = loads.side_by_side(processes, folder)
    return {
        name: (found[f"stock, {runner}"][name], found[f"on, {runner}"][name])
        for runner, engines in asked.items()
        for name in engines
    }


@pytest.mark.parametrize(
    ("runner", "used"), [("V1", {"draft-full-graph", "v1-step-inputs"}), ("V2", {"v2-step-inputs", "v2-tail-graph"})]
)
def test_texts_are_those_of_float32_and_graphs_change_no_draft(
    runner: str, used: set[str], runs: dict[str, tuple[Run, Run]], model: Path
) -> None:
    stock, run = runs[runner]
    # vLLM's own MLA on CPUs gives other texts in float16.
    assert texts(run) == checkpoints.in_float32(model, requests())
    assert (run.platform, run.runner, run.attention) == ("MusaPlatform", runner, ["MusaFlashMLABackend"])
    # A prompt in pieces, and one of which some pages were there.
    assert [step["scheduled"] for step in run.of("a")][:3] == [64, 64, 22]
    assert run.answers["c"]["cached"] >= 64
    loads.assert_same(stock, run)
    assert used <= set(run.used)
    assert run.counts["graph_replays"]["target"] > run.counts["steps"] // 2
    # V2 makes no drafts, and replays none, where all of a step are pieces of prompts.
    pieces = sum(not any(step["sampled"].values()) for step in run.steps) if runner == "V2" else 0
    assert run.counts["draft_phases_in_graphs"] == run.counts["draft_phases"] - pieces > 0
    # Each build plans, so a graph holds one pass.
    assert "draft-loop-graph" not in run.used


def test_fp8_blocks_and_bfloat16_are_served(musa_host: None, newest: tuple[str, Path], tmp_path: Path) -> None:
    """Experts in bfloat16 are not among them: Triton's interpreter has no products of bfloat16."""
    twin = write(tmp_path / "twin", moe_intermediate_size=checkpoints.BLOCK)
    blocks, of_blocks = checkpoints.quantized(load_file(twin / "model.safetensors"), checkpoints.fp8_blocks)
    save_file(of_blocks, twin / "model.safetensors")
    (tmp_path / "blocks").mkdir()
    save_file({name: one.contiguous() for name, one in blocks.items()}, tmp_path / "blocks" / "model.safetensors")
    config = json.loads((twin / "config.json").read_text()) | checkpoints.FP8_BLOCKS
    (tmp_path / "blocks" / "config.json").write_text(json.dumps(config))
    dense = write(tmp_path / "dense", first_k_dense_replace=LAYERS + 1, torch_dtype="bfloat16")
    # Triton's interpreter takes a second for each step of a quantized model.
    alone = [replace(requests()[1], params={"temperature": 0.0, "max_tokens": 16})]
    asked = {
        "FP8 blocks": Load(options(tmp_path / "blocks", graphs_of=(3,)), alone),
        "bfloat16": Load({**options(dense), "dtype": "bfloat16"}, requests()),
    }
    runs = Process(asked, loads.musa(tmp_path / "host", newest, **V1)).run(tmp_path / "engines")
    for run in runs.values():
        assert run.attention == ["MusaFlashMLABackend"]
        assert run.counts["draft_phases_in_graphs"] == run.counts["draft_phases"] > 0
    assert texts(runs["bfloat16"]) == checkpoints.in_float32(dense, requests())
    # Activations are rounded to FP8 as well. Without attention in decodes, three of 16 tokens are the most probable.
    ranks = checkpoints.ranks_in_float32(twin, alone, texts(runs["FP8 blocks"]))
    assert ranks.count(0) > len(ranks) / 2
    assert max(ranks) < VOCABULARY / 100


def test_prompts_of_flash_attn_mla_are_replays_unless_a_request_is_long(
    newest: tuple[str, Path], model: Path, runs: dict[str, tuple[Run, Run]], tmp_path: Path
) -> None:
    expected, found = runs["FLASH_ATTN_MLA"]
    loads.assert_same(expected, found)
    assert found.attention == ["FlashAttnMLABackend"]
    assert "v2-mixed-graphs" in found.used
    longest = [max(step["scheduled"].values()) for step in found.steps]
    replayed = sum(count <= flash_mla.LONGEST for count in longest)
    assert {flash_mla.LONGEST, flash_mla.LONGEST + 1} <= set(longest)
    before, after = (run.counts["graph_replays"]["target"] for run in (expected, found))
    assert before + 3 < after == replayed < len(found.steps)
    # A builder that measures the longest query captures a kernel for the short requests of a dummy batch.
    measuring = {"measuring": mixed_load(model, "FLASH_ATTN_MLA, its builder measures")}
    process = Process(measuring, loads.musa(tmp_path / "host, measuring", newest, **ON_V2))
    with pytest.raises(AssertionError, match=r"max_seqlen_q is \d+|the schedule is for"):
        process.run(tmp_path / "measuring")
