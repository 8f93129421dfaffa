# SPDX-License-Identifier: Apache-2.0
"""What stands against graphs of a step, in the words of every feature that records some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vllm.model_executor.offloader.base import NoopOffloader, get_offloader

NO_DRAFTS: Final = "this worker does not draft"
STAGES: Final = "stages of a pipeline exchange tokens in the host's order"
CONTEXT: Final = "the context is split among ranks"
EXPERTS: Final = "experts are counted on the host in each step"
ADAPTERS: Final = "adapters (LoRA) change from batch to batch"
ENCODER: Final = "the model has an encoder"
EMBEDDINGS: Final = "prompts may be embeddings"
POSITIONS: Final = "positions have several dimensions"
OFFLOADED: Final = "weights are loaded from the host in each step"
VERIFIED: Final = "how many drafts are verified changes from step to step"
NAN_LOGITS: Final = "VLLM_COMPUTE_NANS_IN_LOGITS is set"


def first(obstacles: Mapping[str, object]) -> str | None:
    """The first of these reasons that holds, or None."""
    return next((reason for reason, holds in obstacles.items() if holds), None)


def offloads() -> bool:
    """Whether weights of this process's model lie on the host."""
    return not isinstance(get_offloader(), NoopOffloader)
