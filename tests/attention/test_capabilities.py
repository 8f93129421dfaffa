# SPDX-License-Identifier: Apache-2.0
"""The table of declarations: whole, without contradictions, and what it says of MUSA."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from vllm_hwplugin.attention.backends import CUDA
from vllm_hwplugin.attention.capabilities import (
    CAPABILITIES,
    DECLARATIONS,
    Declaration,
    Multiples,
    Vllm,
    allows,
    asked_in,
    declared,
)
from vllm_hwplugin.base.versions import SUPPORTED

BACKENDS = tuple(dict.fromkeys(declaration.backend for declaration in DECLARATIONS))
every_version = pytest.mark.parametrize("version", SUPPORTED)


@every_version
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_that_a_version_asks_is_declared_once(backend: str, version: str) -> None:
    declarations = declared(backend, version)
    # Up to 256 vLLM's own kernels run, and its class answers.
    assert backend == CUDA.declared or asked_in(version) <= declarations.keys()
    assert declarations.keys() <= CAPABILITIES.keys()
    mine = [item for item in DECLARATIONS if item.backend == backend and item.versions.covers(version)]
    for item in mine:
        # The later of two would win without a word.
        assert item is declarations[item.capability], f"{item.capability} is declared twice for {version}"


@pytest.mark.parametrize("version", ["0.19.1", "0.34.0", "dev"])
def test_a_version_that_was_not_checked_has_no_declarations(version: str) -> None:
    assert {backend: dict(declared(backend, version)) for backend in BACKENDS} == {backend: {} for backend in BACKENDS}


@pytest.mark.parametrize(
    ("value", "asked", "fit"),
    [
        (True, True, True),
        (False, True, False),
        (Multiples(8, 512), 512, True),
        (Multiples(8, 512), 520, False),
        (Multiples(8, 512), 0, False),
        (Multiples(8, 512, least=32), 24, False),
        (Multiples(8, 512, least=32), 32, True),
        (Multiples(16), None, True),
        (("auto", "bfloat16"), None, True),
        (("auto", "bfloat16"), "bfloat16", True),
        (("decoder",), SimpleNamespace(value="decoder"), True),
        (("decoder",), SimpleNamespace(value="encoder"), False),
        (Vllm(), "fp8", True),
        (Vllm(("fp8_e5m2",)), "fp8", True),
        (Vllm(("fp8_e5m2",)), "fp8_e5m2", False),
    ],
)
def test_allows(value: bool | Multiples | tuple[str, ...], asked: Any, fit: bool) -> None:
    assert allows(value, asked) is fit


def row(item: Declaration) -> str:
    """A declaration's line of docs/attention.md."""
    value = " or ".join(item.value) if isinstance(item.value, tuple) else str(item.value)
    value = {"True": "yes", "False": "no"}.get(value, value) + (f", {item.limit}" if item.limit else "")
    since = max(CAPABILITIES[item.capability].since, item.since, key=Version)
    return f"| `{item.capability}` | {since} | {value} | {item.reason} | {item.verified} |"


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_page_has_the_table(backend: str, pytestconfig: pytest.Config) -> None:
    page = (Path(pytestconfig.rootpath) / "docs" / "attention.md").read_text()
    section = page.partition(f"\n## `{backend}`")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows == [row(item) for item in DECLARATIONS if item.backend == backend]
