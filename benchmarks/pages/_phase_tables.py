# SPDX-License-Identifier: Apache-2.0
"""Where the host's time of a step goes, function by function: benchmarks/results/phases.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_hwplugin_lab.bench import LEAST_US, SHAPES, SIDE_NAMES, TINY, shown_phases

from ._read import Found
from ._text import head, paragraph, row

_HEAD = """# Where the host's time goes

Made from the files `phases-*.json` by `make docs`; do not edit.
"""
_HOW = (
    "Microseconds of the host in a step of the engine, the median over the steps, without a profiler. A function "
    "stands below the one that called it, and `own` is what none below it took. The engine was in its caller's "
    "process, and timing a call costs it about a microsecond: these figures say where the time goes, "
    "[host-time.md](../../docs/host-time.md) what the plugin does about it, and [engines.md](engines.md) how much "
    f"there is. What takes less than {LEAST_US:g} us is left out. GPU busy comes from torch's profiler, in a run apart."
)


def markdown(files: Sequence[Found]) -> str:
    """The page: one chapter for each file, and in it a table for each engine and batch size."""
    lines = [_HEAD, paragraph(_HOW), ""]
    for file in files:
        lines += [f"## `{file.name}`", "", paragraph(f"{file.source}."), ""]
        for engine in file.results["engines"]:
            lines += [*_table(engine), ""]
    return "\n".join(lines)


def case_name(case: Mapping[str, Any]) -> str:
    """Target and drafter of an entry that has ``shape``, ``method`` and ``k``."""
    target = TINY if case["shape"] == TINY else SHAPES[case["shape"]].title
    return f"{target}, {case['method']} k={case['k']}"


def _table(engine: Mapping[str, Any]) -> Iterator[str]:
    busy = engine["profile"].get("gpu_busy_ms")
    gpu = f", GPU busy {busy * 1e3:.0f} us" if busy else ""
    case = f"{case_name(engine)}, {SIDE_NAMES[engine['side']]}, batch {engine['batch']}"
    yield f"### {case}{gpu}"
    yield ""
    yield from head(["function", "calls a step", "us a step", "own"])
    for one in shown_phases(engine["phases"]):
        name = "&nbsp;&nbsp;" * (len(one.path) - 1) + f"`{one.path[-1]}`"
        yield row([name, f"{one.calls:.2f}", f"{one.us:.0f}", f"{one.own:.0f}"])
