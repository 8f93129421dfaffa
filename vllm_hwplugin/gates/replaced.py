# SPDX-License-Identifier: Apache-2.0
"""Variables of older builds that changed what a draft does, and that nothing reads any more."""

from __future__ import annotations

from typing import Final, NamedTuple


class Replaced(NamedTuple):
    """A variable of older builds that neither vLLM nor the plugin reads, and what to use in its place."""

    name: str
    instead: str

    def __str__(self) -> str:
        return f"{self.name} is set, but nothing reads it: {self.instead}"


REPLACED: Final[tuple[Replaced, ...]] = (
    Replaced(
        "VLLM_ATTENTION_BACKEND",
        "name the target's backend with --attention-backend, and from vLLM 0.21.0 on a draft's with attention_backend "
        "in --speculative-config; VLLM_HWPLUGIN_ATTENTION says where the plugin's FLASH_ATTN serves heads above 256",
    ),
    Replaced(
        "VLLM_MUSA_EAGLE_RUNNER",
        "VLLM_HWPLUGIN_DRAFT_FULL_GRAPH puts each pass of a drafter into a CUDA graph, VLLM_HWPLUGIN_DRAFT_LOOP_GRAPH "
        "all one-token steps into one; both are live by default",
    ),
    Replaced(
        "VLLM_MUSA_DRAFT_COPY_DEFAULT_STREAM",
        "it worked around a fault of the runner that VLLM_MUSA_EAGLE_RUNNER chose, which is gone; nothing is to be set",
    ),
)
