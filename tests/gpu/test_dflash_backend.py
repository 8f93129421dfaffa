# SPDX-License-Identifier: Apache-2.0
"""A DFlash draft beside a target on another attention backend, on a real GPU.

The target is named TRITON_ATTN, which had no non-causal attention before 0.24.0. Stock vLLM 0.20 does not start so;
with the feature it does, and drafts as it does beside a target on FLASH_ATTN.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from vllm_hwplugin_lab.bench import engine_environment, find_checkpoints, load_prompts
from vllm_hwplugin_lab.bench._entry_points import provide
from vllm_hwplugin_lab.bench._launch import child_environment

from .engines import SMALL_ENGINE
from .findings import keep

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

SMALL = find_checkpoints(None)
TOLERANCE = 0.01
REFUSED = "non-causal attention not supported"


def needs(release: str) -> None:
    version = Version(importlib.metadata.version("vllm"))
    if f"{version.major}.{version.minor}" != release:
        pytest.skip(f"about vLLM {release}, this is {version}")


def run(
    folder: Path, name: str, target: str, *, patched: bool, v2_runner: bool = False, **draft: Any
) -> dict[str, Any]:
    """An engine of its own process: its answer, or `{"error": the end of its log}`."""
    options = {
        **SMALL_ENGINE,
        "model": str(SMALL.target),
        "speculative_config": {
            "method": "dflash",
            "model": str(SMALL.drafter("dflash")),
            "num_speculative_tokens": 7,
            **draft,
        },
        "attention_config": {"backend": target},
    }
    # All prompts: beside another kernel some texts part ways at a near-tie, and few steps would not average it out.
    job = {"options": options, "prompts": load_prompts(SMALL, 96), "tokens": 160}
    (folder / f"{name}.job.json").write_text(json.dumps(job))
    answer, log = folder / f"{name}.json", folder / f"{name}.log"
    command = [sys.executable, str(Path(__file__).with_name("dflash_backend_child.py"))]
    with log.open("wb") as stream:
        ended = subprocess.run(
            [*command, str(folder / f"{name}.job.json"), str(answer)],
            env=child_environment(
                engine_environment("cuda", patched=patched, v2_runner=v2_runner), provide(folder / f"{name} metadata")
            ),
            stdout=stream,
            stderr=subprocess.STDOUT,
            timeout=400,
            check=False,
        )
    if ended.returncode != 0:
        return {"error": log.read_text(errors="replace")}
    result: dict[str, Any] = json.loads(answer.read_text())
    keep(f"dflash backend {name}", result)
    return result


def started(result: dict[str, Any]) -> dict[str, Any]:
    assert "error" not in result, result["error"][-4000:]
    return result


def test_stock_0_20_does_not_start(tmp_path: Path) -> None:
    needs("0.20")
    assert REFUSED in run(tmp_path, "stock TRITON_ATTN", "TRITON_ATTN", patched=False).get("error", "it started")


def test_a_target_on_triton_keeps_it_and_the_draft_drafts_as_well(tmp_path: Path) -> None:
    needs("0.20")
    both = started(run(tmp_path, "patched FLASH_ATTN", "FLASH_ATTN", patched=True))
    assert (both["target"], both["draft"]) == (["FLASH_ATTN"], ["FLASH_ATTN"])
    apart = started(run(tmp_path, "patched TRITON_ATTN", "TRITON_ATTN", patched=True))
    assert (apart["target"], apart["draft"]) == (["TRITON_ATTN"], ["FLASH_ATTN"])
    assert "selects its own" in apart["decisions"]["dflash-draft-backend"]
    assert apart["tokens_a_step"] == pytest.approx(both["tokens_a_step"], rel=TOLERANCE)


def test_a_name_for_both_stays_as_in_stock(tmp_path: Path) -> None:
    needs("0.20")
    stock = started(run(tmp_path, "stock FLASH_ATTN", "FLASH_ATTN", patched=False))
    patched = started(run(tmp_path, "patched FLASH_ATTN", "FLASH_ATTN", patched=True))
    assert (
        (stock["target"], stock["draft"]) == (patched["target"], patched["draft"]) == (["FLASH_ATTN"], ["FLASH_ATTN"])
    )
    assert patched["tokens_a_step"] == pytest.approx(stock["tokens_a_step"], rel=TOLERANCE)


def test_model_runner_v2_of_0_24_takes_the_drafts_backend(tmp_path: Path) -> None:
    needs("0.24")
    named = {"attention_backend": "FLASH_ATTN"}
    stock = started(run(tmp_path, "stock V2", "TRITON_ATTN", patched=False, v2_runner=True, **named))
    assert (stock["target"], stock["draft"]) == (["TRITON_ATTN"], ["TRITON_ATTN"])
    patched = started(run(tmp_path, "patched V2", "TRITON_ATTN", patched=True, v2_runner=True, **named))
    assert (patched["target"], patched["draft"]) == (["TRITON_ATTN"], ["FLASH_ATTN"])
    assert patched["tokens_a_step"] == pytest.approx(stock["tokens_a_step"], rel=TOLERANCE)
