# SPDX-License-Identifier: Apache-2.0
"""Which models the graphs of a step's tail are not for, by vLLM's own classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.utils import AttentionGroup

from vllm_hwplugin.spec_decode.v2.tail_obstacles import obstacle

from ..host_runner import BACKENDS, FLASH_MLA, builder

MLA = "vllm.model_executor.layers.attention.mla_attention.MLACommonMetadataBuilder"
PLANNING = f"{BACKENDS}.mla.flashmla.FlashMLAMetadataBuilder"


def group(builder_class: type, *layers: str) -> AttentionGroup:
    """One whose builder has not been set up: what it is decides."""
    made = type(builder_class.__name__, (builder_class,), {"__init__": lambda self: None})()
    return AttentionGroup(None, list(layers), None, 0, metadata_builders=[made])  # type: ignore[arg-type]


def runner(target: type, draft: type, model_state: type = DefaultModelState, *more: AttentionGroup) -> Any:
    """What is read of a V2 runner that drafts with an MTP layer, which the target's builders make metadata for, too."""
    parallel = SimpleNamespace(data_parallel_size=1, enable_eplb=False)
    speculative = SimpleNamespace(method="mtp", uses_dynamic_speculative_decoding=lambda: False)
    return SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=parallel),
        speculator=SimpleNamespace(speculative_config=speculative, attn_groups=[[group(draft, "mtp")]]),
        rejection_sampler=object(),
        attn_groups=[[group(target, "layers.0", "mtp"), *more]],
        use_pp=False,
        use_dcp=False,
        lora_config=None,
        is_encoder_decoder=False,
        model_state=object.__new__(model_state),
        model_config=SimpleNamespace(logits_processors=None),
        sampler=SimpleNamespace(compute_nans=False),
    )


@pytest.mark.parametrize("path", [FLASH_MLA, MLA])
def test_an_mtp_layer_is_served_where_metadata_stays_in_place(path: str) -> None:
    assert obstacle(runner(builder(path), builder(path))) is None


def test_not_where_a_kernel_plans_its_first_pass() -> None:
    """The plan of the run before a graph is recorded would be read for ever."""
    cls = builder(PLANNING)
    assert "FlashMLAMetadataBuilder: the first pass's plan" in (obstacle(runner(cls, cls)) or "")


def test_it_is_where_the_target_alone_has_such_layers() -> None:
    planned = group(builder(PLANNING), "layers.1")
    made = runner(FlashAttentionMetadataBuilder, FlashAttentionMetadataBuilder, DefaultModelState, planned)
    assert obstacle(made) is None


def test_hybrids_are_not_served() -> None:
    states = group(GDNAttentionMetadataBuilder, "layers.1")
    made = runner(FlashAttentionMetadataBuilder, FlashAttentionMetadataBuilder, MambaHybridModelState, states)
    assert "MambaHybridModelState has work of its own" in (obstacle(made) or "")
