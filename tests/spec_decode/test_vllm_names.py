# SPDX-License-Identifier: Apache-2.0
"""What V1's graphs count on in each supported vLLM and no call of them shows, read from the released sources."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vllm_hwplugin
from vllm_hwplugin.base.versions import SUPPORTED

BODIES = Path(vllm_hwplugin.__file__).parent / "spec_decode"
METADATA = "vllm/v1/attention/backend.py"

Trees = Callable[[str], Any]


def tree_of(vllm_tree: Trees, version: str, path: str) -> ast.Module:
    return ast.parse(vllm_tree(version).read(path) or "")


def find(tree: ast.Module, name: str) -> Any:
    return next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name)


def tuples_of(module: str, *names: str) -> set[str]:
    found: dict[str, tuple[str, ...]] = {}
    for node in ast.parse((BODIES / module).read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
            found[node.targets[0].id] = ast.literal_eval(node.value)
    assert found.keys() == set(names)
    return {name for values in found.values() for name in values}


def test_every_tensor_field_of_the_metadata_is_dealt_with(vllm_tree: Trees) -> None:
    """A new tensor of a new version would keep its changing address in a captured graph."""
    handled = tuples_of("v1/draft_buffers.py", "_HOST_ROWS", "_DROPPED", "_UNMANAGED")
    handled |= {"query_start_loc", "query_start_loc_cpu", "seq_lens", "block_table_tensor", "slot_mapping", "causal"}
    # Host copies of fields that turn the graphs off, and one that only Mamba2 layers read.
    handled |= {"dcp_local_seq_lens_cpu", "dcp_local_seq_lens_cpu_upper_bound", "replayssm_decode_base_cpu"}
    unhandled = []
    for version in SUPPORTED:
        metadata = find(tree_of(vllm_tree, version, METADATA), "CommonAttentionMetadata")
        for one in metadata.body:
            if (
                isinstance(one, ast.AnnAssign)
                and isinstance(one.target, ast.Name)
                and "torch.Tensor" in ast.unparse(one.annotation)
                and one.target.id not in handled
            ):
                unhandled.append(f"vLLM {version}: CommonAttentionMetadata.{one.target.id}")
    assert not unhandled, unhandled
