# SPDX-License-Identifier: Apache-2.0
"""A compiler pass that puts vLLM's operations back in place of the plugin's.

It changes only graphs for more tokens than the kernels take (:mod:`.compile_ranges`). It comes before vLLM's other
passes, and Inductor fuses the operations as usual.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch._inductor.pattern_matcher import CallFunctionVarArgs, Match, PatternMatcherPass, register_graph_pattern
from vllm import ir
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.model_executor.layers.activation import SiluAndMul

from vllm_hwplugin.linear.operations import MOST_TOKENS


class RestorePass(InductorPass):  # type: ignore[misc]  # vLLM is not there where the types are checked
    """The first pass of vLLM's patched `PostGradPassManager`."""

    def __init__(self) -> None:
        self._patterns = PatternMatcherPass("hwplugin_restore")
        for operation, replace in (
            (torch.ops.hwplugin.linear.default, self._replace_linear),
            (torch.ops.hwplugin.rms_norm.default, self._replace_rms_norm),
            (torch.ops.hwplugin.add_rms_norm.default, self._replace_add_rms_norm),
        ):
            register_graph_pattern(CallFunctionVarArgs(operation), pass_dict=self._patterns)(replace)

    def __call__(self, graph: torch.fx.Graph) -> None:
        self._patterns.apply(graph)

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        """Whether a range has only steps too large for the kernels."""
        return bool(compile_range.start > MOST_TOKENS)

    @staticmethod
    def _replace_linear(match: Match, x: Any, weight: Any, gated: bool = False) -> None:
        def gated_linear(x: torch.Tensor, weight: torch.Tensor) -> Any:
            return SiluAndMul.forward_native(F.linear(x, weight))

        match.replace_by_example(gated_linear if gated else F.linear, (x, weight))

    @staticmethod
    def _replace_rms_norm(match: Match, x: Any, weight: Any, epsilon: float) -> None:
        match.replace_by_example(lambda x, weight: ir.ops.rms_norm(x, weight, epsilon), (x, weight))

    @staticmethod
    def _replace_add_rms_norm(match: Match, x: Any, residual: Any, weight: Any, epsilon: float) -> None:
        match.replace_by_example(
            lambda x, residual, weight: ir.ops.fused_add_rms_norm(x, residual, weight, epsilon), (x, residual, weight)
        )
