# SPDX-License-Identifier: Apache-2.0
"""Which attention metadata builders a CUDA graph of a draft, or of a step's inputs, may have.

A captured kernel reads the tensors that its metadata named at capture, and what a build does on the host is done once.

- *A pass* of a V1 drafter. Before each launch of its graph the drafter calls `build_for_drafting` again, on a batch
  padded to the graph's shape, so what a builder keeps in buffers of its own may change from launch to launch. Capture
  takes `build_for_drafting` as well, never `build_for_cudagraph_capture`: a graph needs the metadata of the call that
  will refresh it. FLASH_ATTN's capture call plans a schedule into a buffer (`fast_build` is False there) that no later
  `build_for_drafting` would write; the others' overrides only choose lengths for a quick capture.
- *A chain* of a V1 drafter's passes in one graph. Nothing is built between them, so the metadata may name nothing but
  the batch's tensors, which the chain itself advances.
- *One token* a request, in a graph that makes the metadata of each step itself, by vLLM's own `build`. All that the
  build takes from the host is the graph's shape, or the model's longest sequence in place of the batch's. It copies
  nothing from the host to the device, because a replay would read memory that was freed long ago, and it never waits
  for the device.
- *A decode batch*, the same for several tokens a request: only lengths, slots and block tables change from step to
  step.
- *Prompts*, the same for a batch of any mix: a graph that is captured for a longest request of all its tokens.
  `AttentionCGSupport.ALWAYS` does not say so: from 0.31 on FLASHINFER_MLA declares it for any mix of 1 to 1 + k tokens,
  and its capture of a longer request raises.

From 0.28 on a builder may say that vLLM's own update brings its metadata of one token a request up to date on the
device. For sparse MLA and its indexer a graph of draft steps has that update in it, and metadata that was built before
(`updated_in_place`); they say so in 0.32, where they were read.

For passes and chains each class was read in vLLM 0.20.2, 0.26.0 and 0.32.0, for the others in the last release of each
minor version from 0.20 to 0.33. A class that is not listed, or that overrides what was read, gets no graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vllm_hwplugin import gates

#: What a builder class says of itself where a drafter's passes may take it for its base class: it overrides methods
#: that make metadata, but lets its base class make it.
SAME_AS_BASE: Final = "same_metadata_as_base"


@dataclass(frozen=True)
class Builder:
    """What graphs may have of one builder class.

    Attributes:
        passes: one pass of a V1 drafter, with a build before each launch.
        chain: several of them, with no build in between.
        non_causal: either of these with queries that see later ones.
        one_token: the build itself, of a batch with one token a request.
        decode: the same with several.
        prompts: the same with any mix of prompts and decodes, where the class also declares `ALWAYS`.
        updated: metadata of one token a request that vLLM's own update brings up to date on the device, wherever the
            builder says so (`supports_draft_decode_metadata_update`).
        why: why no more than that.
    """

    passes: bool = False
    chain: bool = False
    non_causal: bool = False
    one_token: bool = False
    decode: bool = False
    prompts: bool = False
    updated: bool = False
    why: str = ""


_BACKENDS: Final = "vllm.v1.attention.backends"
# The batch's tensors; FlashAttention 3 puts a kernel's schedule into one tensor of the builder's, which is long enough
# for every graph. `fast_build`, which drafting asks for, leaves it out.
_VIEWS: Final = Builder(passes=True, chain=True, non_causal=True, one_token=True, decode=True, prompts=True)
_UPDATED: Final = Builder(updated=True, why="its build works on the host, and here vLLM cannot update what it made")
_UNKNOWN: Final = Builder(why="it is not among the builders whose metadata is known to suit a graph")

BUILDERS: Final[Mapping[str, Builder]] = {
    f"{_BACKENDS}.flash_attn.FlashAttentionMetadataBuilder": _VIEWS,
    # Only refuses what it has no kernel for.
    "vllm_hwplugin.attention.cuda.CudaFlashAttentionMetadataBuilder": _VIEWS,
    # A drafter's batches (`build_for_drafting`) have neither a schedule nor keys beside the cache; where others have
    # schedules of its own it says so (`makes_schedules`). It declares UNIFORM_BATCH.
    "vllm_hwplugin.musa.attention.MusaFlashAttentionMetadataBuilder": _VIEWS,
    f"{_BACKENDS}.triton_attn.TritonAttentionMetadataBuilder": _VIEWS,
    f"{_BACKENDS}.mla.flashattn_mla.FlashAttnMLAMetadataBuilder": Builder(
        passes=True, one_token=True, decode=True, why="each build plans a schedule into one buffer of the builder's"
    ),
    # Not as vLLM's FLASHMLA: each build has a kernel plan, in tensors of the builder's.
    "vllm_hwplugin.musa.mla.MusaFlashMLAMetadataBuilder": Builder(
        passes=True, one_token=True, decode=True, why="each build makes a plan in tensors of the builder's"
    ),
    f"{_BACKENDS}.mla.flashmla.FlashMLAMetadataBuilder": Builder(
        passes=True,
        one_token=True,
        why="each build makes a plan, which its first kernel or a buffer of the builder's holds",
    ),
    # All requests of a step are decodes, of which these name the batch's tensors (FLASHINFER_MLA itself from 0.31 on).
    # TRITON_MLA in all versions, CUTLASS_MLA and TOKENSPEED_MLA add nothing to the common builder.
    f"{_BACKENDS}.mla.flashinfer_mla.FlashInferMLAMetadataBuilder": Builder(
        passes=True, one_token=True, decode=True, why="a chain over it was never run"
    ),
    "vllm.model_executor.layers.attention.mla_attention.MLACommonMetadataBuilder": Builder(
        passes=True, one_token=True, decode=True, why="a chain over it was never run"
    ),
    # Their builds work on the host. The update of each writes all of a decode step's metadata anew, from lengths and
    # block tables on the device, into tensors that the metadata names.
    f"{_BACKENDS}.mla.flashattn_mla_sparse.FlashAttnMLASparseMetadataBuilder": _UPDATED,
    f"{_BACKENDS}.mla.indexer.DeepseekV32IndexerMetadataBuilder": _UPDATED,
    f"{_BACKENDS}.mla.sparse_swa.DeepseekSparseSWAMetadataBuilder": _UPDATED,
    f"{_BACKENDS}.flashinfer.FlashInferMetadataBuilder": Builder(passes=True, why="each build plans on the host"),
    f"{_BACKENDS}.flex_attention.FlexAttentionMetadataBuilder": Builder(
        why="each build makes its block mask anew, in part from host values and temporary tensors"
    ),
    f"{_BACKENDS}.tree_attn.TreeAttentionMetadataBuilder": Builder(
        why="tree attention drafts several tokens a request and step"
    ),
}


#: FlashInfer's on TRTLLM kernels, by the gate of these: a decode batch's names the batch's tensors (from 0.26 on).
_TRTLLM: Final = {
    True: Builder(one_token=True, decode=True),
    False: Builder(why="graphs over its TRTLLM kernels were never run; VLLM_HWPLUGIN_TRTLLM_GRAPHS=1 asks for them"),
}


def known(builder_class: type, *, by_its_word: bool = False) -> Builder:
    """What graphs may have of a builder class, by its own entry or by that of the base class that makes its metadata.

    Args:
        by_its_word: whether a class that declares `SAME_AS_BASE` is taken for its base class.
    """
    for cls in builder_class.__mro__:
        found = BUILDERS.get(f"{cls.__module__}.{cls.__qualname__}")
        if found is not None:
            return found
        makes_metadata = any(name.lstrip("_").startswith("build") for name in vars(cls))
        if makes_metadata and not (by_its_word and vars(cls).get(SAME_AS_BASE, False)):
            break
    return _UNKNOWN


def builders_of(attn_groups: Iterable[Iterable[Any]]) -> Iterator[Any]:
    """Those of each KV cache group's `AttentionGroup`s, which exist."""
    return (group.get_metadata_builder(0) for groups in attn_groups for group in groups)


