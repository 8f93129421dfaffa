# SPDX-License-Identifier: Apache-2.0
"""Samplers of a vLLM, stock and patched, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.released import text_of

# The rejection samplers' modules, and the one that they take functions of.
REJECTION = (
    "vllm.v1.sample.rejection_sampler",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils",
    "vllm.v1.worker.gpu.spec_decode.probabilistic_rejection_sampler_utils",
    "vllm.v1.worker.gpu.sample.gumbel",
)
# Those of top-k and top-p, with what they take for their kernels from 0.30 on.
TOP_K_TOP_P = (
    "vllm.v1.sample.ops.topk_topp_triton",
    "vllm.v1.sample.ops.topk_topp_sampler",
    "vllm.v1.worker.gpu.sample.states",
    "vllm.model_executor.warmup.jit_warmup",
    "vllm.model_executor.warmup.jit_warmup_triton_helper",
)
OFF = {f"VLLM_HWPLUGIN_BACKPORT_{what}": "off" for what in ("RECOVERED_TOKEN", "NAN_LOGITS", "TOP_K_TOP_P")}


def texts_of(tree: Any, modules: Sequence[str] = REJECTION) -> dict[str, dict[str, str]]:
    """The modules' texts, `stock` and `patched`."""
    paths = {name: f"{name.replace('.', '/')}.py" for name in modules}
    paths = {name: path for name, path in paths.items() if tree.read(path) is not None}
    return {
        side: {name: text_of(tree, path, **choices) for name, path in paths.items()}
        for side, choices in (("stock", OFF), ("patched", {}))
    }


def sample(
    sides: Mapping[str, Mapping[str, str]], folder: Path, device: str, child: str = "samplers_child"
) -> dict[str, Any]:
    """What each side does (see the child), by the interpreter where the device is `cpu`. Like texts are tried once."""
    names = {side: next(name for name, texts in sides.items() if texts == own) for side, own in sides.items()}
    file = folder / "texts.json"
    file.write_text(json.dumps({name: sides[name] for name in names.values()}))
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if device == "cpu" else {})}
    command = [sys.executable, "-m", f"tests.backports.{child}", str(file), device]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {side: found[name] for side, name in names.items()}
