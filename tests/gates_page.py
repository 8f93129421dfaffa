# SPDX-License-Identifier: Apache-2.0
"""The environment variables, as a page: ``python -m tests.gates_page`` writes docs/gates.md."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from vllm_hwplugin.gates import CATALOGUE_PREFIX, GATES, REPLACED, Alias, Gate, show
from vllm_hwplugin.patching import load_catalogue

PAGE: Final = Path(__file__).parents[1] / "docs" / "gates.md"


def markdown() -> str:
    """The text of ``docs/gates.md``."""
    every = (*GATES, *load_catalogue().gates)
    lines = [
        "# Environment variables",
        "",
        "Written by `python -m tests.gates_page` from `vllm_hwplugin/gates.py` and from each feature's",
        "`patch.toml`; a test compares them. A variable that is set but empty counts as not set.",
        "`vllm-hwplugin doctor -v` shows the values in force and where each came from.",
        "",
        "A *switch* takes `auto` (live where it applies), `on` or 1 (an error where it cannot be live), `off` or 0",
        "(not live); [failures.md](failures.md) says what each failure does.",
        "",
        "## In force",
        "",
        *_table(every),
        "",
        "## Of your own patches",
        "",
        "Each feature of a catalogue in `VLLM_HWPLUGIN_PATCHES`, or of an installed package, has a switch: the `gate`",
        f"of its `patch.toml`, or `{CATALOGUE_PREFIX}<CATALOGUE>_<FEATURE>`. It affects patches and the compile key.",
        "Where such a variable says `on` or 1 and no catalogue has it, the process stops.",
        "[your-own-patches.md](your-own-patches.md) has the rest.",
        "",
        "## Aliases",
        "",
        "Older names that keep working. The own name wins; `doctor` reports an alias that says something else.",
        "",
        "| alias | sets | values |",
        "|---|---|---|",
        *[f"| `{alias.name}` | `{gate.name}` | {_alias_values(alias)} |" for gate in every for alias in gate.aliases],
        "",
        "## No longer read",
        "",
        "Where one of these is set, a line in the log, in `gates` and in `doctor` says what replaced it.",
        "",
        "| variable | in its place |",
        "|---|---|",
        *[f"| `{name}` | {instead} |" for name, instead in REPLACED.items()],
    ]
    return "\n".join(lines) + "\n"


def _table(gates: Iterable[Gate]) -> list[str]:
    rows = ["| variable | kind | default | values | affects | since | what it does |", "|---|---|---|---|---|---|---|"]
    for gate in gates:
        default = f"`{show(gate.default, gate.kind)}`" if show(gate.default) else "not set"
        affects = ", ".join(gate.affects) or "nothing yet"
        cells = (f"`{gate.name}`", gate.kind, default, gate.good_values, affects, gate.since, gate.help)
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _alias_values(alias: Alias) -> str:
    # The words true/yes/on say the same as 1; naming them all would only bury the meaning.
    return ", ".join(
        f"`{raw}` → `{value}`" for raw, value in alias.mapping.items() if raw in ("0", "1") or "1" not in alias.mapping
    )


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
