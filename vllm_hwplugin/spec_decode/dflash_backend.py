# SPDX-License-Identifier: Apache-2.0
"""What a DFlash draft needs of attention, kept apart from what its target needs.

A draft's mask tokens see each other, so its layers need a backend with non-causal attention; the target's layers do
not. Which layers are being built shows in the configuration they are built under, so the draft gets one of its own.
They are shallow copies: ``replace()`` would run ``VllmConfig.__post_init__`` again, with its effects on objects that
target and draft share (capture sizes, the platform's hooks).
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING

from vllm_hwplugin import journal
from vllm_hwplugin.features import DFLASH_DRAFT_BACKEND

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def draft_config(target: VllmConfig) -> VllmConfig:
    """The configuration under which vLLM before 0.21.0 builds a DFlash draft.

    Those versions have no setting for the draft's backend, only one for the target's. The draft takes that backend,
    too, if it declares non-causal attention, as before. Otherwise vLLM selects the draft's; the name, given by the
    user, the target's model class or the platform, counts only for the target.

    Args:
        target: the engine's configuration; it is not changed.
    """
    attention = copy.copy(target.attention_config)
    named = attention.backend
    if named is None:
        journal.note(DFLASH_DRAFT_BACKEND, "target and draft select their attention backends separately")
    elif named.get_class().supports_non_causal():
        journal.note(
            DFLASH_DRAFT_BACKEND, f"the draft has the target's {named.name}, which declares non-causal attention"
        )
    else:
        attention.backend = None
        journal.note(
            DFLASH_DRAFT_BACKEND, f"the draft selects its own backend: {named.name} is the target's and only causal"
        )
    # The name that vLLM declares from 0.21.0 on; a plain attribute here.
    attention.use_non_causal = True
    draft = copy.copy(target)
    draft.attention_config = attention
    return draft


def needs_non_causal(config: VllmConfig) -> bool:
    """Whether layers that are built under ``config`` need non-causal attention: only :func:`draft_config`'s do."""
    return bool(getattr(config.attention_config, "use_non_causal", False))


def without_mm_prefix(config: VllmConfig) -> VllmConfig:
    """``config`` for a draft that reads text only, beside a target whose images are seen in both directions.

    The flag excludes backends that the draft could use. vLLM clears it in the ``ModelConfig`` that draft and target
    share. The target's metadata builders read it there later: since 0.28.0 FlashAttention's then drops the ranges of
    the images, and the target's own output changes.

    Args:
        config: a configuration whose ``model_config`` is the target's; neither is changed.
    """
    text_only = copy.copy(config)
    text_only.model_config = copy.copy(config.model_config)
    text_only.model_config.model_arch_config = dataclasses.replace(
        config.model_config.model_arch_config, is_mm_prefix_lm=False
    )
    return text_only
