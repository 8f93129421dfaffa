# SPDX-License-Identifier: Apache-2.0
"""Take FlashAttention 4 back from models with heads above 256 where it cannot run.

From 0.24.0 on vLLM sets ``flash_attn_version`` to 4 for models of the gemma-4 kind, whose layers have heads of 256 and
512, so that all run on one version. It looks for the file of FlashAttention 4, not for the packages that compile it,
and without them each layer fails at its first call. With the plugin's kernel for the larger heads nothing needs it.

vLLM sets it while it verifies the model's configuration, which in all versions comes before the platform's turn.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Final

from vllm_hwplugin import journal
from vllm_hwplugin.attention.capabilities import LARGEST_OF_VLLM

from ._cuda_attention import GATE, largest_head, missing_for_fa4, setting

logger = logging.getLogger("vllm.hwplugin")

KEY: Final = "attention, FlashAttention version"


def check_and_update_config(vllm_config: Any, device_capability: Callable[[], Any | None]) -> None:
    """Leave the version to vLLM's default for the device where 4 is set and cannot run.

    That is None rather than 3: vLLM then takes 3 on Hopper if its wheel has it, else 2. A configuration that is
    verified again comes here again.

    Args:
        device_capability: gives the device's ``DeviceCapability``, if there is one.
    """
    attention, model = vllm_config.attention_config, vllm_config.model_config
    if attention.flash_attn_version != 4 or setting() == "off":
        return
    # On Blackwell vLLM's default is 4 as well. Before Hopper there is no 4.
    capability = device_capability()
    if capability is None or capability.major != 9:
        return
    # A diffusion model's masks differ from request to request, which FlashAttention 4 alone can do.
    if largest_head(model) <= LARGEST_OF_VLLM or getattr(model, "is_diffusion", False):
        return
    missing = missing_for_fa4()
    if not missing:
        return
    attention.flash_attn_version = None
    text = (
        f"flash_attn_version=4 is taken back: {missing}. Heads of up to {LARGEST_OF_VLLM} run on vLLM's default for "
        "this device, larger ones on the plugin's kernel where it fits"
    )
    _warn(
        f"attention: {text}. Install the packages to have FlashAttention 4, name a version "
        f"(--attention-config.flash_attn_version 3) to be rid of this warning, or set {GATE}=off to leave it to vLLM."
    )
    journal.note(KEY, text)


@functools.cache
def _warn(text: str) -> None:
    logger.warning("%s", text)
