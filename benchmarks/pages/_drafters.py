# SPDX-License-Identifier: Apache-2.0
"""The drafters on user pages, made from the plugin's table."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_hwplugin.spec_decode.drafters import DRAFTERS, Drafter

from ._text import table

_ROW = "| drafter |"
_NO_SPECULATION = "no speculation (on V2 [on request](docs/model-runner-v2.md#without-a-drafter))"
_SHOWN_BY = "`vllm-hwplugin doctor`: `active`, or `not used` and why; [by runner](docs/features.md#drafters)"


def by_runner() -> str:
    """Return the table of docs/features.md."""
    rows = []
    for name, drafters in _by_name().items():
        first, methods = drafters[0], ", ".join(f"`{drafter.method}`" for drafter in drafters)
        v2 = first.v2 or (f"captured, from vLLM {first.since} on" if first.since else "captured")
        rows.append((name, methods, first.v1 or "captured", v2))
    return "\n".join(table(("drafter", "`method`", "V1", "V2"), rows))


def with_row(readme: str) -> str:
    """Return README.md with its row of drafters."""
    captured = {
        "": _names(row for row in DRAFTERS if not row.v1 and not row.v2),
        "only on V1 ": _names(row for row in DRAFTERS if not row.v1 and row.v2),
        "only on V2 ": _names(row for row in DRAFTERS if row.v1 and not row.v2),
    }
    gains = "; ".join(where + names for where, names in captured.items())
    row = f"{_ROW} {gains} | {_names(row for row in DRAFTERS if row.v1 and row.v2)}; {_NO_SPECULATION} | {_SHOWN_BY} |"
    return "".join(f"{row}\n" if line.startswith(_ROW) else line for line in readme.splitlines(keepends=True))


def _by_name() -> dict[str, list[Drafter]]:
    drafters: dict[str, list[Drafter]] = {}
    for row in DRAFTERS:
        drafters.setdefault(row.name, []).append(row)
    return drafters


def _names(rows: Iterable[Drafter]) -> str:
    return ", ".join(dict.fromkeys(row.name for row in rows))
