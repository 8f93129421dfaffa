# SPDX-License-Identifier: Apache-2.0
"""The table of operations against vLLM: its call sites in every version, and its C extension where one is installed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from vllm_hwplugin.ops.override_table import OPS, Gain, OverridableOp, choose, unknown_names
from vllm_hwplugin.patching import SUPPORTED

from ..conftest import versions

ROPE = OPS["rotary_embedding"]
H200 = Gain("NVIDIA H200", ">=0.20.2,<0.21.0")


@pytest.mark.parametrize("version", SUPPORTED)
def test_every_version_has_one_schema_for_each_operation(version: str) -> None:
    for op in OPS.values():
        assert len([item for item in op.schemas if SpecifierSet(item.versions).contains(version)]) == 1, op.name


@pytest.mark.parametrize("version", versions("vllm/_custom_ops.py"))
def test_vllm_passes_as_many_arguments_as_the_schema_takes(version: str, vllm_tree: Callable[[str], Any]) -> None:
    """The wheels hold the schemas in machine code alone; what the call sites pass is in Python."""
    torch = pytest.importorskip("torch")
    calls = list(ast.walk(ast.parse(vllm_tree(version).read("vllm/_custom_ops.py"))))
    for op in OPS.values():
        target = f"torch.ops.{op.namespace}.{op.name}"
        passed = {len(call.args) for call in calls if isinstance(call, ast.Call) and ast.unparse(call.func) == target}
        assert passed, f"{target} is called nowhere"
        (schema,) = [item for item in op.schemas if SpecifierSet(item.versions).contains(version)]
        arguments = torch._C.parse_schema(f"{op.namespace}::{schema.text}").arguments
        needed = len([argument for argument in arguments if not argument.has_default_value()])
        assert passed <= set(range(needed, len(arguments) + 1)), target
        assert len(arguments) in passed, f"{target} leaves arguments out everywhere"


@pytest.mark.engine
def test_in_front_of_vllms_own_extension() -> None:
    """The CPU build of vLLM has one of the operations. In a process of its own: an extension cannot be unloaded."""
    program = """
import torch, vllm._custom_ops as ops
from vllm_hwplugin.ops import overrides, rotary_embedding
from vllm_hwplugin.ops.override_table import OPS
torch.manual_seed(0)
query, cache = torch.randn(5, 256), torch.randn(64, 64)
positions = torch.randint(64, (5,))

def rotated():
    q, k = query.clone(), query.flip(0)
    ops.rotary_embedding(positions, q, k, 64, cache, True)
    return q, k

def calls(function):
    with torch.profiler.profile() as profile:
        result = function()
    return result, {event.key for event in profile.key_averages()}

stock, seen = calls(rotated)
assert "_C::rotary_embedding" in seen and "hwplugin::rotary_embedding" not in seen, seen
overrides.load_kernel = lambda op: True
front = overrides.put_in_front(OPS["rotary_embedding"], "CPU", "on", required=True)
mine, seen = calls(rotated)
assert {"_C::rotary_embedding", "hwplugin::rotary_embedding"} <= seen, seen
assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(mine, stock))
front.state = "vllm"
again, seen = calls(rotated)
assert "hwplugin::rotary_embedding" not in seen, seen
assert all(torch.equal(a, b) for a, b in zip(again, stock))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.engine
def test_the_entry_point_puts_kernels_in_front(tmp_path: Path) -> None:
    """vLLM calls it in each process, before its C extension is imported."""
    program = """
import sys
from vllm_hwplugin.ops import overrides
from vllm_hwplugin.plugin import register
key, outcome = sys.argv[1:]
overrides.KEY, overrides.load_kernel = key, lambda op: True
try:
    register()
except overrides.OverrideError as error:
    assert outcome == "error" and "no kernel of _C::rotary_embedding for CUDA" in str(error), error
else:
    assert outcome != "error"
    assert ("vllm._custom_ops" in sys.modules) == (outcome == "plugin")
    import torch, vllm._custom_ops
    q = torch.ones(1, 64)
    vllm._custom_ops.rotary_embedding(torch.zeros(1, dtype=torch.int64), q, None, 64, torch.ones(4, 64), True)
    found = overrides.states().get("rotary_embedding", "")
    assert found.startswith("the plugin's kernel") == (outcome == "plugin"), found
"""
    others = ",".join(name for name in OPS if name != "rotary_embedding")
    for gate, key, outcome in (("auto", "CPU", "stock"), ("on", "CPU", "plugin"), ("on", "CUDA", "error")):
        environ = {
            **os.environ,
            "VLLM_HWPLUGIN_CACHE_DIR": str(tmp_path),
            "VLLM_HWPLUGIN_OPS": gate,
            "VLLM_HWPLUGIN_OPS_SKIP": others,
        }
        command = [sys.executable, "-c", program, key, outcome]
        done = subprocess.run(command, capture_output=True, text=True, env=environ)
        assert done.returncode == 0, f"{gate} {key}: {done.stderr}"


@pytest.mark.parametrize(
    ("choice", "skip", "device", "version", "gains", "wanted"),
    [
        ("off", (), None, None, (H200,), False),
        ("on", (), None, None, (), True),
        ("on", (), "NVIDIA H200", "0.33.0", (H200,), True),
        ("on", ("rotary_embedding",), None, None, (), False),
        ("auto", (), None, None, (), False),
        ("auto", (), None, None, (H200,), True),
        ("auto", (), "NVIDIA H200", None, (H200,), True),
        ("auto", (), None, "0.20.2", (H200,), True),
        ("auto", (), "NVIDIA H200", "0.20.2", (H200,), True),
        ("auto", (), "NVIDIA H200", "0.33.0", (H200,), False),
        ("auto", (), "NVIDIA H200", "0.33.0", (H200, H200._replace(vllm=">=0.33.0")), True),
        ("auto", (), "NVIDIA A10", "0.20.2", (H200,), False),
        ("auto", ("rotary_embedding",), "NVIDIA H200", "0.20.2", (H200,), False),
    ],
)
def test_what_is_wanted(
    choice: str, skip: tuple[str, ...], device: str | None, version: str | None, gains: tuple[Gain, ...], wanted: bool
) -> None:
    op = OverridableOp(ROPE.name, ROPE.namespace, ROPE.schemas, gains)
    assert choose(op, choice, skip, device, version).wanted is wanted
    kept_off = op._replace(default_on=(), not_default="it rounds otherwise")
    assert choose(kept_off, choice, skip, device, version).wanted is (wanted and choice == "on")


def test_names_that_no_kernel_is_for() -> None:
    assert unknown_names(("rope", "topk_softmax")) == ("rope",)


def test_reading_the_table_imports_no_torch() -> None:
    """doctor and every process of vLLM read it first."""
    code = "import sys, vllm_hwplugin.ops.overrides; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
