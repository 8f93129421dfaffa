# SPDX-License-Identifier: Apache-2.0
"""Which drafters may run in FULL graphs, and for the others why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.config import CUDAGraphMode

from vllm_hwplugin.spec_decode.draft_builders import refusing
from vllm_hwplugin.spec_decode.first_pass import FirstPass

# The proposers whose `propose` is the patched one. A subclass that overrides a part of it has to be looked at first.
_KNOWN_PROPOSERS = frozenset({"EagleProposer", "DraftModelProposer"})


@dataclass(frozen=True)
class DrafterFacts:
    """What decides whether a drafter may run in FULL graphs; plain values, so that the decision needs no device.

    `attention` is why the draft layers' attention backends do not allow it, or None.
    """

    proposer: str
    target_mode: CUDAGraphMode
    covered: bool = True
    enforce_eager: bool = False
    padded_batch: bool = True
    data_parallel_size: int = 1
    context_parallel_size: int = 1
    lora: bool = False
    breakable_any_mode: bool = False
    shares_mtp_indices: bool = False
    attention: str | None = None


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
    if facts.breakable_any_mode:
        return "the draft model already runs in breakable CUDA graphs, which capture in every mode"
    if facts.shares_mtp_indices:
        return "the draft model shares top-k indices between steps by a host-side switch"
    return facts.attention


def facts_of(
    proposer: Any, target_mode: CUDAGraphMode, first: FirstPass, builders: frozenset[type] | None = None
) -> DrafterFacts:
    """The facts of one `SpecDecodeBaseProposer`.

    Args:
        builders: the classes of its attention metadata builders; None while they have not been made.
    """
    parallel = proposer.vllm_config.parallel_config
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
        breakable_any_mode="Breakable" in type(model).__name__ and getattr(model, "runtime_mode", None) is None,
        shares_mtp_indices=getattr(proposer, "_share_mtp_indices", False),
        attention=None if builders is None else _attention_obstacle(builders, first),
    )


def _attention_obstacle(builders: frozenset[type], first: FirstPass) -> str | None:
    if not builders:
        return "the drafter has no attention groups"
    refused = refusing(builders, "passes")
    if refused is not None:
        return f"no graph may hold the draft layers' attention ({refused})"
    refused = None if first.causal else refusing(builders, "non_causal")
    return None if refused is None else f"no graph may hold the draft layers' non-causal attention ({refused})"
