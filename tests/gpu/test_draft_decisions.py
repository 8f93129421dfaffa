"""What is captured for a drafter on a real GPU, by its attention backend and by how vLLM starts.

With `kv_cache_memory_bytes` vLLM initialises its KV cache once, without it twice, the first time on a small cache to
measure CUDA graphs. Both must decide by the draft layers' own attention groups, and draft as stock vLLM does.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin_lab.bench import find_checkpoints

from .drafts import same_drafts
from .engines import PROFILED_ENGINE, SMALL_ENGINE, Child, run_all
from .findings import keep
from .test_drafter_graphs import (
    ACCEPTANCE_TOLERANCE,
    SAME_DRAFTS,
    change_config,
    deepseek,
    eagle3,
    job_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

SMALL = find_checkpoints(None)
FULL, BOTH = "FULL", "FULL_AND_PIECEWISE"


def backend(name: str) -> dict[str, Any]:
    return {"attention_config": {"backend": name}}


CASES: dict[str, dict[str, Any]] = {
    "eagle3-k3-FLASH_ATTN": {
        "speculation": lambda folder: eagle3(3),
        "mode": FULL,
        "options": backend("FLASH_ATTN"),
        "chain": "2 steps in one graph",
    },
    "eagle3-k3-TRITON_ATTN": {
        "speculation": lambda folder: eagle3(3),
        "mode": FULL,
        "options": backend("TRITON_ATTN"),
        "chain": "2 steps in one graph",
        # Triton's kernel is chosen by batch size, and a graph has the choice of its padded size.
        "near_ties": True,
    },
    **{
        f"mtp-k{k}-FLASH_ATTN_MLA": {
            "speculation": lambda folder, k=k: deepseek(folder, k),
            "mode": BOTH,
            "own_target": True,
            "options": backend("FLASH_ATTN_MLA"),
            "chain": "FlashAttnMLAMetadataBuilder: each build plans",
        }
        for k in (2, 3)
    },
}


@pytest.mark.parametrize("name", CASES)
def test_both_ways_of_starting_decide_alike_and_draft_as_stock(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    job = job_of(case, tmp_path)
    options = {option: value for option, value in job["options"].items() if option not in SMALL_ENGINE}
    profiled = {**job, "options": {**PROFILED_ENGINE, **options}}
    answers = run_all(
        tmp_path,
        {
            "stock": Child("child.py", job, patched=False),
            "one start": Child("child.py", job, patched=True),
            "profiled": Child("child.py", profiled, patched=True),
        },
    )
    stock = answers.pop("stock")
    for start, patched in answers.items():
        same = same_drafts(job["prompts"], stock, patched)
        facts = {key: patched[key] for key in ("accepted", "decisions", "captured", "builders")}
        keep(f"{name} {start}", {**facts, "stock": stock["accepted"], "same_drafts": same})
        assert patched["captured"] > 0
        assert patched["decisions"]["draft-full-graph"].startswith("FULL drafter graphs")
        assert case["chain"] in patched["decisions"]["draft-loop-graph"]
        assert "FULL" in patched["first_passes"]
        for one, other in zip(patched["accepted"], stock["accepted"], strict=True):
            assert abs(one - other) <= ACCEPTANCE_TOLERANCE
        if not case.get("near_ties"):
            assert patched["texts"] == stock["texts"]
            assert same["compared"] > 0.9 * len(stock["drafts"]) * len(stock["accepted"])
            assert same["share"] >= SAME_DRAFTS
    one, other = answers.values()
    assert one["builders"] == other["builders"]
    for feature in ("draft-full-graph", "draft-loop-graph"):
        assert one["decisions"][feature] == other["decisions"][feature]


def test_a_prefix_lm_drafts_in_graphs_again_after_a_long_prompt(tmp_path: Path) -> None:
    """A target whose image tokens may see each other lists the images of each request, also where there is none."""
    target = tmp_path / "target"
    shutil.copytree(SMALL.target, target, copy_function=shutil.copyfile)
    change_config(target, is_mm_prefix_lm=True)
    sizes = [4, 8, 16, 32]
    options = {
        **SMALL_ENGINE,
        "model": str(target),
        "speculative_config": eagle3(3),
        "compilation_config": {"cudagraph_mode": BOTH, "cudagraph_capture_sizes": sizes},
    }
    prompts = [list(range(10, 10 + length)) for length in (150, 20, 170, 12)]
    job = {"options": options, "prompts": prompts, "tokens": [80, 100, 120, 140]}
    answers = run_all(
        tmp_path,
        {"stock": Child("child.py", job, patched=False), "patched": Child("child.py", job, patched=True)},
    )
    stock, patched = answers["stock"], answers["patched"]
    facts = {side: {key: answer[key] for key in ("accepted", "builders")} for side, answer in answers.items()}
    keep("prefix-LM", {**facts, "decisions": patched["decisions"], "first_passes": patched["first_passes"]})
    modes = patched["first_passes"]
    assert len(prompts[0]) > max(sizes)
    assert modes[0] != "FULL"
    # Every phase after the last prompt is a decode batch of few requests.
    assert set(modes[-20:]) == {"FULL"}, json.dumps(modes)
    assert patched["decisions"]["draft-full-graph"].startswith("FULL drafter graphs")
    assert "mm_req_doc_ranges" not in patched["decisions"]["draft-full-graph"]
    for one, other in zip(patched["accepted"], stock["accepted"], strict=True):
        assert abs(one - other) <= ACCEPTANCE_TOLERANCE
