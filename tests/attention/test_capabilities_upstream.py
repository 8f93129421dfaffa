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


@pytest.mark.parametrize("version", versions(BASE))
def test_the_table_has_what_vllm_asks_and_no_more_by_the_same_arguments(
    version: str, vllm_tree: Callable[[str], Any]
) -> None:
    text = vllm_tree(version).read(BASE)
    upstream, named = asked(text), asked_in(version)
    plain = {CAPABILITIES[name].method: CAPABILITIES[name].plain for name in named}
    # Each gap is still one.
    assert upstream.keys() - plain.keys() == GAPS.keys()
    assert all(GAPS.values())
    assert {name: is_plain for name, is_plain in upstream.items() if name in plain} == plain
    (cls,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == "AttentionBackend")
    (method,) = (node for node in cls.body if getattr(node, "name", "") == "validate_configuration")
    arguments = {argument.arg for argument in method.args.args} - {"cls", "device_capability"}
    # With `use_dcp`, 0.29.0 asks for one combination only: MLA without causality (supports_non_causal_dcp).
    expected = arguments - ({"use_dcp"} if version == "0.29.0" else set())
    assert {CAPABILITIES[name].argument for name in named if CAPABILITIES[name].argument} == expected
