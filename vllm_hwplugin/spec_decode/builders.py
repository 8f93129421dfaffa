# SPDX-License-Identifier: Apache-2.0
"""Which attention metadata builders may work inside CUDA graphs of drafts or of a step's inputs.

A captured kernel reads the tensors that its metadata named at capture. A build's host work is done only once.

- *A pass* of a V1 drafter. Before each launch the drafter calls `build_for_drafting` on a batch padded to the graph's
  shape, so the contents of a builder's buffers may change from launch to launch. Capture also uses
  `build_for_drafting`, never `build_for_cudagraph_capture`: the graph needs the metadata of the call that refreshes
  it. FLASH_ATTN's capture call plans a schedule into a buffer (`fast_build` is False there) that no later
  `build_for_drafting` would write; other overrides only choose lengths for a quick capture.
- *A chain* of a V1 drafter's passes in one graph. Nothing is built between them, so the metadata may name only the
  batch's tensors, which the chain itself advances.
- *One token* per request, in a graph that calls vLLM's own `build` for each step. The build reads only the graph's
  shape from the host, or the model's longest sequence in place of the batch's. It copies nothing from the host to the
  device, because a replay would read freed memory, and it never waits for the device.
- *A decode batch*, the same for several tokens per request: only lengths, slots and block tables change between steps.
- *Short prompts*: the build takes them for decodes, of any length up to its `reorder_batch_threshold`.
- *Prompts*, the same for any mix of requests: the graph is captured as if one request had all its tokens.
  `AttentionCGSupport.ALWAYS` does not imply that: from 0.31 on FLASHINFER_MLA declares it for any mix of 1 to 1 + k
  tokens, and its capture of a longer request raises.

For passes and chains each class was read in vLLM 0.20.2, 0.26.0 and 0.32.0, for updates in 0.32 and 0.33, for the other
uses in the last release of each minor version from 0.20 to 0.33. A class that is not listed, or that overrides what was
read, gets no graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from vllm_hwplugin.base import gates

#: A class attribute by which a builder declares: it overrides methods that make metadata, but its base class makes it.
#: A drafter's passes then use the base class's entry.
SAME_AS_BASE: Final = "same_metadata_as_base"


@dataclass(frozen=True)
class Builder:
    """The graph uses that one builder class allows. The module's docstring describes most of them.

    Attributes:
        non_causal: passes and chains whose queries see later queries.
        prompts: counts only if the class also declares `ALWAYS` (FLASH_ATTN also on FlashAttention 2 and 4, see
            `flash_versions`).
        short_prompts: not measured on a GPU, so V2 graphs have it only with VLLM_HWPLUGIN_MORE_GRAPHS=mla-prompts.
        updated: one-token metadata that vLLM's own update refreshes on the device, if the builder declares it
            (`supports_draft_decode_metadata_update`, from 0.28 on). A graph of draft steps contains that update.
        asked_for: V2 graphs have it only with VLLM_HWPLUGIN_MORE_GRAPHS=trtllm.
        why: why nothing more is allowed.
    """

    passes: bool = False
    chain: bool = False
    non_causal: bool = False
    one_token: bool = False
    decode: bool = False
    prompts: bool = False
    short_prompts: bool = False
    updated: bool = False
    asked_for: bool = False
    why: str = ""


_BACKENDS: Final = "vllm.v1.attention.backends"
# They name the batch's tensors. FlashAttention 3 puts a kernel's schedule into one tensor of the builder, which is long
# enough for every graph; `fast_build`, which drafting asks for, leaves the schedule out.
_VIEWS: Final = Builder(passes=True, chain=True, non_causal=True, one_token=True, decode=True, prompts=True)
_MLA: Final = Builder(passes=True, one_token=True, decode=True, why="a chain over it was never run")
_UPDATED: Final = Builder(updated=True, why="its build works on the host, and here vLLM cannot update what it made")
_UNKNOWN: Final = Builder(why="it is not among the builders whose metadata is known to suit a graph")

_FLASH_ATTN: Final = f"{_BACKENDS}.flash_attn.FlashAttentionMetadataBuilder"

BUILDERS: Final[Mapping[str, Builder]] = {
    _FLASH_ATTN: _VIEWS,
    # Only refuses batches that it has no kernel for.
    "vllm_hwplugin.attention.cuda.CudaFlashAttentionMetadataBuilder": _VIEWS,
    # Only refuses batches that mate has no kernel for. It declares UNIFORM_BATCH.
    "vllm_hwplugin.musa.attention.MusaFlashAttentionMetadataBuilder": _VIEWS,
    f"{_BACKENDS}.triton_attn.TritonAttentionMetadataBuilder": _VIEWS,
    f"{_BACKENDS}.mla.flashattn_mla.FlashAttnMLAMetadataBuilder": Builder(
        passes=True,
        one_token=True,
        decode=True,
        short_prompts=True,
        why="each build plans a schedule into one buffer of the builder's",
    ),
    # Unlike vLLM's FLASHMLA: each build has a kernel plan, in tensors of the builder.
    "vllm_hwplugin.musa.mla.MusaFlashMLAMetadataBuilder": Builder(
        passes=True, one_token=True, decode=True, why="each build makes a plan in tensors of the builder's"
    ),
    f"{_BACKENDS}.mla.flashmla.FlashMLAMetadataBuilder": Builder(
        passes=True,
        one_token=True,
        why="each build makes a plan, which its first kernel or a buffer of the builder's holds",
    ),
    # All requests of a step are decodes, and the metadata names the batch's tensors. FLASHINFER_MLA has its own builder
    # from 0.31 on. TRITON_MLA in all versions, CUTLASS_MLA and TOKENSPEED_MLA add nothing to the common builder.
    f"{_BACKENDS}.mla.flashinfer_mla.FlashInferMLAMetadataBuilder": _MLA,
    "vllm.model_executor.layers.attention.mla_attention.MLACommonMetadataBuilder": _MLA,
    # Their builds work on the host. Their updates write all of a decode step's metadata again, from lengths and block
    # tables on the device, into tensors that the metadata names.
    f"{_BACKENDS}.mla.flashattn_mla_sparse.FlashAttnMLASparseMetadataBuilder": _UPDATED,
    # Of 0.33, for Blackwell.
    f"{_BACKENDS}.mla.flashinfer_mla_sparse.FlashInferMLASparseTRTLLMMetadataBuilder": replace(
        _UPDATED, asked_for=True
    ),
    f"{_BACKENDS}.mla.indexer.DeepseekV32IndexerMetadataBuilder": _UPDATED,
    f"{_BACKENDS}.mla.sparse_swa.DeepseekSparseSWAMetadataBuilder": _UPDATED,
    f"{_BACKENDS}.flashinfer.FlashInferMetadataBuilder": Builder(passes=True, why="each build plans on the host"),
    f"{_BACKENDS}.flex_attention.FlexAttentionMetadataBuilder": Builder(
        why="each build makes its block mask again, in part from host values and temporary tensors"
    ),
    f"{_BACKENDS}.tree_attn.TreeAttentionMetadataBuilder": Builder(
        why="tree attention drafts several tokens a request and step"
    ),
}


_NEVER_RUN: Final = Builder(
    why=f"graphs over its TRTLLM kernels were never run; {gates.MORE_GRAPHS}=trtllm asks for them"
)
#: FlashInfer's decode kernels of TensorRT-LLM, by name. A decode batch's metadata names the batch's tensors (from 0.26
#: on), and for XQA a mask that depends only on the shape. XQA takes several tokens a request as a decode from 0.28 on.
_TRTLLM_KERNELS: Final = ("TRTLLM_GEN", "XQA")
_TRTLLM: Final = Builder(one_token=True, decode=True, asked_for=True)


def known(builder_class: type, *, by_its_word: bool = False) -> Builder:
    """Return what graphs may use of a builder class.

    The entry belongs to the class itself or to the base class that makes its metadata. With `by_its_word` a class that
    declares `SAME_AS_BASE` uses its base class's entry.
    """
    for cls in builder_class.__mro__:
        builder = BUILDERS.get(f"{cls.__module__}.{cls.__qualname__}")
        if builder is not None:
            return builder
        makes_metadata = any(name.lstrip("_").startswith("build") for name in vars(cls))
        if makes_metadata and not (by_its_word and vars(cls).get(SAME_AS_BASE, False)):
            break
    return _UNKNOWN


def builder_of(group: Any) -> Any:
    """Return the builder whose metadata a graph over an `AttentionGroup` holds.

    TRITON_FLASH_ATTN has a builder for steps with a part of an image, and a causal one for all other steps, which vLLM
    captures.
    """
    builder = group.get_metadata_builder(0)
    return getattr(builder, "causal_builder", builder)


def builders_of(attn_groups: Iterable[Iterable[Any]]) -> Iterator[Any]:
    """Return the builders of each KV cache group's `AttentionGroup`s, which exist."""
    return (builder_of(group) for groups in attn_groups for group in groups)


