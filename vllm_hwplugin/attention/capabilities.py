# SPDX-License-Identifier: Apache-2.0
"""The capabilities of the plugin's attention backends, as data.

vLLM asks a backend class by classmethods (``supports_non_causal``, ``is_mla``, ...). The base class answers all of
them, mostly with False. A backend that forgets one is refused where it would work, or accepted where it fails,
silently. The questions also differ between versions. So each question has a name here, and each backend of the plugin
an answer, a reason, and how it is known. :mod:`.classes` makes the classes from that; docs/attention.md has the table.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Final

from ..base.versions import SUPPORTED, UNKNOWN_FROM, Versions
from .backends import CUDA, FLASH_ATTN_LARGE, MUSA, MUSA_PAGE


@dataclasses.dataclass(frozen=True)
class Capability:
    """One question of vLLM to a backend.

    Args:
        name: the plugin's.
        method: the member of ``AttentionBackend`` that answers.
        since: the first supported version whose base class has the member.
        argument: of ``validate_configuration``: whether the question is asked, or about what; empty if there is none.
        plain: the member is a class attribute, not a classmethod.
    """

    name: str
    method: str
    since: str = SUPPORTED[0]
    argument: str = ""
    plain: bool = False


CAPABILITIES: Final[Mapping[str, Capability]] = {
    capability.name: capability
    for capability in (
        Capability("head_sizes", "supports_head_size", argument="head_size"),
        Capability("dtypes", "supports_dtype", argument="dtype"),
        Capability("kv_cache_dtypes", "supports_kv_cache_dtype", argument="kv_cache_dtype"),
        Capability("block_sizes", "supports_block_size", argument="block_size"),
        Capability("attn_types", "supports_attn_type", argument="attn_type"),
        Capability("compute_capability", "supports_compute_capability"),
        Capability("mla", "is_mla", argument="use_mla"),
        Capability("sparse", "is_sparse", argument="use_sparse"),
        Capability("ssm", "is_ssm"),
        Capability("sink", "supports_sink", argument="has_sink"),
        Capability("alibi_sqrt", "supports_alibi_sqrt"),
        Capability("mm_prefix", "supports_mm_prefix", argument="use_mm_prefix"),
        Capability("per_head_quant_scales", "supports_per_head_quant_scales", argument="use_per_head_quant_scales"),
        Capability("non_causal", "supports_non_causal", argument="use_non_causal"),
        Capability("batch_invariance", "supports_batch_invariance", argument="use_batch_invariant"),
        Capability("kv_connector", "supports_kv_connector", since="0.23.0", argument="use_kv_connector"),
        Capability("sliding_window", "supports_sliding_window", since="0.26.0", argument="has_sliding_window"),
        Capability("pcp", "supports_pcp", since="0.26.0", argument="use_pcp"),
        Capability(
            "device_cpu_query_lens_mismatch",
            "supports_device_cpu_query_lens_mismatch",
            since="0.28.0",
            argument="use_adaptive_verification",
        ),
        Capability("non_causal_dcp", "supports_non_causal_dcp", since="0.29.0"),
        Capability("dcp", "supports_dcp", since="0.30.0", argument="use_dcp"),
        Capability("rswa", "supports_rswa", since="0.30.0", argument="use_rswa"),
        Capability("kv_cache_update_bypass", "supports_kv_cache_update_bypass", since="0.33.0", plain=True),
    )
}

GAPS: Final[Mapping[str, str]] = {
    "supports_combination": "judges all arguments together, so it is code of the backend class and not a value",
}
"""Members of vLLM's base class named like a capability that are not in :data:`CAPABILITIES`, and why."""


@dataclasses.dataclass(frozen=True)
class Multiples:
    """The multiples of a number from ``least`` to ``up_to``, both included; None for no end."""

    of: int
    up_to: int | None = None
    least: int = 1

    def __contains__(self, number: int) -> bool:
        return number >= self.least and number % self.of == 0 and (self.up_to is None or number <= self.up_to)

    def __str__(self) -> str:
        start = f" from {self.least}" if self.least > 1 else ""
        return f"a multiple of {self.of}{start}" + ("" if self.up_to is None else f" up to {self.up_to}")


