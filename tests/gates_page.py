# SPDX-License-Identifier: Apache-2.0
"""The environment variables, as a page: ``python -m tests.gates_page`` writes docs/gates.md."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from vllm_hwplugin.base.gates import CATALOGUE_PREFIX, GATES, REPLACED, Alias, Gate, show
from vllm_hwplugin.patching import load_catalogue

#: The variables that most people need: name, value, when.
FEW: Final = (
    ("VLLM_HWPLUGIN", "`0`", "you want unpatched vLLM: to roll back, or to compare"),
    (
        "VLLM_HWPLUGIN_CACHE_DIR",
        "a folder that only root and the serving user can change",
        "the log or `doctor` says that no folder is usable, as in [hardened pods](containers.md#a-hardened-pod)",
    ),
    (
        "VLLM_HWPLUGIN_CAPTURE_SIZES",
        "`decode`",
        "a start takes too long, or graphs take too much memory: batches with prompts then have no larger graphs",
    ),
    ("VLLM_HWPLUGIN_STRICT", "`1`", "a server must not run without the patches: each refused feature stops its start"),
)
PAGE: Final = Path(__file__).parents[1] / "docs" / "gates.md"


def markdown() -> str:
    """The text of ``docs/gates.md``."""
    every = (*GATES, *load_catalogue().gates)
    lines = [
        "# Environment variables",
        "",
        "## The four that you may need",
        "",
        *_few(every),
        "",
        "`vllm-hwplugin doctor -v` shows each value and where it came from. A variable that is set but empty counts as",
        "not set. A *switch* takes one of three values; [failures.md](failures.md) says what each failure does:",
        "",
        "- `auto`: the feature is patched in where it applies.",
        "- `on` or 1: the process stops with an error if the feature cannot be patched in, or the "
        "engine cannot have its CUDA",
        "  graphs.",
        "- `off` or 0: the feature is not patched in.",
        "",
        "## All variables",
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
        "This page is made from `vllm_hwplugin/base/gates.py` and each feature's `patch.toml` by `make docs`.",
    ]
    return "\n".join(lines) + "\n"


def _few(gates: Iterable[Gate]) -> list[str]:
    rows = ["| variable | set it to | when |", "|---|---|---|"]
    known = {gate.name for gate in gates}
    for name, value, when in FEW:
        assert name in known, f"{name}: no such variable"
        rows.append(f"| `{name}` | {value} | {when} |")
    return rows


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
