# SPDX-License-Identifier: Apache-2.0
"""The features that code names, by their folders in `patches/`, and their environment variables."""

from __future__ import annotations

from typing import Final

from .gates import PREFIX

CAPTURE_SIZES: Final = "capture-sizes"
ENGINE_REPORT: Final = "engine-report"
DRAFT_FULL_GRAPH: Final = "draft-full-graph"
DRAFT_LOOP_GRAPH: Final = "draft-loop-graph"
DFLASH_FULL_GRAPH: Final = "dflash-full-graph"
DFLASH_DRAFT_BACKEND: Final = "dflash-draft-backend"
DFLASH_CONTEXT_NORM: Final = "dflash-context-norm"
V1_DRAFT_PHASE: Final = "v1-draft-phase"
DRAFT_SCHEDULE: Final = "draft-schedule"
NEXT_TOKEN_KERNEL: Final = "next-token-kernel"
V2_STEP_INPUTS: Final = "v2-step-inputs"
V2_TAIL_GRAPH: Final = "v2-tail-graph"
V2_DRAFT_HEAD: Final = "v2-draft-head"
V2_MIXED_GRAPHS: Final = "v2-mixed-graphs"
WINDOW_BLOCKS: Final = "window-blocks"
V2_DRAFT_METADATA: Final = "v2-draft-metadata"
V2_FUSED_DRAFTS: Final = "v2-fused-drafts"
V2_CAPTURE_METADATA: Final = "v2-capture-metadata"
NWOR: Final = "nwor"
LINEAR: Final = "linear"
V1_STEP_INPUTS: Final = "v1-step-inputs"
V1_MIXED_GRAPHS: Final = "v1-mixed-graphs"
BACKPORT_MIXED_GRAPHS: Final = "backport-mixed-graphs"
BACKPORT_PIPELINE_DRAFTS: Final = "backport-pipeline-drafts"


def gate_of(feature: str) -> str:
    """Return the variable that switches a feature; a test compares the catalogue's."""
    name = f"{PREFIX}_{feature.upper().replace('-', '_')}"
    # nwor's variable takes modes, and `off` is one of them.
    return f"{name}_MODE" if feature == NWOR else name