@dataclasses.dataclass(frozen=True)
class Vllm:
    """vLLM's own class answers, by the device or by installed kernels.

    Args:
        but_not: names (of types, as torch and vLLM write them) that its class accepts and that then fail: the answer to
            them is no.
    """

    but_not: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "vLLM's own answer" + (f", but not for {' or '.join(self.but_not)}" if self.but_not else "")


Value = bool | Multiples | tuple[str, ...] | Vllm


@dataclasses.dataclass(frozen=True)
class Declaration:
    """A backend's answer to one question.

    Args:
        backend: vLLM's name, with ``@device`` only for that device, with ``>size`` only for larger heads.
        capability: a name in :data:`CAPABILITIES`.
        value: True or False; the accepted numbers; the accepted names (of types, as torch and vLLM write them); or
            vLLM's own answer, perhaps with exceptions.
        since: the first version of vLLM in which it holds.
        before: the first in which it does not, or about which nothing is known.
        reason: for this value.
        verified: how it is known.
        limit: what a True leaves out on purpose; empty without reservation.
    """

    backend: str
    capability: str
    value: Value
    since: str
    before: str
    reason: str
    verified: str
    limit: str = ""

    @property
    def versions(self) -> Versions:
        return Versions(f">={self.since},<{self.before}")


# The commit messages of https://github.com/MooreThreads/vllm-musa/pull/52 say what was tried.
_PROBED = "vllm-musa's comparison of mate with torch on MUSA hardware (pull request 52); not repeated here"
_SERVED = "vllm-musa runs gemma-4 like this (pull request 52); not repeated here"
_UNTRIED = "not tried; False is the safe answer"
_READ = "read in vLLM's source"
_KIND = "what the backend is"
_TRIED = "compared with float64 by the kernel's tests"

_OF_OTHERS: Final = {
    "mla": "MLA has its own backends",
    "sparse": "sparse MLA has its own backends",
    "ssm": "attention, no state-space layer",
}


def _declare(
    backend: str,
    capability: str,
    value: Value,
    reason: str,
    verified: str = _UNTRIED,
    *,
    since: str = "",
    before: str = UNKNOWN_FROM,
    limit: str = "",
) -> Declaration:
    return Declaration(
        backend, capability, value, since or CAPABILITIES[capability].since, before, reason, verified, limit
    )


_cuda = functools.partial(_declare, CUDA.declared)
_large = functools.partial(_declare, FLASH_ATTN_LARGE)
_musa = functools.partial(_declare, MUSA.declared)

