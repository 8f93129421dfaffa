# SPDX-License-Identifier: Apache-2.0
"""The table of drafters, beside the drafters that vLLM has."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.conftest import versions
from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.patching.texts import Source
from vllm_hwplugin.spec_decode.drafters import DRAFTERS, SPECULATORS

V1, V2 = "vllm/v1/worker/gpu_model_runner.py", "vllm/v1/worker/gpu/spec_decode/__init__.py"

#: A user's class, and a method that drafts nothing.
NO_DRAFTERS = {"create_custom_proposer", "ExtractHiddenStatesProposer", "ExtractHiddenStatesSpeculator"}


@pytest.mark.parametrize("version", versions(V1, V2))
def test_each_class_that_vllm_drafts_with_has_a_row(vllm_tree: Callable[[str], Source], version: str) -> None:
    v1, v2 = (vllm_tree(version).read(path) for path in (V1, V2))
    assert v1 is not None
    assert v2 is not None
    made = {*re.findall(r"self\.drafter = (\w+)\(", v1), *re.findall(r"return (\w+Speculator)\(", v2)}
    rows = {row.proposer for row in DRAFTERS}.union(*(row.speculators for row in DRAFTERS))
    assert len(made) > 5
    assert made - NO_DRAFTERS <= rows
    if version == SUPPORTED[-1]:
        # Of the captured classes, all but the one that 0.32 renamed.
        assert {*SPECULATORS} - made == {"PlainDraftModelSpeculator"}


def test_rows_of_one_method_draft_alike() -> None:
    """Everything but the classes is asked for by method."""
    ways = {(row.method, row.combines, row.cached, row.masks, row.standalone) for row in DRAFTERS}
    assert len(ways) == len({row.method for row in DRAFTERS})