def refusing(builder_classes: Iterable[type], what: str) -> str | None:
    """The builders of a V1 drafter that do not allow `what` (a field of `Builder`), each with its reason, or None."""
    found = {cls.__name__: known(cls, by_its_word=True) for cls in builder_classes}
    return _joined({name: builder.why for name, builder in found.items() if not getattr(builder, what)})


def _of(builder: Any, causal: bool) -> Builder:
    """What graphs of Model Runner V2 may have of a builder. FlashInfer plans on the host only for its other kernels."""
    kernel = getattr(builder, "flashinfer_trtllm_api_decode_kernel", None)
    if causal and getattr(kernel, "name", "") == "TRTLLM_GEN":
        return _TRTLLM[gates.read("VLLM_HWPLUGIN_TRTLLM_GRAPHS").flag]
    return known(type(builder))


def why_not_in_graph(
    attn_groups: Sequence[Sequence[Any]], what: str = "one_token", *, causal: bool = True
) -> str | None:
    """Why the metadata of a draft's passes cannot be made inside a CUDA graph, or None where it can.

    Context parallelism is left out: it splits lengths over ranks, and nothing advances these between draft steps.

    Args:
        attn_groups: a speculator's, for each KV cache group its `AttentionGroup`s, whose builders exist.
        what: `one_token`, or `chain` where a pass has more tokens a request than a decode, too: such metadata names
            the batch's tensors alone, however many these are.
        causal: whether no query of the draft sees later ones.
    """
    refused: dict[str, str] = {}
    for builder in builders_of(attn_groups):
        found = _of(builder, causal)
        if not getattr(found, what):
            refused[type(builder).__name__] = found.why
        elif getattr(builder, "dcp_world_size", 1) > 1:
            refused[type(builder).__name__] = "decode context parallelism"
        elif getattr(builder, "makes_schedules", False):
            refused[type(builder).__name__] = "its schedules are made for the batches that Model Runner V1 shows it"
    return _joined(refused)


def updated_in_place(speculator: Any) -> bool:
    """Whether no graph may build the metadata of a draft's steps, and vLLM's own update in it makes up for that.

    vLLM updates all or none, between the steps of a drafter that makes one token after the other.
    """
    found = list(builders_of(getattr(speculator, "attn_groups", ())))
    entries = [known(type(builder)) for builder in found]
    return (
        hasattr(speculator, "_generate_fused_drafts")
        and any(entry.updated for entry in entries)
        and all(entry.updated or entry.one_token for entry in entries)
        and all(getattr(builder, "supports_draft_decode_metadata_update", False) for builder in found)
        and not any(getattr(builder, "makes_schedules", False) for builder in found)
        and all(getattr(builder, "dcp_world_size", 1) == 1 for builder in found)
    )


def serves_prompts(builder: Any) -> bool:
    """Whether a graph can make the metadata of a batch with prompts in place of this builder."""
    return _of(builder, causal=True).prompts


def host_work(builder: Any) -> str | None:
    """Why a graph cannot make the metadata of a decode batch in place of this builder; None where it can."""
    if not _of(builder, causal=True).decode or getattr(builder, "makes_schedules", False):
        return f"{type(builder).__name__} may make metadata on the host"
    return None


def _joined(refused: Mapping[str, str]) -> str | None:
    return "; ".join(f"{name}: {refused[name]}" for name in sorted(refused)) or None
