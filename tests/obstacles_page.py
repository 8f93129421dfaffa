# SPDX-License-Identifier: Apache-2.0
"""When CUDA graphs are not used, as a page: ``python -m tests.spec_decode.test_obstacles`` writes docs/obstacles.md."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from vllm_hwplugin.spec_decode.obstacles import OBSTACLES, Part

PAGE: Final = Path(__file__).parents[1] / "docs" / "obstacles.md"
TEXT: Final = """# When CUDA graphs are not used

Each part of a step has its own CUDA graphs. If a reason of these tables holds, the parts next to it run as in unpatched
vLLM, and the others keep their graphs. The log and `vllm-hwplugin doctor` list all reasons that hold for an engine;
`vllm-hwplugin doctor --for 'vllm serve ...'` lists before a start what the configuration tells. `…` stands for a name.

- If vLLM drafts, vLLM also makes each step's attention metadata, which its drafter reads.
- An engine without a drafter has graphs of inputs, sampling and mixed batches, unless `VLLM_HWPLUGIN_PLAIN_DECODE=0`.

## Model Runner V2

{v2}

`v2-step-inputs` needs a graph of `v2-tail-graph`.

## Model Runner V1

{v1}

`v1-draft-phase` samples in graphs only if it also drafts in them. It and `draft-loop-graph` need the graphs of
`draft-full-graph`.

This page is made from `vllm_hwplugin/spec_decode/obstacles.py` by `make docs`.
"""
#: Part -> what a user calls it, and its feature.
TOLD: Final = {
    Part.V1_PASSES: ("the drafter's passes", "draft-full-graph"),
    Part.V1_CHAIN: ("one-token draft steps", "draft-loop-graph"),
    Part.V1_SAMPLING: ("sampling", "v1-draft-phase"),
    Part.V1_DRAFTING: ("drafting", "v1-draft-phase"),
    Part.V1_INPUTS: ("step inputs", "v1-step-inputs"),
    Part.V1_METADATA: ("attention metadata", "v1-step-inputs"),
    Part.V1_MIXED: ("batches with prompts", "v1-mixed-graphs"),
    Part.V2_SAMPLING: ("sampling", "v2-tail-graph"),
    Part.V2_DRAFTING: ("drafting", "v2-tail-graph"),
    Part.V2_INPUTS: ("step inputs", "v2-step-inputs"),
    Part.V2_METADATA: ("attention metadata", "v2-step-inputs"),
    Part.V2_STEPS: ("draft steps", "v2-fused-drafts"),
    Part.V2_MIXED: ("batches with prompts", "v2-mixed-graphs"),
}


def markdown() -> str:
    hinders: dict[str, Part] = {}
    for row in OBSTACLES:
        # A whole reason is one of several.
        reason = row.reason.replace("{}", "…") if row.reason != "{}" else "a graph that it is built on is missing"
        hinders[reason] = hinders.get(reason, Part(0)) | row.hinders
    return TEXT.format(v1=_table("V1_", hinders), v2=_table("V2_", hinders))


def _table(runner: str, hinders: dict[str, Part]) -> str:
    parts = [part for part in TOLD if str(part.name).startswith(runner)]
    lines = ["| reason | runs as in unpatched vLLM |", "|---|---|"]
    for reason, hindered in hinders.items():
        if named := [part for part in parts if part & hindered]:
            features = ", ".join(f"`{name}`" for name in dict.fromkeys(TOLD[part][1] for part in named))
            lines.append(f"| {reason} | {', '.join(TOLD[part][0] for part in named)} ({features}) |")
    return "\n".join(lines)