DECLARATIONS: Final[tuple[Declaration, ...]] = (
    # -- FLASH_ATTN on CUDA. Up to 256 it is vLLM's own kernels, so every other answer is vLLM's class's.
    _cuda(
        "head_sizes",
        Multiples(CUDA.head_multiple, CUDA.largest_head),
        "up to 256 on vLLM's kernels, above on the plugin's",
        _TRIED,
        before="0.26",
    ),
    _cuda(
        "head_sizes",
        Multiples(CUDA.head_multiple, CUDA.largest_head, least=32),
        "up to 256 on vLLM's kernels, above on the plugin's; with the KV cache of 0.26 FlashAttention 3 hangs at 8 and "
        "16",
        "vllm-hwplugin probe on an H200 with vLLM 0.26.0, which tries 8, 16, 32 and larger sizes",
        since="0.26.0",
    ),
    _cuda("block_sizes", Multiples(CUDA.page_multiple), "the pages of vLLM's FLASH_ATTN cache", _READ),
    _cuda(
        "kv_cache_dtypes",
        Vllm(("fp8_e5m2", "fp8_inc", "fp8_ds_mla", "fp8_per_token_head", "int8_per_token_head", "nvfp4")),
        "vLLM's class takes every quantized type for fp8 here, and its layer then raises `Unrecognized FP8 dtype`; use "
        "--kv-cache-dtype fp8",
        "vLLM's class is asked, and compared with its layer by a test",
        before="0.22",
    ),
    # -- FLASH_ATTN on CUDA with heads above 256: the plugin's kernel.
    _large(
        "head_sizes",
        Multiples(CUDA.head_multiple, CUDA.largest_head),
        "the kernel's range; TRITON_ATTN and FLEX_ATTENTION have none",
        _TRIED,
    ),
    _large("dtypes", CUDA.dtypes, "the kernel multiplies on tensor cores; use --dtype bfloat16", _TRIED),
    _large(
        "kv_cache_dtypes",
        ("auto", *CUDA.dtypes),
        "the kernel reads keys as they are stored; use --kv-cache-dtype auto, or TRITON_ATTN",
        _TRIED,
    ),
    _large(
        "block_sizes",
        Multiples(CUDA.page_multiple),
        "vLLM's FLASH_ATTN cache has pages of such sizes; leave --block-size out",
        _TRIED,
    ),
    _large("attn_types", ("decoder",), "encoder layers have no paged cache, and the kernel reads one; use TRITON_ATTN"),
    _large("compute_capability", Vllm(), "8.0 or later", "vLLM's class is asked"),
    *(_large(name, False, reason, _KIND) for name, reason in _OF_OTHERS.items()),
    _large("sink", True, "the kernel takes one value for each head", _TRIED),
    _large("alibi_sqrt", False, "the kernel has no ALiBi"),
    _large(
        "mm_prefix",
        False,
        "the kernel has no mask for images whose tokens see each other in both directions; start with "
        "--language-model-only to serve text, or use TRITON_ATTN",
        _KIND,
    ),
    _large("per_head_quant_scales", False, "they scale fp8 queries and keys, which the kernel does not read"),
    _large("non_causal", True, "causal is an argument of the kernel", _TRIED),
    _large("batch_invariance", True, "there are no splits over the KV length then", _TRIED),
    _large("kv_connector", True, "the KV cache is vLLM's FLASH_ATTN cache", _READ),
    _large("sliding_window", True, "the window is an argument of the kernel", _TRIED),
    _large("pcp", False, "the kernel does not give the log-sum-exp of a part"),
    _large("device_cpu_query_lens_mismatch", False, "the blocks that are launched follow the CPU's longest query"),
    _large("non_causal_dcp", False, "the kernel does not give the log-sum-exp of a part"),
    _large("dcp", False, "the kernel does not give the log-sum-exp of a part"),
    _large("rswa", False, "the kernel has no mask for it; use TRITON_ATTN"),
    _large("kv_cache_update_bypass", True, "forward reads keys and values from the cache", _READ),
    # -- FLASH_ATTN on MUSA: mate.flash_attn_varlen_func.
    _musa(
        "head_sizes",
        Multiples(MUSA.head_multiple, MUSA.largest_head),
        "the range that mate's FlashAttention 3 wrapper takes",
        f"256 and 512: {_SERVED}",
    ),
    _musa("dtypes", MUSA.dtypes, "mate says 'inputs must be float16 or bfloat16'", _PROBED),
    _musa(
        "kv_cache_dtypes",
        ("auto", *MUSA.dtypes, "fp8", "fp8_e4m3"),
        "mate reads keys of the queries' type; fp8 is e4m3, from mate 0.2.7 on",
        "vllm-musa's FLASH_ATTN (pull request 101); not repeated here",
    ),
    _musa(
        "block_sizes",
        Multiples(MUSA.page_multiple),
        f"vLLM's FLASH_ATTN cache has pages of such sizes; without --block-size they have {MUSA_PAGE} tokens, which "
        "mate loads fastest",
        "read in vLLM's source, and in mate's (0.2.2)",
    ),
    _musa("attn_types", ("decoder",), "encoder layers have no paged cache, and mate is called with one"),
    _musa("compute_capability", True, "the MUSA architecture is not on CUDA's scale, which vLLM compares with", _KIND),
    *(_musa(name, False, reason, _KIND) for name, reason in _OF_OTHERS.items()),
    _musa("sink", True, "mate's kernel takes one value for each head", _PROBED),
    _musa("alibi_sqrt", False, "no ALiBi is passed to mate"),
    _musa(
        "mm_prefix",
        True,
        "mate has no mask, so the tokens of an image cannot see each other in both directions; but such models also "
        "serve text, and vLLM selects the backend by the model. A batch with an image is refused at run time",
        _SERVED,
        limit="text only",
    ),
    _musa("per_head_quant_scales", False, "they scale fp8 queries and keys, which mate refuses", _PROBED),
    _musa("non_causal", True, "causal is an argument of mate's function", _PROBED),
    _musa(
        "batch_invariance",
        True,
        "mate splits a request's keys only by a schedule, which it does not get, and gets num_splits=1; every batch is "
        "read from the cache; its deterministic is about gradients",
        "read in mate's source (0.2.2), and " + _PROBED,
    ),
    _musa("kv_connector", False, "KV transfer that copies blocks is not supported on MUSA"),
    _musa("sliding_window", True, "the window is an argument of mate's function", _SERVED),
    _musa("pcp", False, "needs the log-sum-exp of each part, and mate does not return it here"),
    _musa("device_cpu_query_lens_mismatch", False, "mate gets the CPU's longest query"),
    _musa("non_causal_dcp", False, "needs the log-sum-exp of each part, and mate does not return it here"),
    _musa("dcp", False, "needs the log-sum-exp of each part, and mate does not return it here"),
    _musa("rswa", False, "mate has no mask"),
    _musa("kv_cache_update_bypass", False, "no fused operation writes the cache on MUSA"),
)


