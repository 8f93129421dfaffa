# SPDX-License-Identifier: Apache-2.0
"""The operations of vLLM that the plugin can serve, and which of its kernels are wanted: data and one decision.

``doctor`` and every process of vLLM read it before there is a torch, so nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

GATE: Final = "VLLM_HWPLUGIN_OPS"
SKIP: Final = "VLLM_HWPLUGIN_OPS_SKIP"

#: The key under which vLLM registers these kernels for CUDA in every supported version, and under which the plugin's
#: stand there.
KEY: Final = "CUDA"

#: The dispatch key of torch's one backend from outside, which is MUSA's where torch_musa is.
MUSA_KEY: Final = "PrivateUse1"

#: Why the plugin's kernels are on no other host.
NO_GPU: Final = "the plugin's kernels stand under vLLM's names only on CUDA and MUSA"

#: Before the name of an operation, among a process's decisions (:func:`vllm_hwplugin.journal.note`).
RECORD: Final = "operation "


class Operation(NamedTuple):
    """An operation of vLLM.

    Attributes:
        name: of vLLM's operation, and of what serves it: the plugin's own operation in ``torch.ops.hwplugin``, where it
            has a kernel, else a function of :mod:`.definitions`.
        namespace: in ``torch.ops``.
        caller: what of vLLM reaches it on MUSA; empty where nothing does today.
        writes: the arguments that the function of :mod:`.definitions` writes.
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
)
"""Those that the plugin has a kernel for."""

_QUANTISED: Final = ("result", "scale")

DEFINED: Final = _by_name(
    *OPS.values(),
    Operation("weak_ref_tensor", "_C", "every capture of a graph"),
    Operation("rms_norm", "_C", "DFlash and DSpark drafters, for the states and the keys of the context", ("result",)),
    Operation("rotary_embedding", "_C", "DFlash drafters, for the keys of the context", ("query", "key")),
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
        "experts, for which rows go to which",
        ("sorted_token_ids", "experts_ids", "num_tokens_post_pad", "scatter_idx"),
    ),
    Operation("moe_sum", "_moe_C", "experts, for what those of a token add up to", ("output",)),
    Operation("silu_and_mul", "_C", "experts, between their two layers", ("result",)),
    Operation("gelu_and_mul", "_C", "experts, between their two layers", ("result",)),
    Operation("gelu_tanh_and_mul", "_C", "experts, between their two layers", ("result",)),
    Operation("static_scaled_fp8_quant", "_C", "FP8 experts with a scale in the checkpoint", ("result",)),
    Operation("dynamic_scaled_fp8_quant", "_C", "FP8 experts", _QUANTISED),
    Operation("dynamic_per_token_scaled_fp8_quant", "_C", "FP8 experts with a scale for each token", _QUANTISED),
    Operation("static_scaled_int8_quant", "_C", "INT8 linear layers with a scale in the checkpoint", ("result",)),
    Operation("dynamic_scaled_int8_quant", "_C", "INT8 linear layers", ("result", "scale", "azp")),
)
"""Those that the plugin defines where a build of vLLM has no kernel for MUSA (:mod:`.definitions`)."""


class KernelChoice(NamedTuple):
    """Whether the plugin's kernel is wanted, and why."""

    wanted: bool
    reason: str


def choose(op: Operation, choice: str, skip: Sequence[str], *, defined: bool) -> KernelChoice:
    """Whether the plugin's kernel should stand under vLLM's name.

    Args:
        choice: what the gate says: ``auto``, ``on`` or ``off``.
        skip: names that keep vLLM's kernel.
        defined: vLLM has no kernel of it, and the plugin's definition in torch serves.
    """
    if choice == "off":
        return KernelChoice(False, f"{GATE}=off")
    if op.name in skip:
        return KernelChoice(False, f"named in {SKIP}")
    if choice == "on":
        return KernelChoice(True, f"{GATE}=on")
    if defined:
        return KernelChoice(True, "vLLM has no kernel of it here")
    return KernelChoice(False, f"vLLM has a kernel of its own; {GATE}=on takes the plugin's")


def describe(state: str, reason: str) -> str:
    """What serves an operation, for the log and the journals."""
    kernels = {
        "plugin": "the plugin's kernel",
        "vllm": "vLLM's kernel",
        "torch": "the plugin's definition in torch",
        "open": "not decided yet",
    }
    return f"{kernels[state]}: {reason}"


def unknown_names(skip: Sequence[str]) -> tuple[str, ...]:
    """Names in the skip list that no kernel is for: most often a spelling mistake."""
    return tuple(name for name in skip if name not in OPS)
