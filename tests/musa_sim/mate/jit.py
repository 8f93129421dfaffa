# SPDX-License-Identifier: Apache-2.0
"""Modules of kernels that were compiled. In the real mate a new module takes seconds to minutes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

_compiled: set[str] = set()


def need(kind: str, config: Mapping[str, Any]) -> None:
    """Compile the module of a configuration at its first use.

    Raises:
        RuntimeError: A graph is being captured, and the compiler's calls would end the capture.
    """
    name = f"{kind} {json.dumps(config, sort_keys=True)}"
    device = getattr(torch, "musa", None)
    if name not in _compiled and device is not None and device.is_current_stream_capturing():
        raise RuntimeError(f"mate compiles {name} while a graph is captured")
    _compiled.add(name)
