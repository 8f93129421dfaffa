# SPDX-License-Identifier: Apache-2.0
"""What a feature costs that is no speed feature: the table of docs/nwor.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_hwplugin_lab.bench import SHAPES, host_line, rows

from ._read import Found
from ._text import paragraph, table

#: Side with the feature -> the plugin without it, and their runner.
_SIDES = {"patched": ("plugin", "V1"), "mrv2-patched": ("mrv2-plugin", "V2")}
_NAMES = ["vLLM", "target", "drafts", "model runner", "batch", "ms a step without", "with", "longer by"]
_HOW = (
    "Times are those of the best round, the median one in brackets; sides took turns, each engine's core in a process "
    "of its own. Both have the plugin as it is by default, but for this feature."
)


def markdown(files: Sequence[Found]) -> str:
    """A table of all files, and what they are of."""
    measured = (paragraph(f"`{file.name}`: {file.source}. {host_line(file.results)}") for file in files)
    return "\n\n".join(["\n".join(table(_NAMES, _rows(files))), paragraph(_HOW), *measured])


def _rows(files: Sequence[Found]) -> Iterator[list[str]]:
    for file in files:
        for row in rows(file.results):
            for side, (other, runner) in _SIDES.items():
                found, without = row.sides.get(side), row.sides.get(other)
                if found is None or without is None or row.ratio(side, other) is None:
                    continue
                with_it, less = found["step_ms"], without["step_ms"]
                yield [
                    file.vllm,
                    SHAPES[row.case["shape"]].title,
                    f"{row.case['method']} k={row.case['k']}",
                    runner,
                    str(row.batch),
                    f"{less['best']:.2f} ({less['median']:.2f})",
                    f"{with_it['best']:.2f} ({with_it['median']:.2f})",
                    f"{with_it['best'] / less['best'] - 1:+.1%} ({with_it['median'] / less['median'] - 1:+.1%})",
                ]
