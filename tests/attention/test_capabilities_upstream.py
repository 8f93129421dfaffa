# SPDX-License-Identifier: Apache-2.0
"""The table against the base class of every supported vLLM: what is asked there is known here, and the reverse."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

from vllm_hwplugin.attention.capabilities import CAPABILITIES, GAPS, asked_in

from ..conftest import versions

BASE = "vllm/v1/attention/backend.py"
every_version = pytest.mark.parametrize("version", versions(BASE))


def asked(text: str) -> dict[str, bool]:
    """The capabilities of ``AttentionBackend`` in a module's text: name -> it is a plain attribute."""
    (cls,) = (node for node in ast.parse(text).body if getattr(node, "name", None) == "AttentionBackend")
    assert isinstance(cls, ast.ClassDef)
    found = {}
    for node in cls.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = False
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = True
    return {name: plain for name, plain in found.items() if name.startswith(("supports_", "is_"))}


def differences(text: str, version: str) -> dict[str, set[str]]:
    upstream = set(asked(text)) - set(GAPS)
    table = {CAPABILITIES[name].method for name in asked_in(version)}
    return {"not in the table": upstream - table, "not in vLLM": table - upstream}


SAME: dict[str, set[str]] = {"not in the table": set(), "not in vLLM": set()}


@every_version
def test_the_table_has_what_vllm_asks_and_no_more(version: str, vllm_tree: Callable[[str], Any]) -> None:
    text = vllm_tree(version).read(BASE)
    assert differences(text, version) == SAME
    plain = {CAPABILITIES[name].method: CAPABILITIES[name].plain for name in asked_in(version)}
    assert {name: is_plain for name, is_plain in asked(text).items() if name in plain} == plain


@every_version
def test_each_gap_is_still_there(version: str, vllm_tree: Callable[[str], Any]) -> None:
    assert set(GAPS) <= set(asked(vllm_tree(version).read(BASE)))
    assert not set(GAPS) & {item.method for item in CAPABILITIES.values()}
    assert all(GAPS.values())


@every_version
def test_vllm_still_asks_by_these_arguments(version: str, vllm_tree: Callable[[str], Any]) -> None:
    (cls,) = (n for n in ast.parse(vllm_tree(version).read(BASE)).body if getattr(n, "name", "") == "AttentionBackend")
    (method,) = (n for n in cls.body if getattr(n, "name", "") == "validate_configuration")
    arguments = {argument.arg for argument in method.args.args} - {"cls", "device_capability"}
    named = {item.argument for item in CAPABILITIES.values() if item.argument and item.name in asked_in(version)}
    # With `use_dcp`, 0.29.0 asks for one combination only: MLA without causality (supports_non_causal_dcp).
    assert named == arguments - ({"use_dcp"} if version == "0.29.0" else set())
