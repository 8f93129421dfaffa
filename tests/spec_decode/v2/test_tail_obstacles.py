# SPDX-License-Identifier: Apache-2.0
"""Which models the graphs of a step's tail are not for, by vLLM's own classes."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.sample.logits_processor import loader
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.utils import AttentionGroup

from vllm_hwplugin.spec_decode.v2.tail_obstacles import obstacle

from ..host_runner import BACKENDS, FLASH_MLA, builder
from .samplers import sampler

MLA = "vllm.model_executor.layers.attention.mla_attention.MLACommonMetadataBuilder"
PLANNING = f"{BACKENDS}.mla.flashmla.FlashMLAMetadataBuilder"


def group(builder_class: type, *layers: str) -> AttentionGroup:
    """One whose builder has not been set up: what it is decides."""
    made = type(builder_class.__name__, (builder_class,), {"__init__": lambda self: None})()
    return AttentionGroup(None, list(layers), None, 0, metadata_builders=[made])  # type: ignore[arg-type]


def runner(
    target: type,
    draft: type,
    *more: AttentionGroup,
    model_state: type = DefaultModelState,
    speculator: type = MTPSpeculator,
    method: str = "mtp",
) -> Any:
    """What is read of a V2 runner; the target's builders make metadata for the drafter's layer `mtp`, too."""
    parallel = SimpleNamespace(data_parallel_size=1, enable_eplb=False)
    drafter = object.__new__(speculator)
    drafter.speculative_config = SimpleNamespace(method=method, uses_dynamic_speculative_decoding=lambda: False)
    drafter.attn_groups = [[group(draft, "mtp")]]
    return SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=parallel),
        speculator=drafter,
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


class Installed(LogitsProcessor):
    """What a package brings that is installed beside vLLM."""

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        return logits + 1


def sampling(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Any:
    """A runner with vLLM's own sampler."""
    made = runner(FlashAttentionMetadataBuilder, FlashAttentionMetadataBuilder)
    made.sampler = sampler(monkeypatch, **settings)
    return made


def test_vllms_own_sampler_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    assert obstacle(sampling(monkeypatch)) is None


def test_logits_processors_of_an_installed_package_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM finds them by an entry point; the configuration does not name them."""
    found = EntryPoint("installed", f"{__name__}:{Installed.__name__}", loader.LOGITSPROCS_GROUP)
    monkeypatch.setattr(loader, "entry_points", lambda group: [found])
    made = sampling(monkeypatch)
    assert made.model_config.logits_processors is None
    assert obstacle(made) == "there are custom logits processors: Installed"


def test_sampling_masks_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from each step's sampler; those of the recording would be given out for ever."""
    assert "sampling masks" in (obstacle(sampling(monkeypatch, return_sampling_mask=True)) or "")


@pytest.mark.parametrize("path", [FLASH_MLA, MLA])
def test_an_mtp_layer_is_served_where_metadata_stays_in_place(path: str) -> None:
    assert obstacle(runner(builder(path), builder(path))) is None


def test_not_where_a_kernel_plans_its_first_pass() -> None:
    """The plan of the run before a graph is recorded would be read for ever."""
    cls = builder(PLANNING)
    assert "FlashMLAMetadataBuilder: the first pass's plan" in (obstacle(runner(cls, cls)) or "")


def test_it_is_where_the_target_alone_has_such_layers() -> None:
    planned = group(builder(PLANNING), "layers.1")
    made = runner(FlashAttentionMetadataBuilder, FlashAttentionMetadataBuilder, planned)
    assert obstacle(made) is None


def test_hybrids_are_not_served() -> None:
    states = group(GDNAttentionMetadataBuilder, "layers.1")
    made = runner(
        FlashAttentionMetadataBuilder, FlashAttentionMetadataBuilder, states, model_state=MambaHybridModelState
    )
    assert "MambaHybridModelState has work of its own" in (obstacle(made) or "")


@pytest.mark.parametrize(("speculator", "method"), [(EagleSpeculator, "eagle3"), (DFlashSpeculator, "dflash")])
def test_other_drafters_are_served(speculator: type, method: str) -> None:
    builders = (FlashAttentionMetadataBuilder, FlashAttentionMetadataBuilder)
    assert obstacle(runner(*builders, speculator=speculator, method=method)) is None


@pytest.mark.parametrize(
    ("folder", "name", "method"),
    [
        # Several MTP layers, one for each draft: it never asks for padding to be masked.
        ("multi_module_mtp", "MultiModuleMTPSpeculator", "mtp"),
        ("dflash2", "DFlash2Speculator", "dflash"),
        ("lilicorr", "LiLiCorrSpeculator", "dflash"),
    ],
)
def test_drafters_that_share_their_methods_are_not(folder: str, name: str, method: str) -> None:
    module = pytest.importorskip(f"vllm.v1.worker.gpu.spec_decode.{folder}.speculator", exc_type=ImportError)
    builders = (FlashAttentionMetadataBuilder, FlashAttentionMetadataBuilder)
    made = runner(*builders, speculator=getattr(module, name), method=method)
    assert f"{name} drafts in a way of its own" in (obstacle(made) or "")
