# SPDX-License-Identifier: Apache-2.0
"""Modules of kernels: which there are. In the real one a new one is compiled, which takes seconds to minutes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
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


def prewarm_modules(
    *,
    fmha_metadata_configs: Sequence[Mapping[str, Any]] | None = None,
    fmha_combine_configs: Sequence[Mapping[str, Any]] | None = None,
    fmha_fwd_configs: Sequence[Mapping[str, Any]] | None = None,
    include_flash_attention: bool = False,
    include_gemm: bool = False,
    include_deep_gemm_attention: bool = False,
    include_hyperconnection: bool = False,
    include_mla: bool = False,
    include_moe_fused_gate: bool = False,
    include_sage_attention: bool = False,
    jobs: int | None = None,
    verbose: bool = False,
    skip_prebuilt: bool = True,
) -> list[JitSpec]:
    kinds = {
        "fmha_get_metadata": fmha_metadata_configs,
        "fmha_fwd_combine": fmha_combine_configs,
        "fmha_fwd": fmha_fwd_configs,
    }
    specs = [need(kind, config) for kind, configs in kinds.items() for config in configs or ()]
    whole = {
        "flash_attention_ops": include_flash_attention,
        "gemm_ops": include_gemm,
        "deep_gemm_attention": include_deep_gemm_attention,
        "hyperconnection": include_hyperconnection,
        "mla_ops": include_mla,
        "moe_fused_gate": include_moe_fused_gate,
        "sage_attention": include_sage_attention,
    }
    return specs + [need(kind, {}) for kind, asked in whole.items() if asked]
