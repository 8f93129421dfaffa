# SPDX-License-Identifier: Apache-2.0
"""Which engines of the V1 runner the graphs of a draft phase are not for, and why."""

from __future__ import annotations

from typing import Any, Final

from vllm import envs
from vllm.model_executor.offloader.base import NoopOffloader, get_offloader
from vllm.v1.sample import logits_processor

from vllm_hwplugin.spec_decode.builders import refusing
from vllm_hwplugin.spec_decode.v1.draft_facts import builder_classes, chain_facts

_METHODS: Final = ("eagle", "eagle3", "mtp", "dflash")


def draft_phase_obstacle(runner: Any) -> str | None:
    """Why drafting cannot be recorded for this runner, whose drafter has graphs of its passes; None where it can.

    Args:
        runner: a `GPUModelRunner` of V1.
    """
    spec = runner.speculative_config
    if spec.method not in _METHODS:
        return f"the speculative method is {spec.method}"
    return _engine(runner) or _drafter(runner.drafter, spec)


def _engine(runner: Any) -> str | None:
    parallel = runner.vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "stages of a pipeline exchange tokens on the host's order"
    if parallel.enable_eplb:
        return "experts are counted on the host in each step"
    if parallel.use_ubatching:
        return "batches are split in two"
    if runner.model_config.is_encoder_decoder:
        return "the model has an encoder"
    if runner.enable_prompt_embeds:
        return "prompts may be embeddings"
    if not isinstance(get_offloader(), NoopOffloader):
        return "weights are loaded from the host in each step"
    if hasattr(runner.get_model(), "get_mtp_target_hidden_states"):
        return "the target has other states for its drafter"
    return None


def _drafter(proposer: Any, spec: Any) -> str | None:
    needed = getattr(proposer, "draft_context" if spec.use_dflash() else "draft_loop", None)
    if needed is not None and needed.failed:
        return "recording the graphs that it is built on failed"
    facts = chain_facts(proposer)
    if facts.host_side:
        return f"the drafter does host work between steps: {', '.join(facts.host_side)}"
    refused = refusing(builder_classes(proposer), "chain")
    if refused is not None:
        return f"metadata has to be built in each step ({refused})"
    # From 0.32 on, where a backend needs smaller blocks than the KV cache's, as it may in hybrids.
    if any(getattr(group, "kernel_block_size", None) is not None for group in proposer.draft_attn_groups):
        return "block tables of the draft layers are made anew in each step"
    if spec.use_dflash():
        return None
    if proposer.needs_extra_input_slots:
        return "the drafter has tokens of its own in its first pass"
    if spec.num_speculative_tokens > 1 and not hasattr(proposer, "draft_loop"):
        return "it needs draft-loop-graph's graphs"
    return None


def sampling_obstacle(runner: Any) -> str | None:
    """Why vLLM has to sample, although drafting can be recorded; None where that can be recorded as well."""
    if envs.VLLM_COMPUTE_NANS_IN_LOGITS:
        return "VLLM_COMPUTE_NANS_IN_LOGITS is set"
    own = logits_processor.__name__
    foreign = [type(one).__name__ for one in runner.input_batch.logitsprocs.all if not _is_within(type(one), own)]
    return f"there are custom logits processors: {', '.join(foreign)}" if foreign else None


def _is_within(cls: type, package: str) -> bool:
    return cls.__module__ == package or cls.__module__.startswith(f"{package}.")
