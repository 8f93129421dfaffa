# SPDX-License-Identifier: Apache-2.0
"""Draft without logits of the target's vocabulary, by vLLM's local argmax (Model Runner V2).

vLLM's `get_top_tokens` takes the argmax of a rank's own logits, exchanges one value and one token per rank, and maps
the token. vLLM calls it only if `use_local_argmax_reduction` is set. This module sets it if both ways draft the same
tokens ("Draft vocabularies" in docs/model-runner-v2.md).

Of equal logits both ways take the first, so the mapping must keep the order of tokens. Graphs read the mapping at each
replay. A later weight update may bring a mapping in another order. Then drafts can differ only among equal logits, and
the target verifies them.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.models.interfaces import LocalArgmaxMixin

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.fallback import in_a_line

#: vLLM's speculators that sample by `sample_draft`, and give the model no step. Subclasses sample in their own ways.
_SPECULATORS: Final = (
    "EagleSpeculator",
    "MTPSpeculator",
    "DFlashSpeculator",
    "PlainDraftModelSpeculator",
    "StandaloneARSpeculator",
)
#: In this package each `compute_logits` next to the mixin's `get_top_tokens` is the head's logits, scattered or not.
_MODELS: Final = "vllm.model_executor.models."
_RECORD: Final = "draft argmax"


def take_local_argmax(speculator: Any) -> None:
    """Set vLLM's option if it saves work and changes no draft.

    The weights are loaded, and nothing is captured.
    """
    model = getattr(speculator, "model", None)
    # A speculator without a model has no such option.
    if getattr(speculator, "use_local_argmax_reduction", True):
        return
    own = getattr(model, "draft_id_to_target_id", None) is not None
    if not own and getattr(getattr(model, "lm_head", None), "tp_size", 1) == 1:
        return
    try:
        reason = whole_logits_needed(speculator) or other_logits(speculator)
    except Exception as error:  # A model of another shape, whose start must go on.
        reason = f"the drafter cannot be read: {in_a_line(error)}"
    speculator.use_local_argmax_reduction = reason is None
    run_records.note(_RECORD, reason or ("over the drafter's own vocabulary" if own else "per rank"))


def whole_logits_needed(speculator: Any) -> str | None:
    """Return what needs a draft's logits of all words, or None."""
    if speculator.speculative_config.draft_sample_method != "greedy":
        return "drafts are sampled, and verification needs logits of all words"
    if getattr(speculator, "enable_adaptive_verification", False) or getattr(speculator, "use_acceptance_estimator", 0):
        return "acceptance is estimated from logits of all words (adaptive verification)"
    if getattr(speculator, "draft_watermarker", None) is not None:
        return "drafts have a watermark"
    return None


def other_logits(speculator: Any) -> str | None:
    """Return why the local argmax may draft other tokens, or None."""
    model = speculator.model
    if type(speculator).__name__ not in _SPECULATORS:
        return f"{type(speculator).__name__} drafts in another way"
    top_tokens = getattr(type(model), "get_top_tokens", None)
    if top_tokens is None:
        return f"{type(model).__name__} has no local argmax (get_top_tokens)"
    if top_tokens is not LocalArgmaxMixin.get_top_tokens or not model.compute_logits.__module__.startswith(_MODELS):
        return f"{type(model).__name__} has other logits"
    processor, head = model.logits_processor, model.lm_head
    if type(processor) is not LogitsProcessor or processor.logits_as_input or processor.scale <= 0:
        return "the logits processor does not multiply by the head, or turns the order of logits"
    # vLLM's argmax leaves out padding, and not words that were added behind it.
    sizes = {getattr(head, name, None) for name in ("org_vocab_size", "num_embeddings")}
    if sizes != {processor.org_vocab_size}:
        return "the head has added words, or is a copy"
    offsets = getattr(model, "draft_id_to_target_id", None)
    if offsets is not None:
        tokens = offsets + torch.arange(len(offsets), device=offsets.device)
        if not tokens.diff().gt(0).all():
            return "the drafter's vocabulary is not in the target's order"
    return None
