# SPDX-License-Identifier: Apache-2.0
"""What ``doctor`` says of vLLM's operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin.base.gates import Settings
from vllm_hwplugin.cli._host import Device, Platform, Tool
from vllm_hwplugin.cli._kernels import missing
from vllm_hwplugin.cli._operations import operation_problems, operation_rows
from vllm_hwplugin.ops.compile.built import Built
from vllm_hwplugin.ops.compile.spec import KERNELS
from vllm_hwplugin.ops.operations import OPS

TOOLS = (Tool("nvcc", None, None), Tool("mcc", None, None), Tool("ninja", "/usr/bin/ninja", "1.13"))
LIBRARY = Built(Path("topk_softmax.so"), "topk_softmax", "nvcc", "13.0", "2.11", "0", (), (), ())
TOPK = "_moe_C::topk_softmax"
MUSA = Platform("musa", (), "")


def rows(kind: Any = "cuda", libraries: tuple[Built, ...] = (LIBRARY,), **environ: str) -> dict[str, tuple[str, str]]:
    found = operation_rows(Platform(kind, (), ""), Settings(environ), TOOLS, libraries, extension=True)
    assert [row.operation for row in found] == [op.qualname for op in OPS.values()]
    return {row.operation: (row.serves, row.reason) for row in found}


@pytest.mark.parametrize(
    ("kind", "environ", "serves", "words"),
    [
        ("cuda", {"VLLM_HWPLUGIN_OPS": "off"}, "vllm", "VLLM_HWPLUGIN_OPS=off"),
        ("cuda", {"VLLM_HWPLUGIN_OPS": "on"}, "plugin", "VLLM_HWPLUGIN_OPS=on"),
        ("cuda", {"VLLM_HWPLUGIN_OPS": "on", "VLLM_HWPLUGIN_OPS_SKIP": "topk_softmax"}, "vllm", "named in"),
        ("cuda", {"VLLM_HWPLUGIN_OPS": "on", "VLLM_HWPLUGIN": "0"}, "vllm", "VLLM_HWPLUGIN=0"),
        ("cpu", {"VLLM_HWPLUGIN_OPS": "on"}, "vllm", "only on CUDA and MUSA"),
        ("musa", {"VLLM_HWPLUGIN_OPS": "on"}, "plugin", "VLLM_HWPLUGIN_OPS=on"),
        ("musa", {}, "vllm", "its own kernel"),
        ("cuda", {}, "vllm", "its own kernel"),
    ],
)
def test_whose_kernel_serves(kind: str, environ: dict[str, str], serves: str, words: str) -> None:
    found = rows(kind, **environ)[TOPK]
    assert found[0] == serves
    assert words in found[1]
    assert "not built" not in found[1]


@pytest.mark.parametrize(
    ("environ", "serves"),
    [
        ({}, "plugin"),
        ({"VLLM_HWPLUGIN_OPS": "off"}, "torch"),
        ({"VLLM_HWPLUGIN_OPS_SKIP": "topk_softmax"}, "torch"),
        ({"VLLM_HWPLUGIN": "0"}, "vllm"),
    ],
)
def test_what_a_vllm_without_kernels_lacks_on_musa_is_the_plugins(environ: dict[str, str], serves: str) -> None:
    settings = Settings(environ)
    found = {row.operation: row for row in operation_rows(MUSA, settings, TOOLS, (LIBRARY,), extension=False)}
    assert found[TOPK].serves == serves
    assert ("_C::weak_ref_tensor" in found) is (serves != "vllm")
    assert serves == "vllm" or found["_C::weak_ref_tensor"].serves == "torch"
    # It has a kernel that nobody has built.
    assert ("mcc not found" in found["_C::merge_attn_states"].reason) is (
        serves != "vllm" and environ.get("VLLM_HWPLUGIN_OPS") != "off"
    )


def test_on_where_it_cannot_be_is_one_problem_that_names_the_way_out() -> None:
    assert operation_problems("cpu", Settings({})) == ()
    assert operation_problems("cpu", Settings({"VLLM_HWPLUGIN_OPS": "on", "VLLM_HWPLUGIN": "0"})) == ()
    (problem,) = operation_problems("cpu", Settings({"VLLM_HWPLUGIN_OPS": "on"}))
    assert f"VLLM_HWPLUGIN_OPS_SKIP={','.join(OPS)}, or" in problem
    names = ",".join(OPS)
    assert operation_problems("cpu", Settings({"VLLM_HWPLUGIN_OPS": "on", "VLLM_HWPLUGIN_OPS_SKIP": names})) == ()


@pytest.mark.parametrize(
    ("capabilities", "words"),
    [(("9.0",), "nvcc not found"), (("8.0", "12.0"), "it is only for 9.0a"), (("[N/A]", None), "nvcc not found")],
)
def test_a_kernel_of_other_gpus_is_not_built_here(capabilities: tuple[str | None, ...], words: str) -> None:
    devices = tuple(Device("GPU", capability=number) for number in capabilities)
    assert missing(KERNELS["paged_attention"], Platform("cuda", devices, ""), TOOLS).startswith(words)
