# SPDX-License-Identifier: Apache-2.0
"""Which engines of Model Runner V1 have to prepare every step anew, and why."""

from __future__ import annotations

from typing import Any

from vllm_hwplugin.spec_decode.builders import host_work


def step_inputs_obstacle(runner: Any) -> str | None:
    """Why the inputs of this runner's steps cannot come from the step before; None where they can.

    Args:
        runner: a V1 `GPUModelRunner` that has its KV cache.
    """
    speculative = runner.speculative_config
    if speculative is None or not hasattr(runner, "drafter"):
        return "this worker does not draft"
    if speculative.method == "ngram_gpu":
        return "how many drafts are verified changes from step to step"
    config = runner.vllm_config
    if config.parallel_config.pipeline_parallel_size > 1:
        return "stages of a pipeline exchange tokens on the host's order"
    if runner.dcp_world_size > 1 or getattr(config.parallel_config, "prefill_context_parallel_size", 1) > 1:
        return "the context is split among ranks"
    if runner.lora_config is not None:
        return "adapters (LoRA) change from batch to batch"
    if runner.model_config.is_encoder_decoder:
        return "the model has an encoder"
    if runner.uses_mrope or getattr(runner, "uses_xdrope_dim", 0):
        return "positions have several dimensions"
    if runner.enable_prompt_embeds:
        return "prompts may be embeddings"
    if runner.model_config.is_hybrid and runner.cache_config.mamba_cache_mode != "none":
        return f"mamba_cache_mode is {runner.cache_config.mamba_cache_mode}, whose states are moved on the host"
    return None


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
