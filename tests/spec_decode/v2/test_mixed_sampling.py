# SPDX-License-Identifier: Apache-2.0
"""vLLM's sampling kernels for a batch with prompts, where a graph of a decode batch has its rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin.base.versions import SUPPORTED

from ...conftest import versions
from ...released import text_of

pytest.importorskip("triton")

MODULES = (
    "vllm.v1.worker.gpu.input_batch",
    "vllm.v1.worker.gpu.sample.gumbel",
    "vllm.v1.worker.gpu.sample.watermark",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils",
)
SINCE_24 = SUPPORTED[SUPPORTED.index("0.24.0") :]
#: Seconds each, for kernels that an interpreter runs: the last one quick. `test_order_of_calls` runs those of others.
VERSIONS = [
    pytest.param(version, marks=pytest.mark.slow) if version in SUPPORTED[:-1] else version
    for version in versions(*(f"{name.replace('.', '/')}.py" for name in MODULES), among=SINCE_24, each_text=False)
]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_batch_with_prompts_is_sampled_for_as_by_itself(
    version: str, vllm_tree: Callable[[str], Any], tmp_path: Path
) -> None:
    tree, paths = vllm_tree(version), {name: f"{name.replace('.', '/')}.py" for name in MODULES}
    texts = {name: text_of(tree, path) for name, path in paths.items() if tree.read(path) is not None}
    file = tmp_path / "texts.json"
    file.write_text(json.dumps(texts))
    done = subprocess.run(
        [sys.executable, "-m", "tests.spec_decode.v2.mixed_sampling_child", str(file)],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert len(answers) >= 4
    counts: set[int] = set()
    for answer in answers:
        stock = answer["stock"]
        assert all(graph == stock for graph in answer["graphs"])
        assert stock["states"]["computed"] != answer["before"]
        counts |= {len(tokens) for tokens in stock["tokens"]}
    # A part of a prompt samples nothing; all drafts are right, or some.
    assert counts == {0, 1, 2, 3, 4}
