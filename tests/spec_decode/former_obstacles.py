# SPDX-License-Identifier: Apache-2.0
"""The obstacles as each feature had them by itself, for one comparison with the table that takes their place."""

# mypy: ignore-errors
from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Final

from vllm import envs
from vllm.model_executor.offloader.base import NoopOffloader, get_offloader
from vllm.v1.sample import logits_processor
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState

from vllm_hwplugin.spec_decode.builders import host_work, known, refusing, why_not_in_graph
from vllm_hwplugin.spec_decode.v1.draft_facts import builder_classes, chain_facts

NO_DRAFTS: Final = "this worker does not draft"
STAGES: Final = "stages of a pipeline exchange tokens in the host's order"
CONTEXT: Final = "the context is split among ranks"
EXPERTS: Final = "experts are counted on the host in each step"
ADAPTERS: Final = "adapters (LoRA) change from batch to batch"
ENCODER: Final = "the model has an encoder"
EMBEDDINGS: Final = "prompts may be embeddings"
POSITIONS: Final = "positions have several dimensions"
OFFLOADED: Final = "weights are loaded from the host in each step"
VERIFIED: Final = "how many drafts are verified changes from step to step"
NAN_LOGITS: Final = "VLLM_COMPUTE_NANS_IN_LOGITS is set"


def first(obstacles: Mapping[str, object]) -> str | None:
    """The first of these reasons that holds, or None."""
    return next((reason for reason, holds in obstacles.items() if holds), None)


def offloads() -> bool:
    """Whether weights of this process's model lie on the host."""
    return not isinstance(get_offloader(), NoopOffloader)


obstacles = types.SimpleNamespace(**globals())
_METHODS: Final = ("eagle", "eagle3", "mtp", "dflash")
_SPECULATORS: Final = ("EagleSpeculator", "MTPSpeculator", "DFlashSpeculator")
_LOGITS_PROCESSORS: Final = ("LogitBiasState", "PenaltiesState", "BadWordsState")


def tail_obstacle(runner: Any) -> str | None:
    """Why the tail of this runner's steps cannot be recorded; None where it can.

    Args:
        runner: a `GPUModelRunner` of Model Runner V2 that has its KV cache.
    """
    speculator = runner.speculator
    if speculator is None or runner.rejection_sampler is None:
        return obstacles.NO_DRAFTS
    method = speculator.speculative_config.method
    if method not in _METHODS:
        return f"the speculative method is {method}"
    if type(speculator).__name__ not in _SPECULATORS:
        return f"{type(speculator).__name__} drafts in a way of its own"
    return (
        _engine(runner)
        or _sampling(runner)
        or _drafting(speculator)
        or _first_pass(runner)
        or why_not_in_graph(speculator.attn_groups)
    )


def _first_pass(runner: Any) -> str | None:
    """The drafter's first pass reads metadata of the target's builders, and the graph does not make that again."""
    drafting = {name for groups in runner.speculator.attn_groups for group in groups for name in group.layer_names}
    for builder in (
        group.get_metadata_builder(0)
        for groups in runner.attn_groups
        for group in groups
        if not drafting.isdisjoint(group.layer_names)
    ):
        if known(type(builder)).planned_by_kernel:
            return f"{type(builder).__name__}: the first pass's plan is made by its first kernel, once"
    return None


def _engine(runner: Any) -> str | None:
    parallel, state = runner.vllm_config.parallel_config, type(runner.model_state)
    return obstacles.first(
        {
            "ranks of data parallelism agree on each step on the host": parallel.data_parallel_size > 1,
            obstacles.STAGES: runner.use_pp,
            obstacles.CONTEXT: runner.use_dcp or getattr(runner, "pcp_manager", None) is not None,
            obstacles.EXPERTS: parallel.enable_eplb,
            obstacles.ADAPTERS: runner.lora_config is not None,
            obstacles.ENCODER: runner.is_encoder_decoder,
            f"{state.__name__} has work of its own after each step": (
                state.postprocess_state is not ModelState.postprocess_state
            ),
            obstacles.OFFLOADED: obstacles.offloads(),
        }
    )


def _sampling(runner: Any) -> str | None:
    if runner.sampler.compute_nans:
        return obstacles.NAN_LOGITS
    for name, words in (
        ("adaptive_verification", obstacles.VERIFIED),
        ("batch_sharder", "ranks sample a part of the batch each"),
        ("aux_output_connector", "hidden states leave the engine in each step"),
    ):
        if getattr(runner, name, None) is not None:
            return words
    if "Watermark" in type(runner.sampler).__name__:
        return "samples are watermarked"
    # From 0.31 on; an installed package brings some without being asked.
    processors = (type(one).__name__ for one in getattr(runner.sampler, "logits_processors", ()))
    custom = sorted({name for name in processors if name not in _LOGITS_PROCESSORS})
    if custom:
        return f"there are custom logits processors: {', '.join(custom)}"
    if getattr(runner.sampler, "return_sampling_mask", False):
        return "each step's sampling masks leave the engine, as large as the batch's top-k needs them"
    return None


