"""Results files of single kernels in which each cell took what the test says, and a copy of the tree's own files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import RESULTS, ROOT
from vllm_hwplugin_lab.bench import Host
from vllm_hwplugin_lab.bench.micro import attention_cases, make_results, op_cases

GPU = Host("cuda", "NVIDIA H200", "580.1", "0.26.0", "2.11.0", "3.12.3", 16)


@pytest.fixture
def kernels() -> Callable[..., dict[str, Any]]:
    """`kernels(kind, seconds)`: what `bench KIND` writes where cells take `seconds(kernel, case)`; None: failed."""

    def make(kind: str, seconds: Callable[[str, str], float | None]) -> dict[str, Any]:
        plan, facts = {
            "attention": (attention_cases.plan(), {"error_ratio": 0.9}),
            "ops": (op_cases.plan(), {"mismatch": None}),
        }[kind]
        cells = []
        for kernel, case in plan:
            taken = seconds(kernel, case)
            cell = {"kernel": kernel, "case": case, "process": 0, "status": "failed", "reason": "no | such <shape>"}
            if taken is not None:
                cell |= {"status": "measured", "reason": None, "seconds": taken, "sets": 2, **facts}
                cell |= {"copy_seconds": taken / 2, "fastest": taken, "slowest": taken, "repeats": 5}
            cells.append(cell)
        process = {"error": None, "log_tail": "", "copy_bandwidth": 4e12, "l2_bytes": 60 << 20, "packages": {}}
        settings = {"seconds": 75.0, "seed": 0, "only": {}}
        return make_results(kind, GPU, settings, cells, [process]) | {"commit": "abc123"}

    return make


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the results files and the pages made of them, but for those of the host's time."""
    left_out = shutil.ignore_patterns("phases*")
    shutil.copytree(RESULTS, tmp_path / "benchmarks" / "results", ignore=left_out)
    (tmp_path / "docs").mkdir()
    written = (
        *(
            "benchmarks",
            "draft-head",
            "draft-schedule",
            "features",
            "kernel-benchmarks",
            "kernels",
            "linear",
            "model-runner-v2",
            "nwor",
            "platforms",
        ),
        "your-own-patches",
    )
    for name in ("README.md", *(f"docs/{page}.md" for page in written)):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path
