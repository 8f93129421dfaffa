# SPDX-License-Identifier: Apache-2.0
"""Which attention metadata builders a captured drafter may have, and for how much of the drafter.

A captured kernel reads the tensors that its metadata named at capture. Before each launch of a pass's graph the drafter
calls its builders' `build_for_drafting` again, on a batch padded to the graph's shape, so what a builder keeps in
buffers of its own may change from launch to launch. Between the steps of a chain in one graph nothing is built, so
there the metadata may name nothing but the batch's tensors, which the chain itself advances.

Capture takes `build_for_drafting` as well, never `build_for_cudagraph_capture`: a graph needs the metadata of the call
that will refresh it. FLASH_ATTN's capture call plans a schedule into a buffer (`fast_build` is False there) that no
later `build_for_drafting` would write; the others' overrides only choose lengths for a quick capture.

Each class below was read in vLLM 0.20.2, 0.26.0 and 0.32.0. One that is not listed gets no FULL graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: What a builder class says of itself where it overrides methods that make metadata, but lets its base class make it.
SAME_AS_BASE = "same_metadata_as_base"


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one builder class allows.

    Attributes:
        passes: a FULL graph for one pass, with a build before each launch.
        chain: a graph of several passes, with no build between them.
        non_causal: either of them where queries see later ones.
        why: why no more than that; empty where all is allowed.
    """

    passes: bool
    chain: bool
    non_causal: bool
    why: str = ""


_VIEWS = Allowance(passes=True, chain=True, non_causal=True)
_UNKNOWN = Allowance(False, False, False, "it is not among the builders whose metadata is known to suit a graph")


def _passes(why: str) -> Allowance:
    return Allowance(passes=True, chain=False, non_causal=False, why=why)


_BACKENDS = "vllm.v1.attention.backends"
#: Class -> what it allows. A class without an entry takes that of the nearest base whose metadata it leaves alone.
BUILDERS = {
    # `fast_build`, which drafting asks for, leaves out the schedule; the rest names the batch's tensors.
    f"{_BACKENDS}.flash_attn.FlashAttentionMetadataBuilder": _VIEWS,
    f"{_BACKENDS}.triton_attn.TritonAttentionMetadataBuilder": _VIEWS,
    f"{_BACKENDS}.mla.flashattn_mla.FlashAttnMLAMetadataBuilder": _passes(
        "each build plans a schedule into one buffer of the builder's"
    ),
    f"{_BACKENDS}.mla.flashmla.FlashMLAMetadataBuilder": _passes(
        "each build makes a plan, which its first kernel or a buffer of the builder's holds"
    ),
    f"{_BACKENDS}.mla.flashinfer_mla.FlashInferMLAMetadataBuilder": _passes("a chain over it was never run"),
    # TRITON_MLA in all versions, CUTLASS_MLA and TOKENSPEED_MLA add nothing to it.
    "vllm.model_executor.layers.attention.mla_attention.MLACommonMetadataBuilder": _passes(
        "a chain over it was never run"
    ),
    f"{_BACKENDS}.flashinfer.FlashInferMetadataBuilder": _passes("each build plans on the host"),
    f"{_BACKENDS}.flex_attention.FlexAttentionMetadataBuilder": Allowance(
        False, False, False, "each build makes its block mask anew, in part from host values and temporary tensors"
    ),
    f"{_BACKENDS}.tree_attn.TreeAttentionMetadataBuilder": Allowance(
        False, False, False, "tree attention drafts several tokens a request and step"
    ),
}


def allowance(builder_class: type) -> Allowance:
    """What a builder class allows, by its own entry or by that of the base class that makes its metadata."""
    for cls in builder_class.__mro__:
        known = BUILDERS.get(f"{cls.__module__}.{cls.__qualname__}")
        if known is not None:
            return known
        if makes_metadata(cls) and not vars(cls).get(SAME_AS_BASE, False):
            return _UNKNOWN
    return _UNKNOWN


def makes_metadata(cls: type) -> bool:
    """Whether a class itself, leaving out its bases, has a method that makes metadata."""
    return any(name.lstrip("_").startswith("build") for name in vars(cls))


def refusing(builder_classes: Iterable[type], what: str) -> str | None:
    """The builders that do not allow `what` (a field of `Allowance`), each with its reason, or None."""
    refused: dict[str, str] = {}
    for cls in builder_classes:
        allows = allowance(cls)
        if not getattr(allows, what):
            refused[cls.__name__] = allows.why
    return "; ".join(f"{name}: {refused[name]}" for name in sorted(refused)) or None
