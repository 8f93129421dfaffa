# SPDX-License-Identifier: Apache-2.0
"""The tiny trained checkpoints for measuring real acceptance."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from vllm_hwplugin.base.errors import HwpluginError

#: Method -> drafted tokens per step, as the drafters were trained.
DRAFT_TOKENS = {"eagle3": 3, "dflash": 7}


class CheckpointsMissing(HwpluginError):
    """No folder with ``target``, ``eagle3``, ``dflash`` and ``prompts.json`` was found."""


@dataclass(frozen=True)
class Checkpoints:
    root: Path

    @property
    def target(self) -> Path:
        return self.root / "target"

    @property
    def prompts(self) -> Path:
        return self.root / "prompts.json"

    def drafter(self, method: str) -> Path:
        return self.root / method


def find_checkpoints(folder: Path | None) -> Checkpoints:
    """Return the checkpoints in a folder.

    None: the source tree's ``tests/assets/small``; a wheel does not carry the 11 MB.

    Raises:
        CheckpointsMissing: The folder is incomplete.
    """
    root = folder if folder is not None else Path(__file__).resolve().parents[2] / "tests" / "assets" / "small"
    missing = [n for n in ("target", "eagle3", "dflash", "prompts.json") if not (root / n).exists()]
    if missing:
        raise CheckpointsMissing(
            f"no checkpoints in {root} (missing: {', '.join(missing)}); an installed wheel has none: add --model "
            "FOLDER, such as tests/assets/small of the source tree"
        )
    return Checkpoints(root)


def load_prompts(checkpoints: Checkpoints, count: int) -> tuple[tuple[int, ...], ...]:
    """Return ``count`` prompts as token ids; raise CheckpointsMissing if there are fewer."""
    prompts = json.loads(checkpoints.prompts.read_text(encoding="utf-8"))["prompt_ids"]
    if count > len(prompts):
        raise CheckpointsMissing(f"{checkpoints.prompts} holds {len(prompts)} prompts, expected {count}; ask for fewer")
    return tuple(tuple(p) for p in prompts[:count])
