# SPDX-License-Identifier: Apache-2.0
"""What ``doctor`` says of the kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_hwplugin.base.cachedir import private_folder
from vllm_hwplugin.cli import _diagnosis, _doctor
from vllm_hwplugin.cli._host import Tool
from vllm_hwplugin.cli._kernels import kernel_rows
from vllm_hwplugin.ops.compile.spec import KERNELS

TOOLS = (
    Tool("nvcc", "/opt/cuda/bin/nvcc", "13.0.88"),
    Tool("mcc", None, None),
    Tool("ninja", "/usr/bin/ninja", "1.13"),
)
WITHOUT_NVCC = (Tool("nvcc", None, None), *TOOLS[1:])
WITHOUT_NINJA = (*TOOLS[:2], Tool("ninja", None, None))


@pytest.mark.parametrize(
    ("kind", "tools", "words"),
    [
        ("cpu", TOOLS, "this host has no GPU for it, so"),
        ("cuda", TOOLS, "nvcc builds it at the operation's first use, and until then"),
        ("cuda", WITHOUT_NVCC, "nvcc not found (install it, or set CUDA_HOME), and without it"),
        ("cuda", WITHOUT_NINJA, "ninja not found (`pip install ninja`), and without it"),
        ("musa", TOOLS, "mcc not found (install it, or set MUSA_HOME), and without it"),
    ],
)
def test_a_kernel_without_a_library_says_what_is_missing_and_what_it_costs(
    kind: str, tools: tuple[Tool, ...], words: str
) -> None:
    rows = {row.kernel: row for row in kernel_rows(kind, (), tools)}
    assert set(rows) == set(KERNELS)
    row = rows["topk_softmax"]
    assert (row.state, row.detail) == ("not built", f"{words} {KERNELS['topk_softmax'].fallback_cost}")
    assert row.library is None


def test_a_library_is_shown_with_what_it_was_built_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = private_folder(tmp_path / "kernels" / "topk_softmax-0123")
    (folder / "topk_softmax.so").touch()
    built = {
        "format": 1, "kernel": "topk_softmax", "library": "topk_softmax.so", "key": "0123", "sources": "4567",
        "toolchain": "nvcc", "version": "13.0.88", "torch": "2.13.0+cu130", "arch": ["-gencode=arch=x"],
        "flags": [{"flags": ["-O3"], "reason": "speed"}, {"flags": ["--use_fast_math"], "reason": "more of it"}],
        "changes_numerics": ["--use_fast_math"], "size": 0,
    }  # fmt: skip
    (folder / "built.json").write_text(json.dumps(built))
    found = _diagnosis.diagnose({"VLLM_HWPLUGIN_CACHE_DIR": str(tmp_path)})
    (section,) = [item for item in _doctor.sections(found) if item.title == "kernels"]
    library = str(folder / "topk_softmax.so")
    assert [row for row in section.rows if row[3] == library] == [
        (
            "topk_softmax",
            "built",
            "nvcc 13.0.88, torch 2.13.0+cu130, -O3 --use_fast_math -gencode=arch=x; "
            "flags that change numerics: --use_fast_math",
            library,
        )
    ]
    assert [row["state"] for row in found.as_json()["kernels"] if row["library"] == library] == ["built"]
