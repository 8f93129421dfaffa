# SPDX-License-Identifier: Apache-2.0
"""Rejection samplers of a vLLM, stock and patched, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.spec_decode.released import text_of

# The samplers' modules, and the one that they take functions of.
MODULES = (
    "vllm.v1.sample.rejection_sampler",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils",
    "vllm.v1.worker.gpu.spec_decode.probabilistic_rejection_sampler_utils",
    "vllm.v1.worker.gpu.sample.gumbel",
)
OFF = {"VLLM_HWPLUGIN_BACKPORT_RECOVERED_TOKEN": "off", "VLLM_HWPLUGIN_BACKPORT_NAN_LOGITS": "off"}


def texts_of(tree: Any) -> dict[str, dict[str, str]]:
    """The modules' texts, `stock` and `patched`."""
    paths = {name: f"{name.replace('.', '/')}.py" for name in MODULES}
    paths = {name: path for name, path in paths.items() if tree.read(path) is not None}
    return {
        side: {name: text_of(tree, path, **choices) for name, path in paths.items()}
        for side, choices in (("stock", OFF), ("patched", {}))
    }


def sample(sides: Mapping[str, Mapping[str, str]], folder: Path, device: str) -> dict[str, Any]:
    """What each side does (see `samplers_child.py`), by the interpreter where the device is `cpu`."""
    file = folder / "texts.json"
    file.write_text(json.dumps(sides))
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if device == "cpu" else {})}
    command = [sys.executable, "-m", "tests.backports.samplers_child", str(file), device]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]
