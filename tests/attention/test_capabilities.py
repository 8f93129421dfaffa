# SPDX-License-Identifier: Apache-2.0
"""The table of declarations: whole, without contradictions, and what it says of MUSA."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from vllm_hwplugin.attention import capabilities
from vllm_hwplugin.attention.capabilities import (
    BACKENDS,
    CAPABILITIES,
    DECLARATIONS,
    FLASH_ATTN,
    FLASH_ATTN_LARGE,
    FLASH_ATTN_MUSA,
    LARGEST_OF_VLLM,
    VLLM,
    Declaration,
    Multiples,
    Vllm,
    allows,
    asked_in,
    declared,
    explain,
    reserves,
)
from vllm_hwplugin.base.versions import SUPPORTED

every_version = pytest.mark.parametrize("version", SUPPORTED)


@every_version
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_that_a_version_asks_is_declared_once(backend: str, version: str) -> None:
    declarations = declared(backend, version)
    assert asked_in(version) <= declarations.keys()
    assert declarations.keys() <= CAPABILITIES.keys()
    mine = [item for item in DECLARATIONS if item.backend == backend and item.versions.covers(version)]
    for item in mine:
        # The later of two would win without a word.
        assert item is declarations[item.capability], f"{item.capability} is declared twice for {version}"


def test_nothing_is_declared_without_a_reason_and_how_it_is_known() -> None:
    assert [item for item in DECLARATIONS if not (item.reason and item.verified)] == []
    # Only what holds can hold in part.
    assert [item for item in DECLARATIONS if item.limit and item.value is not True] == []


def test_the_one_claim_that_goes_too_far_says_how_far_it_holds() -> None:
    (item,) = (item for item in DECLARATIONS if item.limit)
    assert (item.backend, item.capability, item.limit) == (FLASH_ATTN_MUSA, "mm_prefix", "text only")
    declarations = declared(FLASH_ATTN_MUSA, "0.26.0")
    (told,) = reserves(declarations, {"use_mm_prefix": True, "use_non_causal": True})
    assert "mm_prefix for text only" in told
    assert reserves(declarations, {"use_mm_prefix": False, "use_non_causal": True}) == []
    assert reserves(declared(FLASH_ATTN, "0.26.0"), {"use_mm_prefix": True}) == []


@every_version
def test_large_heads_on_cuda_are_those_of_the_kernel(version: str) -> None:
    assert LARGEST_OF_VLLM == 256
    small = Multiples(8, 512) if Version(version) < Version("0.26") else Multiples(8, 512, least=32)
    assert declared(FLASH_ATTN, version)["head_sizes"].value == small
    assert declared(FLASH_ATTN_LARGE, version)["head_sizes"].value == Multiples(8, 512)
    large = declared(FLASH_ATTN_LARGE, version)
    granted = {name for name, item in large.items() if item.value is True}
    known = {"sink", "non_causal", "batch_invariance", "sliding_window", "kv_connector", "kv_cache_update_bypass"}
    assert granted == known & large.keys()


def test_what_is_refused_for_large_heads_says_the_way_out() -> None:
    asked = {"head_size": 520, "kv_cache_dtype": "fp8", "block_size": 24, "use_mm_prefix": True}
    told = explain(declared(FLASH_ATTN_LARGE, "0.26.0"), asked)
    assert [re.findall(r"TRITON_ATTN|--[a-z-]+", line) for line in told] == [
        ["TRITON_ATTN"],
        ["--kv-cache-dtype", "TRITON_ATTN"],
        ["--block-size"],
        ["--language-model-only", "TRITON_ATTN"],
    ]


@pytest.mark.parametrize("version", ["0.19.1", "0.34.0", "dev"])
def test_a_version_that_was_not_checked_has_no_declarations(version: str) -> None:
    assert {backend: dict(declared(backend, version)) for backend in BACKENDS} == {backend: {} for backend in BACKENDS}


def test_a_local_part_of_a_version_does_not_matter() -> None:
    assert declared(FLASH_ATTN, "0.26.0+cu129") == declared(FLASH_ATTN, "0.26.0")
    assert asked_in("0.26.0+cu129") == asked_in("0.26.0")


def test_of_a_backend_of_vllms_own_nothing_is_declared() -> None:
    assert declared("FLEX_ATTENTION", "0.26.0") == {}


@pytest.mark.parametrize(
    ("value", "asked", "fit"),
    [
        (True, True, True),
        (True, False, True),
        (False, True, False),
        (False, False, True),
        (Multiples(8, 512), 8, True),
        (Multiples(8, 512), 512, True),
        (Multiples(8, 512), 520, False),
        (Multiples(8, 512), 12, False),
        (Multiples(8, 512), 0, False),
        (Multiples(8, 512, least=32), 24, False),
        (Multiples(8, 512, least=32), 32, True),
        (Multiples(16), 4096, True),
        (Multiples(16), 24, False),
        (Multiples(16), None, True),
        (("auto", "bfloat16"), None, True),
        (("auto", "bfloat16"), "bfloat16", True),
        (("auto", "bfloat16"), "fp8", False),
        (("decoder",), SimpleNamespace(value="decoder"), True),
        (("decoder",), SimpleNamespace(value="encoder"), False),
        (VLLM, "fp8", True),
        (VLLM, True, True),
        (Vllm(("fp8_e5m2",)), "fp8", True),
        (Vllm(("fp8_e5m2",)), None, True),
        (Vllm(("fp8_e5m2",)), "fp8_e5m2", False),
    ],
)
def test_allows(value: bool | Multiples | tuple[str, ...], asked: Any, fit: bool) -> None:
    assert allows(value, asked) is fit


@pytest.mark.parametrize("version", ["0.20.2", "0.21.0"])
def test_an_exception_from_vllms_own_answer_is_explained(version: str) -> None:
    declarations = declared(FLASH_ATTN, version)
    assert explain(declarations, {"kv_cache_dtype": "fp8"}) == explain(declarations, {"kv_cache_dtype": None}) == []
    (told,) = explain(declarations, {"kv_cache_dtype": "fp8_e5m2"})
    assert told.startswith("FLASH_ATTN does not declare kv_cache_dtype fp8_e5m2: ")
    assert told.endswith("use --kv-cache-dtype fp8")


def test_the_table_needs_neither_vllm_nor_torch() -> None:
    code = f"import sys; import {capabilities.__name__}; print(sorted({{'vllm', 'torch'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
