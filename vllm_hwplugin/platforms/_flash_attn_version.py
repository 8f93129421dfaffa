# SPDX-License-Identifier: Apache-2.0
"""Revert vLLM's choice of FlashAttention 4 for models with heads above 256 on hosts that cannot run it.

From 0.24.0 on vLLM sets ``flash_attn_version`` to 4 for gemma-4 models, whose layers have heads of 256 and 512, so that
all layers run on one version. It checks for FlashAttention 4's file, not for the packages that compile it; without them
each layer fails at its first call. The plugin's kernel runs the larger heads, so no layer needs version 4.

In all versions vLLM sets the version before it calls the platform's hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from vllm_hwplugin.attention.backends import LARGEST_OF_VLLM
from vllm_hwplugin.base import log, run_records

from ._cuda_attention import GATE, largest_head, missing_for_fa4, setting

KEY: Final = "attention, FlashAttention version"


def check_and_update_config(vllm_config: Any, device_capability: Callable[[], Any | None]) -> None:
    """Reset version 4 to vLLM's default (None) if it cannot run.

    With None vLLM takes 3 on Hopper if its wheel has it, else 2. vLLM may verify a configuration several times.

    Args:
        device_capability: Returns the device's ``DeviceCapability``, or None.
    """
    attention, model = vllm_config.attention_config, vllm_config.model_config
    if attention.flash_attn_version != 4 or setting() == "off":
        return
    # On Blackwell vLLM's default is 4. GPUs before Hopper have no version 4.
    capability = device_capability()
    if capability is None or capability.major != 9:
        return
    # A diffusion model's masks differ per request, which only FlashAttention 4 supports.
    if largest_head(model) <= LARGEST_OF_VLLM or getattr(model, "is_diffusion", False):
        return
    missing = missing_for_fa4()
    if not missing:
        return
    attention.flash_attn_version = None
    text = (
        f"flash_attn_version=4 is reset: {missing}. Heads up to {LARGEST_OF_VLLM} run on vLLM's default for this "
        "device, larger heads on the plugin's kernel if it fits"
    )
    log.once(
        f"attention: {text}. To use FlashAttention 4, install these packages; to silence this warning, set a version "
        f"(--attention-config.flash_attn_version 3); {GATE}=off leaves the version to vLLM."
    )
    run_records.note(KEY, text)