def refusing(builder_classes: Iterable[type], use: str) -> str | None:
    """Return the V1 drafter's builders without field `use`, with reasons, or None."""
    builders = {cls.__name__: known(cls, by_its_word=True) for cls in builder_classes}
    return _joined({name: builder.why for name, builder in builders.items() if not getattr(builder, use)})


def _of(builder: Any, causal: bool) -> Builder:
    """Return what V2 graphs may use; TRTLLM kernels by their switch."""
    kernel = getattr(builder, "flashinfer_trtllm_api_decode_kernel", None)
    if causal and getattr(kernel, "name", "") in _TRTLLM_KERNELS:
        entry = _TRTLLM
        if getattr(builder, "reorder_batch_threshold", 1) < 2:
            entry = replace(entry, decode=False, why="it takes several tokens of a request for a prompt")
    else:
        entry = known(type(builder))
    return _NEVER_RUN if entry.asked_for and not gates.asks_for("trtllm") else entry


def why_not_in_graph(
    attn_groups: Sequence[Sequence[Any]], use: str = "one_token", *, causal: bool = True
) -> str | None:
    """Return why no CUDA graph can make a draft's metadata, or None.

    Context parallelism is refused: it splits lengths over ranks, and nothing advances these between draft steps.

    Args:
        attn_groups: a speculator's `AttentionGroup`s for each KV cache group, whose builders exist.
        use: `one_token`; `chain` if a pass has more tokens per request than a decode: such metadata names only the
            batch's tensors, for any number of tokens.
        causal: whether no query of the draft sees later queries.
    """
    refused: dict[str, str] = {}
    for builder in builders_of(attn_groups):
        entry = _of(builder, causal)
        if not getattr(entry, use):
            refused[type(builder).__name__] = entry.why
        elif getattr(builder, "dcp_world_size", 1) > 1:
            refused[type(builder).__name__] = "decode context parallelism"
    return _joined(refused)


