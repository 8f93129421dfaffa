# SPDX-License-Identifier: Apache-2.0
"""The drafters on user pages, made from the plugin's table."""

from __future__ import annotations

from vllm_hwplugin.spec_decode.drafters import DRAFTERS, Drafter

from ._text import table


def by_runner() -> str:
    """Return the table of docs/features.md."""
    rows = []
    for name, drafters in _by_name().items():
        first, methods = drafters[0], ", ".join(f"`{drafter.method}`" for drafter in drafters)
        v2 = first.v2 or (f"captured, from vLLM {first.since} on" if first.since else "captured")
        rows.append((name, methods, first.v1 or "captured", v2))
    return "\n".join(table(("drafter", "`method`", "V1", "V2"), rows))


def _by_name() -> dict[str, list[Drafter]]:
    drafters: dict[str, list[Drafter]] = {}
    for row in DRAFTERS:
        drafters.setdefault(row.name, []).append(row)
    return drafters
