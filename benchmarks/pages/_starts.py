# SPDX-License-Identifier: Apache-2.0
"""What the plugin adds to the start of an engine, and takes of its KV cache: a table of README.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_hwplugin_lab.bench import SHAPES, STOCK_OF

from ._read import Found
from ._text import paragraph, table

_RUNNERS = {"stock": "V1", "mrv2": "V2"}
_NAMES = ["vLLM", "target", "drafts", "model runner", "KV blocks", "first start, s", "later start, s"]
_HOW = (
    "Stock → with the plugin, at vLLM's own memory share, requests at once and capture sizes. A later start is alone "
    "on the device, with filled caches. The first ones were made at one time, and say what it takes beside others."
)


def markdown(files: Sequence[Found]) -> str:
    """A table of all files, and what they are of."""
    if not files:
        return "What a start with the plugin takes longer was not measured."
    measured = (
        paragraph(f"`{file.name}`: {file.source}. Later starts of each side: {file.results['settings']['rounds']}.")
        for file in files
    )
    return "\n\n".join(["\n".join(table(_NAMES, _rows(files))), paragraph(_HOW), *measured])


def _rows(files: Sequence[Found]) -> Iterator[list[str]]:
    for file in files:
        for case in file.results["cases"]:
            for patched, stock in STOCK_OF.items():
                before, after = (_best(case["sides"].get(side)) for side in (stock, patched))
                if before is None or after is None:
                    continue
                blocks = after["num_gpu_blocks"] / before["num_gpu_blocks"] - 1
                yield [
                    file.vllm,
                    SHAPES[case["shape"]].title,
                    f"{case['method']} k={case['k']}",
                    _RUNNERS[stock],
                    f"{before['num_gpu_blocks']} → {after['num_gpu_blocks']} ({blocks:+.1%})",
                    f"{before['first']:.0f} → {after['first']:.0f}",
                    f"{before['seconds']:.1f} → {after['seconds']:.1f}",
                ]


def _best(side: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The shortest start alone, with the seconds of the first one; None where an engine did not start."""
    if side is None or not side["alone"] or any(one["error"] for one in (side["first_together"], *side["alone"])):
        return None
    best: Mapping[str, Any] = min(side["alone"], key=lambda one: one["seconds"])
    return {**best, "first": side["first_together"]["seconds"]}
