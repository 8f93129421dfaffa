# SPDX-License-Identifier: Apache-2.0
"""Calls of mate whose arguments are all known to be there. Not run on MUSA hardware.

mate is Moore Threads' library of kernels. Its function follows FlashAttention's of that name, whose published versions
name some arguments differently, and mate's own changed from release to release. An argument left out because its name
does not fit would be a wrong answer (a model without its sinks, a mask that is causal). So the names are looked up in
the function's signature once, and a function that lacks one is not used at all.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..errors import HwpluginError

# Argument -> its names. page_table and learnable_sink are mate's (its source was read at 0.2.2) and FlashAttention 4's;
# block_table and s_aux are vLLM's fork's of FlashAttention, and in no release of mate that was read.
_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "q": ("q",),
    "k": ("k",),
    "v": ("v",),
    "cu_seqlens_q": ("cu_seqlens_q",),
    "seqused_k": ("seqused_k",),
    "block_table": ("block_table", "page_table"),
    "softmax_scale": ("softmax_scale",),
    "causal": ("causal",),
    "window_size": ("window_size",),
    "softcap": ("softcap",),
    "sinks": ("s_aux", "learnable_sink"),
    "deterministic": ("deterministic",),
}
# Not in every one of them, and of no weight for the result: upper bounds, where to write it, and how many parts the
# keys are split into and by which schedule, which is no concern of a function without those arguments.
_OPTIONAL: Final = ("max_seqlen_q", "max_seqlen_k", "out", "num_splits", "scheduler_metadata")
# Sequence lengths of keys that are not paged: required by some, and None beside a page table.
_UNPAGED: Final = "cu_seqlens_k"
# What says where keys are that are paged, and how many: left out where they are not.
_PAGED: Final = ("block_table", "seqused_k")

# The same for mate.get_scheduler_metadata, all of which is needed. cache_seqlens is FlashAttention 3's name.
_SCHEDULE_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "seqused_k": ("seqused_k", "cache_seqlens"),
    **{
        name: (name,)
        for name in (
            "batch_size",
            "max_seqlen_q",
            "max_seqlen_k",
            "num_heads_q",
            "num_heads_kv",
            "headdim",
            "qkv_dtype",
            "cu_seqlens_q",
            "page_size",
            "causal",
            "window_size",
            "num_splits",
        )
    },
}


class MateMismatch(HwpluginError, ImportError):
    """The installed mate cannot be called as this backend needs it."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The function, and under which name it takes each argument."""

    function: Callable[..., Any]
    names: Mapping[str, str]
    fixed: Mapping[str, Any]
    #: Whether keys may be packed like the queries, with ``cu_seqlens_k`` and without a block table.
    takes_packed_keys: bool = False

    @property
    def takes_schedule(self) -> bool:
        """Whether keys may be split by what :func:`bind_schedule`'s function returns."""
        return {"scheduler_metadata", "num_splits"} <= self.names.keys()

    def __call__(self, out: Any, **arguments: Any) -> None:
        """Attention into ``out``.

        Args:
            out: where the result goes, like ``q``.
            arguments: all of q (tokens, heads, head size), k and v (blocks, tokens a block, KV heads, head size),
                cu_seqlens_q (requests + 1, int32), seqused_k (requests, int32), block_table (requests, blocks),
                softmax_scale, causal, window_size (tokens before and after, -1: no end), softcap (0: none), sinks
                (heads, or None), deterministic, num_splits (0: as the function decides), max_seqlen_q, max_seqlen_k,
                and perhaps scheduler_metadata. With :attr:`takes_packed_keys` also cu_seqlens_k (requests + 1, int32)
                in place of seqused_k and block_table, and k and v (tokens, KV heads, head size).
        """
        given = {self.names[name]: value for name, value in arguments.items() if name in self.names}
        if "out" in self.names:
            given[self.names["out"]] = out
        result = self.function(**{**self.fixed, **given})
        # With the log-sum-exp beside it, where the function returns that as well.
        result = result[0] if isinstance(result, tuple) else result
        if result.data_ptr() != out.data_ptr():
            out.copy_(result.view_as(out))


def bind(function: Callable[..., Any]) -> Call:
    """Find the arguments of ``mate.flash_attn_varlen_func`` in its signature.

    Raises:
        MateMismatch: one is not there, or the function requires one that is not known.
    """
    parameters = _parameters("flash_attn_varlen_func", function)
    names = _named("flash_attn_varlen_func", parameters, _NAMES)
    names.update({name: name for name in (*_OPTIONAL, _UNPAGED) if name in parameters})
    _require_no_more("flash_attn_varlen_func", parameters, names)
    fixed = {_UNPAGED: None} if _UNPAGED in parameters else {}
    optional = all(parameters[names[name]].default is not inspect.Parameter.empty for name in _PAGED)
    return Call(function, names, fixed, takes_packed_keys=bool(fixed) and optional)


def bind_schedule(function: Callable[..., Any]) -> Callable[..., Any]:
    """``mate.get_scheduler_metadata``, to be called by :data:`_SCHEDULE_NAMES`' own names.

    Raises:
        MateMismatch: an argument is not there, or the function requires one that is not known.
    """
    parameters = _parameters("get_scheduler_metadata", function)
    names = _named("get_scheduler_metadata", parameters, _SCHEDULE_NAMES)
    _require_no_more("get_scheduler_metadata", parameters, names)

    def plan(**arguments: Any) -> Any:
        return function(**{names[name]: value for name, value in arguments.items()})

    return plan


def _parameters(name: str, function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise MateMismatch(f"mate.{name} has no signature to check its arguments by: {error}") from error


def _named(
    name: str, parameters: Mapping[str, inspect.Parameter], known: Mapping[str, tuple[str, ...]]
) -> dict[str, str]:
    names = {}
    for argument, spellings in known.items():
        found = [spelling for spelling in spellings if spelling in parameters]
        if not found:
            raise MateMismatch(
                f"mate.{name} has no argument {' or '.join(spellings)}, expected for {argument}; it "
                f"has {', '.join(parameters)}. Another version of mate may have it; TRITON_ATTN and FLEX_ATTENTION "
                "need no mate"
            )
        names[argument] = found[0]
    return names


def _require_no_more(name: str, parameters: Mapping[str, inspect.Parameter], names: Mapping[str, str]) -> None:
    unknown = [
        item.name
        for item in parameters.values()
        if item.default is item.empty
        and item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)
        and item.name not in names.values()
    ]
    if unknown:
        raise MateMismatch(
            f"mate.{name} requires {', '.join(unknown)}, which this backend does not know; "
            "another version of mate may not, and TRITON_ATTN and FLEX_ATTENTION need no mate"
        )
