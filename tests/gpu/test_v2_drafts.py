# SPDX-License-Identifier: Apache-2.0
"""On a real GPU, Model Runner V2 drafts with the plugin what it drafts without, in fewer graph launches."""

from __future__ import annotations

import importlib.metadata
import random
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from vllm_hwplugin_lab.bench import find_checkpoints, load_prompts

from .drafts import same_drafts
from .engines import SMALL_ENGINE, Child, run_all
from .findings import keep
from .test_drafter_graphs import ACCEPTANCE_TOLERANCE, SAME_DRAFTS, deepseek, eagle3

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

SMALL = find_checkpoints(None)
# Where a step's tail is one graph, drafting does not go through the speculator.
V2 = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_HWPLUGIN_V2_TAIL_GRAPH": "off",
}
WAVES = [1, 3, 8, 28]
# Batches of so many requests have graphs for all that is drafted.
IN_GRAPHS = range(1, 9)


CASES: dict[str, dict[str, Any]] = {
    "eagle3-k2": {"speculation": lambda folder: eagle3(2)},
    "eagle3-k3": {"speculation": lambda folder: eagle3(3)},
    "eagle3-k7": {"speculation": lambda folder: eagle3(7)},
    "eagle3-k3-FULL_DECODE_ONLY": {"speculation": lambda folder: eagle3(3), "mode": "FULL_DECODE_ONLY"},
    "eagle3-k3-TRITON_ATTN": {
        "speculation": lambda folder: eagle3(3),
        "backend": "TRITON_ATTN",
        # Triton's kernel is chosen by batch size, and a graph has the choice of its padded size.
        "near_ties": True,
    },
    "eagle3-k3-sleep": {"speculation": lambda folder: eagle3(3), "sleep": True},
    "mtp-k3-FLASH_ATTN_MLA": {
        "speculation": lambda folder: deepseek(folder, 3),
        "backend": "FLASH_ATTN_MLA",
        "own_target": True,
    },
}


def job_of(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    checkpoint, own_target = folder / "checkpoint", case.get("own_target")
    speculation = case["speculation"](checkpoint)
    dice = random.Random(0)
    prompts = [list(prompt[: dice.randrange(8, 96)]) for prompt in load_prompts(SMALL, sum(WAVES))]
    options = {
        **SMALL_ENGINE,
        "model": str(checkpoint if own_target else SMALL.target),
        "speculative_config": speculation,
        "compilation_config": {
            "cudagraph_mode": case.get("mode", "FULL_AND_PIECEWISE"),
            "cudagraph_capture_sizes": capture_sizes(1 + speculation["num_speculative_tokens"]),
        },
        **({"load_format": "dummy", "skip_tokenizer_init": True} if own_target else {}),
        **({"attention_config": {"backend": case["backend"]}} if "backend" in case else {}),
        **({"enable_sleep_mode": True} if case.get("sleep") else {}),
    }
    tokens = [dice.randrange(16, 120) for _ in prompts]
    return {"options": options, "prompts": prompts, "tokens": tokens, "waves": WAVES, "sleep": case.get("sleep", False)}


def capture_sizes(width: int) -> list[int]:
    """For batches of one token a request, and of what the target verifies of each."""
    return sorted({reqs * tokens for reqs in (1, 2, 4, max(IN_GRAPHS)) for tokens in (1, width)})


def launches(answer: dict[str, Any]) -> set[int]:
    """The numbers of graphs that batches of decodes launched for their drafts."""
    counted = [answer["replays"].get(str(reqs), {}) for reqs in IN_GRAPHS]
    return {int(number) for one in counted for number in one}


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_stocks(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    version = Version(importlib.metadata.version("vllm"))
    # vLLM's graph of all steps lacks their metadata; it has a graph for each step; or all that is needed in one.
    behind = version < Version("0.21.0")
    step_by_step = not behind and version < Version("0.28.0")
    if case.get("sleep") and behind:
        pytest.skip("Model Runner V2 of vLLM 0.20 does not write its block tables' layout again after a sleep")
    job = job_of(case, tmp_path)
    k = job["options"]["speculative_config"]["num_speculative_tokens"]
    answers = run_all(
        tmp_path,
        {
            "stock": Child("v2_drafts_child.py", job, patched=False, environment=V2),
            "patched": Child("v2_drafts_child.py", job, patched=True, environment=V2),
        },
    )
    stock, patched = answers["stock"], answers["patched"]
    prompts = job["prompts"] * (2 if case.get("sleep") else 1)
    same = same_drafts(prompts, stock, patched)
    facts = {
        side: {key: answer[key] for key in ("accepted", "replays", "builders", "decisions")}
        for side, answer in answers.items()
    }
    keep(f"V2 {name}", {**facts, "uses": patched["uses"], "same_drafts": same})
    used = {feature for feature, use in patched["uses"].items() if use["used"]}
    if step_by_step:
        # The first pass and each step; or the first pass and all steps.
        assert ("v2-fused-drafts" in used) == (k > 2)
        assert launches(stock) == {k}
        assert launches(patched) == {2}
    elif behind:
        assert ("v2-draft-metadata" in used) == (k > 2)
        # A batch between two captured sizes drafts its first tokens in PIECEWISE graphs, or without one.
        assert 2 in launches(stock)
        assert launches(patched) == launches(stock)
    for one, other in zip(patched["accepted"], stock["accepted"], strict=True):
        assert abs(one - other) <= ACCEPTANCE_TOLERANCE
    if not case.get("near_ties"):
        assert patched["texts"] == stock["texts"]
        assert same["compared"] > 0.9 * len(stock["drafts"]) * len(stock["accepted"])
        assert same["share"] >= SAME_DRAFTS
