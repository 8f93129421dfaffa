# SPDX-License-Identifier: Apache-2.0
"""Which drafters may run in FULL graphs, and for the others why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config import CUDAGraphMode

from vllm_hwplugin.spec_decode.first_pass import FirstPass

#: Builders whose metadata is views of the batch's tensors: nothing is planned on the host, for any query length.
VIEW_ONLY_BUILDERS = frozenset({"FlashAttentionMetadataBuilder", "TritonAttentionMetadataBuilder"})

# The proposers whose `propose` is the patched one. A subclass that overrides a part of it has to be looked at first.
_KNOWN_PROPOSERS = frozenset({"EagleProposer", "DraftModelProposer"})


@dataclass(frozen=True)
class DrafterFacts:
    """What decides whether a drafter may run in FULL graphs; plain values, so that the decision needs no device."""

    proposer: str
    target_mode: CUDAGraphMode
    covered: bool = True
    enforce_eager: bool = False
    padded_batch: bool = True
    data_parallel_size: int = 1
    context_parallel_size: int = 1
    lora: bool = False
    tree_attention: bool = False
    breakable_any_mode: bool = False
    shares_mtp_indices: bool = False
    planning_builders: tuple[str, ...] = ()


def obstacle(facts: DrafterFacts) -> str | None:
    """Why this drafter runs as in stock vLLM, or None where it may use FULL graphs."""
    if not facts.covered:
        return f"{facts.proposer} has drafting code of its own that no live feature covers"
    if facts.enforce_eager:
        return "the speculative config asks for enforce_eager"
    if not facts.target_mode.has_full_cudagraphs():
        return f"the target's cudagraph_mode is {facts.target_mode.name}, and the drafter follows it"
    if not facts.padded_batch:
        return "disable_padded_drafter_batch gives the drafter batches of varying query length"
    if facts.data_parallel_size > 1:
        return "with data parallelism the ranks agree on a graph mode by token count alone"
    if facts.context_parallel_size > 1:
        return "decode context parallelism keeps per-rank lengths at changing addresses"
    if facts.lora:
        return "layers that the drafter shares with the target map tokens to LoRA adapters by the target's batch"
    if facts.tree_attention:
        return "tree attention drafts several tokens a request and step"
    if facts.breakable_any_mode:
        return "the draft model already runs in breakable CUDA graphs, which capture in every mode"
    if facts.shares_mtp_indices:
        return "the draft model shares top-k indices between steps by a host-side switch"
    if facts.planning_builders:
        return f"{', '.join(facts.planning_builders)} may plan non-causal queries on the host, out of a graph's reach"
    return None


def facts_of(proposer: Any, target_mode: CUDAGraphMode, first: FirstPass) -> DrafterFacts:
    """The facts of one `SpecDecodeBaseProposer`, once its attention backends are known."""
    parallel = proposer.vllm_config.parallel_config
    builders = {type(group.get_metadata_builder()).__name__ for group in proposer.draft_attn_groups}
    model = getattr(proposer, "model", None)
    cls = type(proposer)
    return DrafterFacts(
        proposer=cls.__name__,
        target_mode=target_mode,
        # A class whose own drafting code a feature has patched carries the mark itself; a subclass does not inherit it.
        covered=cls.__name__ in _KNOWN_PROPOSERS or "supports_sd_full_graph" in vars(cls),
        enforce_eager=proposer.speculative_config.enforce_eager,
        padded_batch=not proposer.speculative_config.disable_padded_drafter_batch,
        data_parallel_size=parallel.data_parallel_size,
        context_parallel_size=parallel.decode_context_parallel_size,
        lora=proposer.vllm_config.lora_config is not None,
        tree_attention=any("TreeAttention" in name for name in builders),
        breakable_any_mode="Breakable" in type(model).__name__ and getattr(model, "runtime_mode", None) is None,
        shares_mtp_indices=getattr(proposer, "_share_mtp_indices", False),
        planning_builders=() if first.causal else tuple(sorted(builders - VIEW_ONLY_BUILDERS)),
    )
