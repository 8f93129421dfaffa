# SPDX-License-Identifier: Apache-2.0
"""The plain facts by which `draft_decision` decides, read off a `SpecDecodeBaseProposer`."""

from __future__ import annotations

import dis
from typing import Any, Final

from vllm.config import CUDAGraphMode, KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from vllm_hwplugin.spec_decode.builders import refusing
from vllm_hwplugin.spec_decode.v1.draft_buffers import rows_held
from vllm_hwplugin.spec_decode.v1.draft_decision import BatchFacts, CaptureFacts, ChainFacts, DrafterFacts, FirstPass

# The proposers whose `propose` is the patched one. A subclass that overrides a part of it has to be looked at first.
_KNOWN_PROPOSERS = frozenset({"EagleProposer", "DraftModelProposer"})
# Where one of these is set, a proposer does something on the host between its one-token steps.
_HOST_WORK = (
    "supports_mm_inputs",
    "uses_mrope",
    "draft_uses_xdrope_dim",
    "constant_draft_positions",
    "use_heterogeneous_vocab",
    "use_local_argmax_reduction",
    "allowed_attn_types",
    "eplb_state",
)

_HOOKS: Final = ("wait_for_layer_load", "save_kv_layer")
_ANSWER: Final = "requires_piecewise_for_cudagraph"
#: What Python makes of a method without statements. A decorated one has its decorator's, which call it.
_NOTHING: Final = frozenset(("RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"))


def drafter_facts(proposer: Any, target_mode: CUDAGraphMode) -> DrafterFacts:
    """What is known of `proposer` once its target resolved to `target_mode`."""
    parallel = proposer.vllm_config.parallel_config
    model = getattr(proposer, "model", None)
    cls = type(proposer)
    return DrafterFacts(
        proposer=cls.__name__,
        target_mode=target_mode.name,
        target_has_graphs=target_mode.has_full_cudagraphs(),
        # DFlash's is the patched one where a hunk has given it graphs of the context.
        covered=cls.__name__ in _KNOWN_PROPOSERS
        or (cls.__name__ == "DFlashProposer" and hasattr(proposer, "draft_context")),
        enforce_eager=proposer.speculative_config.enforce_eager,
        padded_batch=not proposer.speculative_config.disable_padded_drafter_batch,
        data_parallel_size=parallel.data_parallel_size,
        context_parallel_size=parallel.decode_context_parallel_size,
        lora=proposer.vllm_config.lora_config is not None,
        breakable_any_mode="Breakable" in type(model).__name__ and getattr(model, "runtime_mode", None) is None,
        shares_mtp_indices=getattr(proposer, "_share_mtp_indices", False),
        prompts_by_layer=(
            working_by_layer(proposer.vllm_config.kv_transfer_config)
            if proposer.speculative_config.use_dflash()
            else None
        ),
    )


def batch_facts(proposer: Any, target_mode: CUDAGraphMode) -> BatchFacts:
    """What decides which batches of `proposer` can have graphs."""
    config = proposer.vllm_config
    return BatchFacts(
        capture_sizes=tuple(config.compilation_config.cudagraph_capture_sizes or ()),
        mixed=target_mode.mixed_mode() == CUDAGraphMode.FULL,
        num_speculative_tokens=proposer.speculative_config.num_speculative_tokens,
        first=first_pass_of(proposer),
        max_num_seqs=config.scheduler_config.max_num_seqs,
        parallel_drafting=proposer.parallel_drafting,
    )


def capture_facts(proposer: Any, first: FirstPass, template: Any) -> CaptureFacts:
    """What is known of `proposer` once the runner captures the target's graphs.

    Args:
        template: the `CommonAttentionMetadata` that the runner built for the drafter's KV-cache group, or None.
    """
    thresholds = [group.get_metadata_builder().reorder_batch_threshold for group in proposer.draft_attn_groups]
    return CaptureFacts(
        attention=_attention_obstacle(builder_classes(proposer), first),
        decode_threshold=min((threshold for threshold in thresholds if threshold is not None), default=None),
        table_rows=None if template is None else rows_held(template.block_table_tensor),
    )


def chain_facts(proposer: Any) -> ChainFacts:
    """What decides whether the one-token steps of `proposer`, which has attention groups, may be one graph."""
    return ChainFacts(
        num_speculative_tokens=proposer.speculative_config.num_speculative_tokens,
        attention=refusing(builder_classes(proposer), "chain"),
        parallel_drafting=proposer.parallel_drafting,
        # DeepSeek V4's MTP passes several residual streams on, side by side.
        expanded_hidden_states=proposer.hidden_size != proposer.draft_model_config.get_hidden_size(),
        host_side=tuple(name for name in _HOST_WORK if getattr(proposer, name, None)),
    )


def builder_classes(proposer: Any) -> frozenset[type]:
    """The classes of a proposer's metadata builders; empty until its `initialize_attn_backend` made them."""
    return frozenset(type(group.get_metadata_builder()) for group in proposer.draft_attn_groups)


def _attention_obstacle(builders: frozenset[type], first: FirstPass) -> str | None:
    if not builders:
        return "the drafter has no attention groups"
    refused = refusing(builders, "passes")
    if refused is not None:
        return f"no graph may hold the draft layers' attention ({refused})"
    refused = None if first.causal else refusing(builders, "non_causal")
    return None if refused is None else f"no graph may hold the draft layers' non-causal attention ({refused})"


def first_pass_of(proposer: Any) -> FirstPass:
    """The first pass of a `SpecDecodeBaseProposer`."""
    num_speculative_tokens = proposer.speculative_config.num_speculative_tokens
    if proposer.speculative_config.use_dflash():
        return FirstPass(
            query_len=1 + num_speculative_tokens,
            max_tokens=proposer.max_query_tokens,
            always_uniform=True,
            # Before 0.23.0 vLLM knows non-causal drafts alone.
            causal=getattr(proposer, "dflash_causal", False),
            tokens_only=True,
        )
    return FirstPass(
        query_len=1 + num_speculative_tokens + proposer.net_num_new_slots_per_request,
        max_tokens=min(proposer.max_num_tokens, proposer.max_positions),
    )


def working_by_layer(transfer: KVTransferConfig | None) -> str | None:
    """The name of the KV connector's class that may load or save keys at each layer, or None.

    vLLM asks a connector before and after each attention layer, on the host. A captured pass skips that. A connector
    that needs it can say so, and vLLM then has no FULL graphs; not all connectors say so.

    Args:
        transfer: vLLM's `kv_transfer_config`, of an engine with FULL graphs.
    """
    if transfer is None:
        return None
    cls: Any = KVConnectorFactory.get_connector_class(transfer)
    name: str = cls.__name__
    if name == "MultiConnector":
        parts = transfer.kv_connector_extra_config.get("connectors", ())
        return next((found for part in parts if (found := working_by_layer(KVTransferConfig(**part)))), None)
    if any(_ANSWER in vars(base) for base in cls.__mro__ if base is not KVConnectorBase_V1):
        # It was asked, and works in another way with these options.
        return None
    return None if all(_does_nothing(getattr(cls, hook)) for hook in _HOOKS) else name


def _does_nothing(method: Any) -> bool:
    code = getattr(method, "__code__", None)
    return code is not None and all(one.opname in _NOTHING for one in dis.get_instructions(code))
