# SPDX-License-Identifier: Apache-2.0
"""Build attention metadata of vLLM 0.20's one-token draft steps inside its graph of all steps.

vLLM's own `build` is called between the steps while the graph is captured, so the graph holds the build's work on the
device, and repeats it at each replay; `builders` says for which builders that is enough.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.features import V2_DRAFT_METADATA
from vllm_hwplugin.spec_decode.builders import why_not_in_graph
from vllm_hwplugin.spec_decode.graph_recording import attempt_capture

_ON_HOST: Final = "draft steps run without a graph"


def capture_steps(speculator: Any, *arguments: Any, **settings: Any) -> None:
    """Capture 0.20's graph of all draft steps; `speculator` has its attention groups.

    Raises:
        FeatureRequired: the capture failed, and the switch is `on`.
    """
    # With fewer steps, the one after the first has the metadata that was made for it.
    reason = None if speculator.num_speculative_steps < 3 else why_not_in_graph(speculator.attn_groups)
    if reason is not None:
        run_records.note(V2_DRAFT_METADATA, f"{_ON_HOST}: {reason}")
        return
    run_records.note(V2_DRAFT_METADATA, "the graph of all draft steps, where there is one, makes each step's metadata")
    manager = speculator.decode_cudagraph_manager
    capture = partial(manager.capture, *arguments, **settings)
    attempt_capture(V2_DRAFT_METADATA, _ON_HOST, capture, [manager], speculator.device)


def metadata_of_step(
    speculator: Any, attn_metadata: dict[str, Any] | None, *, step: int, num_reqs: int, num_tokens_padded: int
) -> dict[str, Any] | None:
    """Build a draft step's attention metadata; vLLM 0.20 builds only the first.

    Args:
        speculator: vLLM's `EagleSpeculator`, whose buffers hold the step's lengths and slots.
        attn_metadata: the step before's; None in a run without attention.
        num_reqs: rows of the batch, or of the graph that is being captured.
    """
    if attn_metadata is None:
        return None
    if step == 1:
        # The metadata is new; but vLLM warms up with the metadata that it captures with, and FLASHMLA's first call
        # makes a plan that stays in it.
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing or why_not_in_graph(speculator.attn_groups) is not None:
            return attn_metadata
    made: dict[str, Any] | None = speculator._build_draft_attn_metadata(
        num_reqs=num_reqs, num_reqs_padded=num_reqs, num_tokens_padded=num_tokens_padded, max_query_len=1
    )
    return made
