# SPDX-License-Identifier: Apache-2.0
"""Why graphs of mixed batches cannot hold layers with a gated delta rule; `v2/delta_rule.py` makes their metadata."""

from __future__ import annotations

from typing import Any

from vllm_hwplugin.spec_decode.builders import builder_of


def is_delta_rule(builder: Any) -> bool:
    """Whether a builder is vLLM's `GDNAttentionMetadataBuilder`, and no subclass."""
    cls = type(builder)
    return f"{cls.__module__}.{cls.__qualname__}" == "vllm.v1.attention.backends.gdn_attn.GDNAttentionMetadataBuilder"


def why_no_delta_rule(runner: Any) -> str:
    """Return why gated delta rules have no mixed graphs, or ""."""
    groups = [group for groups in runner.attn_groups for group in groups if is_delta_rule(builder_of(group))]
    layers = runner.compilation_config.static_forward_context
    kinds = {type(layers.get(name)).__name__ for group in groups for name in group.layer_names}
    if others := kinds - {"QwenGatedDeltaNetAttention"}:
        return f"they are {', '.join(sorted(others))}"
    builders = [builder_of(group) for group in groups]
    if not all(hasattr(builder, "checkpoint_builder") for builder in builders):
        return "up to 0.31 they get other metadata"
    # `doctor --for` knows no builders.
    prefill = builders[0].gdn_prefill_backend if builders else _resolved_prefill(runner)
    if not prefill:
        return ""
    if runner.speculative_config is None:
        return "there is no drafter"
    if runner.max_num_reqs == 1:
        return "there is one request at a time"
    parallel = runner.vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        return "ranks of data parallelism do not know of each other's prompts"
    if parallel.pipeline_parallel_size > 1:
        return "some stages of a pipeline may have no such layer"
    if prefill != "triton":
        # FlashInfer's kernels may read the lengths of prompts on the host.
        return f"{prefill} computes their prompts; --gdn-prefill-backend triton gives these graphs"
    return ""


def _resolved_prefill(runner: Any) -> str:
    """Return what computes prompts of Qwen's gated delta rule, or ""."""
    text: Any = getattr(runner.model_config, "hf_text_config", None)
    if not (hasattr(text, "linear_key_head_dim") and str(text.model_type).startswith("qwen")):
        return ""
    from vllm.v1.attention.backends import gdn_attn

    if not hasattr(gdn_attn, "MambaPrefillCheckpointBuilder"):
        # Up to 0.31 there are no graphs with Triton either.
        return ""
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import _resolve_gdn_prefill_backend

    return str(_resolve_gdn_prefill_backend(runner.vllm_config)[1])