def updated_in_place(speculator: Any) -> bool:
    """Whether only vLLM's own update can make draft metadata in a graph.

    vLLM updates all builders or none, between the steps of a drafter that makes one token after the other.
    """
    builders = list(builders_of(getattr(speculator, "attn_groups", ())))
    entries = [_of(builder, causal=True) for builder in builders]
    return (
        hasattr(speculator, "_generate_fused_drafts")
        and any(entry.updated for entry in entries)
        and all(entry.updated or entry.one_token for entry in entries)
        and all(getattr(builder, "supports_draft_decode_metadata_update", False) for builder in builders)
        and all(getattr(builder, "dcp_world_size", 1) == 1 for builder in builders)
    )


def allows(builder: Any, use: str) -> bool:
    """Whether a graph can make a builder's metadata for a `Builder` field."""
    return bool(getattr(_of(builder, causal=True), use))


def longest_as_decode(builder: Any) -> int:
    """Return the most tokens of a decode in mixed graphs, or 0."""
    if not (known(type(builder)).short_prompts and gates.asks_for("mla-prompts")):
        return 0
    # Up to 0.30 a build does not get the graph's longest request, and the capture's batch has only short ones.
    told = "max_query_len" in inspect.signature(builder._build_decode).parameters
    return builder.reorder_batch_threshold if told else 0


def flash_versions(group: Any, compilation_config: Any) -> frozenset[int]:
    """Return the FlashAttention versions of an `AttentionGroup`'s layers, or nothing.

    Nothing: the builder is not vLLM's FLASH_ATTN's, which declares `UNIFORM_BATCH` for version 2, and up to 0.32 for
    version 4. vLLM's comment names the only obstacle: with a longest query of one token, version 2 packs the heads of a
    group into rows and drops the causal mask. A graph that is captured for more tokens per request reads all lengths on
    the device, and takes any batch.
    """
    if not is_flash_attn(type(builder_of(group))):
        return frozenset()
    layers = (compilation_config.static_forward_context.get(name) for name in group.layer_names)
    impls = (getattr(layer, "impl", None) for layer in layers)
    versions = (getattr(getattr(impl, "causal_impl", impl), "vllm_flash_attn_version", None) for impl in impls)
    return frozenset(0 if version is None else version for version in versions)


def computes_images_apart(attn_groups: Iterable[Iterable[Any]]) -> bool:
    """Whether another kernel computes steps with a part of an image."""
    return any(hasattr(group.get_metadata_builder(0), "causal_builder") for groups in attn_groups for group in groups)


def is_flash_attn(builder: type) -> bool:
    """Whether it is the builder of vLLM's FLASH_ATTN."""
    return f"{builder.__module__}.{builder.__qualname__}" == _FLASH_ATTN


def _joined(refused: Mapping[str, str]) -> str | None:
    return "; ".join(f"{name}: {refused[name]}" for name in sorted(refused)) or None
