# SPDX-License-Identifier: Apache-2.0
"""What V1's graphs count on in each supported vLLM and no call of them shows, read from the released sources."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.spec_decode.v1 import draft_buffers


def test_every_tensor_field_of_the_metadata_is_dealt_with(vllm_tree: Callable[[str], Any]) -> None:
    """A new tensor of a new version would keep its changing address in a captured graph."""
    handled = {*draft_buffers._HOST_ROWS, *draft_buffers._DROPPED, *draft_buffers._UNMANAGED}
    handled |= {"query_start_loc", "query_start_loc_cpu", "seq_lens", "block_table_tensor", "slot_mapping", "causal"}
    # Host copies of fields that turn the graphs off, and one that only Mamba2 layers read.
    handled |= {"dcp_local_seq_lens_cpu", "dcp_local_seq_lens_cpu_upper_bound", "replayssm_decode_base_cpu"}
    unhandled = []
    for version in SUPPORTED:
        tree = ast.parse(vllm_tree(version).read("vllm/v1/attention/backend.py"))
        (metadata,) = (node for node in tree.body if getattr(node, "name", "") == "CommonAttentionMetadata")
        for one in metadata.body:
            if isinstance(one, ast.AnnAssign) and "torch.Tensor" in ast.unparse(one.annotation):
                unhandled += [f"vLLM {version}: {one.target.id}"] if one.target.id not in handled else []
    assert not unhandled, unhandled
