# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's operations the plugin has a kernel for, and where that kernel is the default: data and one decision.

``doctor`` and every process of vLLM read it before there is a torch, so nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from ..versions import Versions

GATE: Final = "VLLM_HWPLUGIN_OPS"
SKIP: Final = "VLLM_HWPLUGIN_OPS_SKIP"

#: The key under which vLLM registers these kernels for CUDA in every supported version, and under which the plugin's
#: stand there.
KEY: Final = "CUDA"

#: Why the table says nothing of other hosts.
NO_GPU: Final = "the plugin's kernels stand under vLLM's names only on CUDA and MUSA"

#: Before the name of an operation, among a process's decisions (:func:`vllm_hwplugin.journal.note`).
RECORD: Final = "operation "


class Schema(NamedTuple):
    """What vLLM's C extension registers, word for word but for blanks.

    Attributes:
        versions: the vLLM versions with this text, as ``packaging`` writes ranges. For the reader: a process compares
            the text itself, because a build of vLLM need not be a release.
        text: from vLLM's ``csrc/**/torch_bindings.cpp``.
    """

    versions: str
    text: str


class Gain(NamedTuple):
    """Where the benchmark shows that a kernel gains (``benchmarks/results/kernels-ops-*.json``).

    Attributes:
        device: as PyTorch and nvidia-smi name it.
        vllm: the versions whose own kernel it was measured against, as ``packaging`` writes ranges. vLLM writes its
            kernels anew, and a result says nothing of the next one.
    """

    device: str
    vllm: str


class OverridableOp(NamedTuple):
    """An operation of vLLM and the plugin's kernel of the same name.

    Attributes:
        name: of vLLM's operation, of the plugin's in ``torch.ops.hwplugin``, and of the kernel.
        namespace: of vLLM's operation.
        schemas: every text that is known; with another one the operation is left alone.
        default_on: where it is taken without being asked for.
        not_default: why it is the default nowhere though it gains; empty for the others.
    """

    name: str
    namespace: Literal["_C", "_moe_C"]
    schemas: tuple[Schema, ...]
    default_on: tuple[Gain, ...] = ()
    not_default: str = ""

    @property
    def qualname(self) -> str:
        return f"{self.namespace}::{self.name}"


class KernelChoice(NamedTuple):
    """Whether the plugin's kernel is wanted, and why."""

    wanted: bool
    reason: str


#: Those that are supported.
ALL_VERSIONS: Final = ">=0.20.0"

_H200: Final = (Gain("NVIDIA H200", "==0.20.2"),)

OPS: Final[Mapping[str, OverridableOp]] = MappingProxyType(
    {
        op.name: op
        for op in (
            OverridableOp(
                "rotary_embedding",
                "_C",
                (
                    Schema(
                        ALL_VERSIONS,
                        "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, "
                        "Tensor cos_sin_cache, bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
                    ),
                ),
                not_default="it rounds products and sums to the type of the cache, where vLLM's own kernel rounds once",
            ),
            OverridableOp(
                "fused_qk_norm_rope",
                "_C",
                (
                    Schema(
                        ALL_VERSIONS,
                        "fused_qk_norm_rope(Tensor! qkv, int num_heads_q, int num_heads_k, int num_heads_v, "
                        "int head_dim, float eps, Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, "
                        "bool is_neox, Tensor position_ids, int forced_token_heads_per_warp=-1) -> ()",
                    ),
                ),
                default_on=_H200,
            ),
            OverridableOp(
                "silu_and_mul_per_block_quant",
                "_C",
                (
                    Schema(
                        ALL_VERSIONS,
                        "silu_and_mul_per_block_quant(Tensor! out, Tensor input, Tensor! scales, int group_size, "
                        "Tensor? scale_ub=None, bool is_scale_transposed=False) -> ()",
                    ),
                ),
                default_on=_H200,
            ),
            OverridableOp(
                "rms_norm_dynamic_per_token_quant",
                "_C",
                (
                    Schema(
                        ALL_VERSIONS,
                        "rms_norm_dynamic_per_token_quant(Tensor! result, Tensor input, Tensor weight, Tensor! scale, "
                        "float epsilon, Tensor? scale_ub, Tensor!? residual) -> ()",
                    ),
                ),
                default_on=_H200,
            ),
            OverridableOp(
                "merge_attn_states",
                "_C",
                (
                    Schema(
                        ALL_VERSIONS,
                        "merge_attn_states(Tensor! output, Tensor!? output_lse, Tensor prefix_output, "
                        "Tensor prefix_lse, Tensor suffix_output, Tensor suffix_lse, "
                        "int!? prefill_tokens_with_context, Tensor? output_scale=None) -> ()",
                    ),
                ),
                default_on=_H200,
            ),
            OverridableOp(
                "topk_softmax",
                "_moe_C",
                (
                    Schema(
                        ">=0.20.0,<0.27.0",
                        "topk_softmax(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, "
                        "Tensor gating_output, bool renormalize, Tensor? bias) -> ()",
                    ),
                    Schema(
                        ">=0.27.0",
                        "topk_softmax(Tensor! topk_weights, Tensor! topk_indices, Tensor! token_expert_indices, "
                        "Tensor gating_output, bool renormalize, Tensor? bias, Tensor? is_padding) -> ()",
                    ),
                ),
                default_on=_H200,
            ),
        )
    }
)


def choose(
    op: OverridableOp,
    choice: str,
    skip: Sequence[str],
    device: str | None,
    version: str | None,
    *,
    defined: bool = False,
) -> KernelChoice:
    """Whether the plugin's kernel should stand under vLLM's name.

    Args:
        choice: what the gate says: ``auto``, ``on`` or ``off``.
        skip: names that keep vLLM's kernel.
        device: the name of the GPU; None while a process does not know it, and that is no reason against.
        version: vLLM's; None likewise.
        defined: vLLM has no kernel of it, and the plugin's definition in torch serves (:mod:`.definitions`).
    """
    if choice == "off":
        return KernelChoice(False, f"{GATE}=off")
    if op.name in skip:
        return KernelChoice(False, f"named in {SKIP}")
    if choice == "on":
        return KernelChoice(True, f"{GATE}=on")
    if defined:
        return KernelChoice(True, "vLLM has no kernel of it here")
    if not op.default_on:
        why = op.not_default or "no device is known on which it gains"
        return KernelChoice(False, f"{why}; {GATE}=on takes it all the same")
    here = [gain for gain in op.default_on if device in (None, gain.device)]
    if not here:
        return KernelChoice(False, f"not known to gain on {device}; {GATE}=on takes it all the same")
    measured = ", ".join(f"{gain.device} with vLLM {gain.vllm}" for gain in here)
    if version is None or any(Versions(gain.vllm).covers(version) for gain in here):
        return KernelChoice(True, f"measured to gain on {measured}")
    return KernelChoice(False, f"measured on {measured}, not {version}; {GATE}=on takes it all the same")


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
    """Names in the skip list that are no operation of the table: most often a spelling mistake."""
    return tuple(name for name in skip if name not in OPS)
