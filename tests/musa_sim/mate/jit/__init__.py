# SPDX-License-Identifier: Apache-2.0
"""Modules of kernels: which there are. In the real one a new one is compiled, which takes seconds to minutes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class JitSpec:
    """One module: its name, and what it was compiled for."""

    name: str
    config: Mapping[str, Any]


class JitSpecRegistry:
    """The modules that this process has asked for, by name."""

    def __init__(self) -> None:
        self._specs: dict[str, JitSpec] = {}

    def register(self, spec: JitSpec) -> None:
        self._specs.setdefault(spec.name, spec)

    def get_all_specs(self) -> dict[str, JitSpec]:
        return self._specs.copy()


jit_spec_registry = JitSpecRegistry()


def need(kind: str, config: Mapping[str, Any]) -> JitSpec:
    """The module of a configuration, compiled where it was not there."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    spec = JitSpec(f"{kind}_{digest}", dict(config))
    jit_spec_registry.register(spec)
    return spec
