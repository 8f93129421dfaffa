# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM in a process of its own, which no patch and no other test touches."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest


def printed_beside_vllm(program: str) -> Any:
    """Runs the program; the last line that it prints, read as JSON. Skips the test where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    environ = {**os.environ, "VLLM_HWPLUGIN": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
