# SPDX-License-Identifier: Apache-2.0
"""Variables of older builds that changed what a draft does, and that nothing reads any more."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

#: By name, what to use in its place.
REPLACED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "VLLM_ATTENTION_BACKEND": "name the target's backend with --attention-backend, and from vLLM 0.21.0 on a "
        "draft's with attention_backend in --speculative-config; VLLM_HWPLUGIN_ATTENTION says where the plugin's "
        "FLASH_ATTN serves heads above 256",
        "VLLM_MUSA_EAGLE_RUNNER": "VLLM_HWPLUGIN_DRAFT_FULL_GRAPH puts each pass of a drafter into a CUDA graph, "
        "VLLM_HWPLUGIN_DRAFT_LOOP_GRAPH all one-token steps into one; both are live by default",
        "VLLM_MUSA_DRAFT_COPY_DEFAULT_STREAM": "it worked around a fault of the runner that VLLM_MUSA_EAGLE_RUNNER "
        "chose, which is gone; nothing is to be set",
    }
)
