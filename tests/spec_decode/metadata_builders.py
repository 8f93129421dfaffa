# SPDX-License-Identifier: Apache-2.0
"""Attention metadata builders of vLLM, some of which need what this host does not have."""

from __future__ import annotations

import importlib

from vllm.v1.attention.backend import AttentionMetadataBuilder

BACKENDS = "vllm.v1.attention.backends"
FLASH_MLA = f"{BACKENDS}.mla.flashattn_mla.FlashAttnMLAMetadataBuilder"
FLASHINFER = f"{BACKENDS}.flashinfer.FlashInferMetadataBuilder"
FLEX = f"{BACKENDS}.flex_attention.FlexAttentionMetadataBuilder"


def builder(path: str) -> type:
    """Return vLLM's class, or a class of its name where its module does not import here."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AssertionError):
        return type(name, (AttentionMetadataBuilder,), {"__module__": module, "build": lambda *_, **__: None})