def declared(backend: str, version: str) -> Mapping[str, Declaration]:
    """Return a backend's declarations by capability.

    About a backend without declarations vLLM's class decides. A version's local part (``+cu129``) does not matter;
    an unchecked version has no declarations.
    """
    return {
        declaration.capability: declaration
        for declaration in DECLARATIONS
        if declaration.backend == backend and declaration.versions.covers(version)
    }


def asked_in(version: str) -> frozenset[str]:
    """Return the capabilities that a version of vLLM asks for."""
    capabilities = CAPABILITIES.values()
    return frozenset(
        capability.name for capability in capabilities if Versions(f">={capability.since}").covers(version)
    )


def allows(value: Value, asked: Any) -> bool:
    """Whether a declared value, or vLLM's answer, covers what is asked.

    Args:
        asked: a flag, a size, or a type (by its name, or a ``torch.dtype``). None asks for nothing.
    """
    if isinstance(value, bool):
        return value or not asked
    if asked is None:
        return True
    if isinstance(value, Multiples):
        return asked in value
    if isinstance(value, Vllm):
        return _name(asked) not in value.but_not
    return _name(asked) in value


def reserves(declarations: Mapping[str, Declaration], asked: Mapping[str, Any]) -> list[str]:
    """Return the reservations about declared capabilities, in sentences.

    `asked` has the arguments of ``validate_configuration`` by name.
    """
    return [
        f"{declaration.backend} declares {declaration.capability} for {declaration.limit}: {declaration.reason}"
        for declaration in declarations.values()
        if declaration.limit and asked.get(CAPABILITIES[declaration.capability].argument)
    ]


def explain(declarations: Mapping[str, Declaration], asked: Mapping[str, Any]) -> list[str]:
    """Return why a configuration is refused: what was asked, what is declared.

    `asked` has the arguments of ``validate_configuration`` by name.
    """
    reasons = []
    for capability, declaration in declarations.items():
        backend, value, reason = declaration.backend, declaration.value, declaration.reason
        argument = CAPABILITIES[capability].argument
        if argument not in asked or allows(value, asked[argument]):
            continue
        if isinstance(value, Vllm):
            reasons.append(f"{backend} does not declare {argument} {_name(asked[argument])}: {reason}")
        elif isinstance(value, bool):
            reasons.append(f"{backend} does not declare {capability}: {reason}")
        else:
            expected = value if isinstance(value, Multiples) else " or ".join(value)
            reasons.append(f"{backend}: {argument} is {_name(asked[argument])}, expected {expected}: {reason}")
    return reasons


def _name(asked: Any) -> str:
    # A torch.dtype prints as `torch.float16`; vLLM's AttentionType is a str that prints as its member.
    return str(getattr(asked, "value", asked)).removeprefix("torch.")
