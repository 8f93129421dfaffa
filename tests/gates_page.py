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
        "`vllm-hwplugin doctor -v` shows each value and where it came from. A variable that is set but empty counts as",
        "not set. A *switch* takes one of three values; [failures.md](failures.md) says what each failure does:",
        "",
        "- `auto`: the feature is patched in where it applies.",
        "- `on` or 1: the process stops with an error if the feature cannot be patched in.",
        "- `off` or 0: the feature is not patched in.",
        "",
        "## Variables",
        "",
        *_table(every),
        "",
        "## Your own patches",
        "",
        "Each feature of a catalogue in `VLLM_HWPLUGIN_PATCHES`, or of an installed package, has a switch: the `gate`",
        f"of its `patch.toml`, or `{CATALOGUE_PREFIX}<CATALOGUE>_<FEATURE>`. It affects patches and the compile key.",
        "If such a variable is `on` or 1 and no catalogue has it, the process stops.",
        "[your-own-patches.md](your-own-patches.md) has the rest.",
        "",
        "## Aliases",
        "",
        "Older names that keep working. The variable's own name wins; `doctor` reports an alias with another value.",
        "",
        "| alias | sets | values |",
        "|---|---|---|",
        *[f"| `{alias.name}` | `{gate.name}` | {_alias_values(alias)} |" for gate in every for alias in gate.aliases],
        "",
        "## No longer read",
        "",
        "If one of these is set, a line in the log, in `gates` and in `doctor` names its replacement.",
        "",
        "| variable | in its place |",
        "|---|---|",
        *[f"| `{name}` | {instead} |" for name, instead in REPLACED.items()],
        "",
        "This page is made from `vllm_hwplugin/gates.py` and each feature's `patch.toml` by `make docs`.",
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
