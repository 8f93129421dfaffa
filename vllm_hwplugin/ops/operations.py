# SPDX-License-Identifier: Apache-2.0
"""vLLM's operations that the plugin can compute, and which of its kernels are wanted: data and one decision.

``doctor`` and every process of vLLM read it before torch is there, so it does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

GATE: Final = "VLLM_HWPLUGIN_OPS"
SKIP: Final = "VLLM_HWPLUGIN_OPS_SKIP"

#: The dispatch key of vLLM's kernels for CUDA in every supported version, and of the plugin's.
KEY: Final = "CUDA"

#: The dispatch key of torch's only external backend, which torch_musa takes for MUSA.
MUSA_KEY: Final = "PrivateUse1"

#: Why other hosts have none of the plugin's kernels.
NO_GPU: Final = "the plugin's kernels stand under vLLM's names only on CUDA and MUSA"

#: Prefix of an operation's name among a process's decisions (:func:`vllm_hwplugin.base.run_records.note`).
RECORD: Final = "operation "


class Operation(NamedTuple):
    """An operation of vLLM.

    Attributes:
        name: also of the plugin's operation in ``torch.ops.hwplugin`` if it has a kernel, else of a function of
            :mod:`.definitions`.
        namespace: in ``torch.ops``.
        caller: what calls it in vLLM on MUSA; empty if nothing does.
        writes: arguments that the function of :mod:`.definitions` writes.
    """

    name: str
    namespace: Literal["_C", "_moe_C", "_C_cache_ops"]
    caller: str
    writes: tuple[str, ...] = ()

    @property
    def qualname(self) -> str:
        return f"{self.namespace}::{self.name}"


def _by_name(*operations: Operation) -> Mapping[str, Operation]:
    return MappingProxyType({operation.name: operation for operation in operations})


OPS: Final = _by_name(
    Operation("fused_qk_norm_rope", "_C", ""),
    Operation("silu_and_mul_per_block_quant", "_C", "experts in FP8 blocks"),
    Operation("rms_norm_dynamic_per_token_quant", "_C", ""),
    Operation("merge_attn_states", "_C", ""),
    Operation("topk_softmax", "_moe_C", "routers of mixtures of experts"),
    Operation("rotary_embedding", "_C", "DFlash drafters, for the keys of the context"),
)
"""Operations that the plugin has a kernel for."""

_QUANTISED: Final = ("result", "scale")

DEFINED: Final = _by_name(
    *OPS.values(),
    Operation("weak_ref_tensor", "_C", "every capture of a graph"),
    Operation("rms_norm", "_C", "DFlash and DSpark drafters, for the states and the keys of the context", ("result",)),
    Operation(
        "apply_repetition_penalties_",
        "_C",
        "requests with a repetition penalty: vLLM asks tensors for is_cuda, which torchada answers with yes",
        ("logits",),
    ),
    Operation("reshape_and_cache_flash", "_C_cache_ops", "FLEX_ATTENTION", ("key_cache", "value_cache")),
    Operation("concat_and_cache_mla", "_C_cache_ops", "MLA, for the keys of each step", ("kv_cache",)),
    Operation("gather_and_maybe_dequant_cache", "_C_cache_ops", "MLA, for prompts with a context", ("dst",)),
    Operation(
        "moe_align_block_size",
        "_moe_C",
        "experts, to assign rows",
        ("sorted_token_ids", "experts_ids", "num_tokens_post_pad", "scatter_idx"),
    ),
    Operation("moe_sum", "_moe_C", "experts, to add up a token's outputs", ("output",)),
    Operation("silu_and_mul", "_C", "experts, between their two layers", ("result",)),
    Operation("gelu_and_mul", "_C", "experts, between their two layers", ("result",)),
    Operation("gelu_tanh_and_mul", "_C", "experts, between their two layers", ("result",)),
    Operation("static_scaled_fp8_quant", "_C", "FP8 experts with a scale in the checkpoint", ("result",)),
    Operation("dynamic_scaled_fp8_quant", "_C", "FP8 experts", _QUANTISED),
    Operation("dynamic_per_token_scaled_fp8_quant", "_C", "FP8 experts with a scale for each token", _QUANTISED),
    Operation("static_scaled_int8_quant", "_C", "INT8 linear layers with a scale in the checkpoint", ("result",)),
    Operation("dynamic_scaled_int8_quant", "_C", "INT8 linear layers", ("result", "scale", "azp")),
)
"""Operations that the plugin defines if a build of vLLM has no kernel for MUSA (:mod:`.definitions`)."""


class KernelChoice(NamedTuple):
    wanted: bool
    reason: str


def choose(op: Operation, choice: str, skip: Sequence[str], *, defined: bool) -> KernelChoice:
    """Decide whether the plugin's kernel should replace vLLM's.

    Args:
        choice: the switch's value: ``auto``, ``on`` or ``off``.
        skip: names that keep vLLM's kernel.
        defined: vLLM has no kernel of it, and the plugin's PyTorch definition runs.
    """
    if choice == "off":
        return KernelChoice(False, f"{GATE}=off")
    if op.name in skip:
        return KernelChoice(False, f"named in {SKIP}")
    if choice == "on":
        return KernelChoice(True, f"{GATE}=on")
    if defined:
        return KernelChoice(True, "vLLM has no kernel of it here")
    return KernelChoice(False, f"vLLM has its own kernel; {GATE}=on takes the plugin's")


def describe(state: str, reason: str) -> str:
    """Return which kernel runs, for the log and run records."""
    kernels = {
        "plugin": "the plugin's kernel",
        "vllm": "vLLM's kernel",
        "torch": "the plugin's definition in torch",
        "open": "not decided yet",
    }
    return f"{kernels[state]}: {reason}"


def unknown_names(skip: Sequence[str]) -> tuple[str, ...]:
    """Return names without a kernel in the skip list, probably typos."""
    return tuple(name for name in skip if name not in OPS)