def _drafting(speculator: Any) -> str | None:
    if speculator.speculative_config.uses_dynamic_speculative_decoding():
        return "the number of drafts changes from step to step"
    if getattr(speculator, "acceptance_estimator", None) is not None:
        return "acceptance is estimated in each step"
    return None


def recorded_inputs_obstacle(runner: Any) -> str | None:
    """Why the inputs of this runner's steps cannot be recorded; None where they can.

    Args:
        runner: a `GPUModelRunner` whose tail graphs exist.
    """
    for builder in (group.get_metadata_builder(0) for groups in runner.attn_groups for group in groups):
        if (reason := host_work(builder)) is not None:
            return reason
    if runner.supports_mm_inputs:
        return "the model takes images or the like"
    if type(runner.model_state) is not DefaultModelState:
        return f"{type(runner.model_state).__name__} has work of its own before each step"
    config = runner.model_config
    if config.uses_mrope or getattr(config, "uses_xdrope_dim", 0):
        return obstacles.POSITIONS
    if getattr(config, "rswa_window", None) is not None:
        return "attention windows depend on the length of prompts"
    return None


def draft_phase_obstacle(runner: Any) -> str | None:
    """Why drafting cannot be recorded for this runner, whose drafter has graphs of its passes; None where it can.

    Args:
        runner: a `GPUModelRunner` of V1.
    """
    spec = runner.speculative_config
    if spec.method not in _METHODS:
        return f"the speculative method is {spec.method}"
    return _phase_engine(runner) or _drafter(runner.drafter, spec)


def _phase_engine(runner: Any) -> str | None:
    parallel = runner.vllm_config.parallel_config
    return obstacles.first(
        {
            obstacles.STAGES: parallel.pipeline_parallel_size > 1,
            obstacles.EXPERTS: parallel.enable_eplb,
            "batches are split in two": parallel.use_ubatching,
            obstacles.ENCODER: runner.model_config.is_encoder_decoder,
            obstacles.EMBEDDINGS: runner.enable_prompt_embeds,
            obstacles.OFFLOADED: obstacles.offloads(),
            "the target has other states for its drafter": hasattr(runner.get_model(), "get_mtp_target_hidden_states"),
        }
    )


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
        return obstacles.NAN_LOGITS
    own = logits_processor.__name__
    foreign = [type(one).__name__ for one in runner.input_batch.logitsprocs.all if not _is_within(type(one), own)]
    return f"there are custom logits processors: {', '.join(foreign)}" if foreign else None


def _is_within(cls: type, package: str) -> bool:
    return cls.__module__ == package or cls.__module__.startswith(f"{package}.")


def step_inputs_obstacle(runner: Any) -> str | None:
    """Why the inputs of this runner's steps cannot come from the step before; None where they can.

    Args:
        runner: a V1 `GPUModelRunner` that has its KV cache.
    """
    speculative = runner.speculative_config
    if speculative is None or not hasattr(runner, "drafter"):
        return obstacles.NO_DRAFTS
    parallel, model = runner.vllm_config.parallel_config, runner.model_config
    mamba = runner.cache_config.mamba_cache_mode
    return obstacles.first(
        {
            obstacles.VERIFIED: speculative.method == "ngram_gpu",
            obstacles.STAGES: parallel.pipeline_parallel_size > 1,
            obstacles.CONTEXT: (runner.dcp_world_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1),
            obstacles.ADAPTERS: runner.lora_config is not None,
            obstacles.ENCODER: model.is_encoder_decoder,
            obstacles.POSITIONS: runner.uses_mrope or getattr(runner, "uses_xdrope_dim", 0),
            obstacles.EMBEDDINGS: runner.enable_prompt_embeds,
            f"mamba_cache_mode is {mamba}, whose states are moved on the host": model.is_hybrid and mamba != "none",
        }
    )


def metadata_obstacle(runner: Any) -> str | None:
    """Why each step of such an engine needs attention metadata from vLLM; None where it may have the last step's.

    Args:
        runner: as above.
    """
    for builder in (group.get_metadata_builder(0) for groups in runner.attn_groups for group in groups):
        if (reason := host_work(builder)) is not None:
            return reason
        if getattr(builder, "aot_schedule", False) and builder.aot_sliding_window not in (None, (-1, -1)):
            return "a schedule for windows depends on the longest sequence"
    if runner.vllm_config.parallel_config.data_parallel_size > 1:
        return "ranks of data parallelism agree on the size of each step"
    if runner.is_mm_prefix_lm or getattr(runner.model_config, "rswa_window", None) is not None:
        return "which keys are seen depends on prompts"
    if runner.cache_config.kv_sharing_fast_prefill:
        return "layers that share a KV cache have metadata of their own"
    if getattr(runner, "routed_experts_initialized", False):
        return "slots are copied to the host in each step"
    if any(hasattr(runner.drafter, f"set_per_group_{one}") for one in ("attn_metadata", "block_table")):
        return "the drafter has metadata of each KV cache group"
    return None
