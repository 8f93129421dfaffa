# SPDX-License-Identifier: Apache-2.0
"""docs/obstacles.md is made from the table: `python -m tests.spec_decode.test_obstacles` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from vllm_hwplugin.spec_decode.obstacles import OBSTACLES, Part

PAGE: Final = Path(__file__).parents[2] / "docs" / "obstacles.md"
TEXT: Final = """# What stands against graphs

An engine has graphs of each part of a step by itself. Where something in this table stands against one part, vLLM does
that part as without the plugin, and the log and `vllm-hwplugin doctor` say all that was found. `…` is a name.
This page is made from `vllm_hwplugin/spec_decode/obstacles.py` (`make docs`).

On V1 `v1-draft-phase` samples in graphs only where it drafts in them. On Model Runner V2 `v2-step-inputs` needs
drafting of `v2-tail-graph`: a graph of inputs leaves no attention metadata on the host, which vLLM's drafter may take.

| | {columns} |
|---|{lines}
{rows}
"""
COLUMNS: Final = {
    Part.V1_SAMPLING: "`v1-draft-phase` sampling",
    Part.V1_DRAFTING: "`v1-draft-phase` drafting",
    Part.V1_INPUTS: "`v1-step-inputs`",
    Part.V1_METADATA: "the same, attention metadata",
    Part.V2_SAMPLING: "`v2-tail-graph` sampling",
    Part.V2_DRAFTING: "`v2-tail-graph` drafting",
    Part.V2_INPUTS: "`v2-step-inputs`",
}


def markdown() -> str:
    hinders: dict[str, Part] = {}
    for row in OBSTACLES:
        # A whole reason is one of several.
        reason = row.reason.replace("{}", "…") if row.reason != "{}" else "a graph that it is built on is missing"
        hinders[reason] = hinders.get(reason, Part(0)) | row.hinders
    rows = (
        f"| {reason} | {' | '.join('no' if part & parts else '' for part in COLUMNS)} |"
        for reason, parts in hinders.items()
    )
    return TEXT.format(columns=" | ".join(COLUMNS.values()), lines="---|" * len(COLUMNS), rows="\n".join(rows))


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run `make docs`"


def test_each_part_has_a_column() -> None:
    assert list(COLUMNS) == list(Part)


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
