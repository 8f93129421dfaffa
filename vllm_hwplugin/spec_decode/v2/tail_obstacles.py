# SPDX-License-Identifier: Apache-2.0
"""Which engines the graphs of a step's tail are not for, and why."""

from __future__ import annotations

from typing import Any, Final

from vllm.model_executor.offloader.base import NoopOffloader, get_offloader
from vllm.v1.worker.gpu.model_states.interface import ModelState

from vllm_hwplugin.spec_decode.builders import known, why_not_in_graph

#: The methods whose `propose` the feature's hunks are in.
_METHODS: Final = ("eagle", "eagle3", "mtp", "dflash")
#: The speculators of these methods that draft by that `propose` and nothing else: later versions have more.
_SPECULATORS: Final = ("EagleSpeculator", "MTPSpeculator", "DFlashSpeculator")
#: Those of vLLM's sampler: they do nothing for a request that asks for nothing of theirs.
_LOGITS_PROCESSORS: Final = ("LogitBiasState", "PenaltiesState", "BadWordsState")


def tail_obstacle(runner: Any) -> str | None:
    """Why the tail of this runner's steps cannot be recorded; None where it can.

    Args:
        runner: a `GPUModelRunner` of Model Runner V2 that has its KV cache.
    """
    speculator = runner.speculator
    if speculator is None or runner.rejection_sampler is None:
        return "this worker does not draft"
    method = speculator.speculative_config.method
    if method not in _METHODS:
        return f"the speculative method is {method}"
    if type(speculator).__name__ not in _SPECULATORS:
        return f"{type(speculator).__name__} drafts in a way of its own"
    return (
        _parallel(runner)
        or _model(runner)
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


def _parallel(runner: Any) -> str | None:
    parallel = runner.vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        return "ranks of data parallelism agree on each step on the host"
    if runner.use_pp:
        return "stages of a pipeline exchange tokens on the host's order"
    if runner.use_dcp or getattr(runner, "pcp_manager", None) is not None:
        return "the context is split among ranks"
    if parallel.enable_eplb:
        return "experts are counted on the host in each step"
    return None


def _model(runner: Any) -> str | None:
    if runner.lora_config is not None:
        return "adapters (LoRA) change from batch to batch"
    if runner.is_encoder_decoder:
        return "the model has an encoder"
    if type(runner.model_state).postprocess_state is not ModelState.postprocess_state:
        return f"{type(runner.model_state).__name__} has work of its own after each step"
    if not isinstance(get_offloader(), NoopOffloader):
        return "weights are loaded from the host in each step"
    return None


def _sampling(runner: Any) -> str | None:
    if runner.sampler.compute_nans:
        return "VLLM_COMPUTE_NANS_IN_LOGITS is set"
    for name, words in (
        ("adaptive_verification", "how many drafts are verified changes from step to step"),
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
