"""Drafter graphs outlive vLLM's sleep mode: what they read is still there, or is written again, after a wake-up."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin_lab.bench import find_checkpoints, load_prompts

from .engines import SMALL_ENGINE, Child, run_all
from .findings import keep
from .test_drafter_graphs import ACCEPTANCE_TOLERANCE, dflash, eagle3

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

SMALL = find_checkpoints(None)
DRAFTS: dict[str, dict[str, Any]] = {"eagle3": eagle3(3), "dflash": dflash(7)}


@pytest.mark.parametrize("name", DRAFTS)
def test_texts_and_acceptance_are_those_from_before_sleep(name: str, tmp_path: Path) -> None:
    dice = random.Random(1)
    options = {
        **SMALL_ENGINE,
        "model": str(SMALL.target),
        "speculative_config": DRAFTS[name],
        "compilation_config": {"cudagraph_mode": "FULL"},
        "enable_sleep_mode": True,
    }
    prompts = [list(prompt[: dice.randrange(8, 96)]) for prompt in load_prompts(SMALL, 24)]
    job = {"options": options, "prompts": prompts, "tokens": [dice.randrange(16, 96) for _ in prompts]}
    answers = run_all(
        tmp_path,
        {"stock": Child("sleep_child.py", job, patched=False), "patched": Child("sleep_child.py", job, patched=True)},
    )
    for side, answer in answers.items():
        keep(f"sleep {name} {side}", {when: answer[when]["accepted"] for when in ("awake", "level 1", "level 2")})
    stock, patched = answers["stock"], answers["patched"]
    for when in ("awake", "level 1", "level 2"):
        # First without the plugin: what vLLM itself does not keep over a sleep is not what is tested.
        assert stock[when]["texts"] == stock["awake"]["texts"], when
        assert patched[when]["texts"] == stock[when]["texts"], when
        for one, other in zip(patched[when]["accepted"], stock[when]["accepted"], strict=True):
            assert abs(one - other) <= ACCEPTANCE_TOLERANCE, when
        for one, other in zip(patched[when]["accepted"], patched["awake"]["accepted"], strict=True):
            assert abs(one - other) <= ACCEPTANCE_TOLERANCE, when
        assert "FULL" in patched[when]["first_passes"], when
