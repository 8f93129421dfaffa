# SPDX-License-Identifier: Apache-2.0
"""Which models the graphs of a step's tail are not for, by vLLM's own classes."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

import torch
from vllm.model_executor.offloader import base as offloading
from vllm.model_executor.offloader.uva import UVAOffloader
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

from vllm_hwplugin.spec_decode.obstacles import Part, why_not

from ..host_runner import BACKENDS, FLASH_MLA, builder
from .samplers import sampler

MLA = "vllm.model_executor.layers.attention.mla_attention.MLACommonMetadataBuilder"
HALVES = Part.V2_SAMPLING | Part.V2_DRAFTING
PLANNING = f"{BACKENDS}.mla.flashmla.FlashMLAMetadataBuilder"


def tail_obstacle(runner: Any) -> str | None:
    """What hinders both halves, or one."""
    return why_not(runner, HALVES)


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
    parallel = SimpleNamespace(
        data_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1, enable_eplb=False
    )
    drafter = object.__new__(speculator)
    drafter.speculative_config = SimpleNamespace(method=method, uses_dynamic_speculative_decoding=lambda: False)
    drafter.attn_groups = [[group(draft, "mtp")]]
    return SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=parallel),
        speculative_config=drafter.speculative_config,
        speculator=drafter,
        rejection_sampler=object(),
        attn_groups=[[group(target, "layers.0", "mtp"), *more]],
        lora_config=None,
        model_state=object.__new__(model_state),
        model_config=SimpleNamespace(logits_processors=None, is_encoder_decoder=False),
        sampler=SimpleNamespace(),
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
    assert tail_obstacle(sampling(monkeypatch)) is None


def test_logits_processors_of_an_installed_package_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM finds them by an entry point; the configuration does not name them."""
    found = EntryPoint("installed", f"{__name__}:{Installed.__name__}", loader.LOGITSPROCS_GROUP)
    monkeypatch.setattr(loader, "entry_points", lambda group: [found])
    made = sampling(monkeypatch)
    assert made.model_config.logits_processors is None
    assert tail_obstacle(made) == "there are custom logits processors: Installed"


def test_sampling_masks_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from each step's sampler; those of the recording would be given out for ever."""
    assert "sampling masks" in (tail_obstacle(sampling(monkeypatch, return_sampling_mask=True)) or "")


def changed(path: str, value: Any) -> Any:
    """A runner that would be served, but for one attribute, by its dotted path."""
    owner = made = runner(FlashAttentionMetadataBuilder, FlashAttentionMetadataBuilder)
    *owners, name = path.split(".")
    for one in owners:
        owner = getattr(owner, one)
    setattr(owner, name, value)
    return made


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("speculator", None, "does not draft"),
        ("rejection_sampler", None, "not verified"),
        ("speculator.speculative_config.method", "ngram", "method is ngram"),
        ("vllm_config.parallel_config.data_parallel_size", 2, "data parallelism"),
        ("vllm_config.parallel_config.enable_eplb", True, "experts"),
        ("vllm_config.parallel_config.pipeline_parallel_size", 2, "pipeline"),
        ("vllm_config.parallel_config.decode_context_parallel_size", 2, "context is split"),
        ("vllm_config.parallel_config.prefill_context_parallel_size", 2, "context is split"),
        ("lora_config", object(), "LoRA"),
        ("model_config.is_encoder_decoder", True, "encoder"),
        ("adaptive_verification", object(), "changes from step to step"),
        ("batch_sharder", object(), "part of the batch"),
        ("aux_output_connector", object(), "hidden states leave"),
        ("speculator.speculative_config.uses_dynamic_speculative_decoding", lambda: True, "number of drafts"),
        ("speculator.acceptance_estimator", object(), "acceptance is estimated"),
    ],
)
def test_an_engine_that_is_not_served(path: str, value: Any, words: str) -> None:
    assert words in (tail_obstacle(changed(path, value)) or "")


def test_nor_one_that_counts_nans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    assert "VLLM_COMPUTE_NANS_IN_LOGITS" in (tail_obstacle(changed("lora_config", None)) or "")


def test_nor_one_that_watermarks() -> None:
    watermarking = pytest.importorskip("vllm.v1.watermarking.gpu_sampler", exc_type=ImportError)
    sampler = object.__new__(watermarking.GPUWatermarkSampler)
    assert "watermarked" in (tail_obstacle(changed("sampler", sampler)) or "")


def test_nor_one_whose_weights_are_on_the_host() -> None:
    before = offloading.get_offloader()
    offloading.set_offloader(UVAOffloader(1 << 30))
    try:
        assert "loaded from the host" in (tail_obstacle(changed("lora_config", None)) or "")
    finally:
        offloading.set_offloader(before)


@pytest.mark.parametrize("path", [FLASH_MLA, MLA])
def test_an_mtp_layer_is_served_where_metadata_stays_in_place(path: str) -> None:
    assert tail_obstacle(runner(builder(path), builder(path))) is None


def test_not_where_a_kernel_plans_its_first_pass() -> None:
    """The plan of the run before a graph is recorded would be read for ever."""
    cls = builder(PLANNING)
    assert "FlashMLAMetadataBuilder: the first pass's plan" in (tail_obstacle(runner(cls, cls)) or "")


def test_it_is_where_the_target_alone_has_such_layers() -> None:
    planned = group(builder(PLANNING), "layers.1")
    made = runner(FlashAttentionMetadataBuilder, FlashAttentionMetadataBuilder, planned)
    assert tail_obstacle(made) is None


@pytest.mark.parametrize(
    ("state", "served"),
    [
        ({"_align_mode": False}, True),
        ({"_align_mode": True, "_mamba_ctx": SimpleNamespace(is_initialized=True)}, True),
        # Up to 0.31 the first step makes it, or fills it.
        ({"_align_mode": True, "_mamba_ctx": None}, False),
        ({"_align_mode": True, "_mamba_ctx": SimpleNamespace(is_initialized=False)}, False),
        # It keeps a step's states on the host.
        ({"_align_mode": False, "recoverssm": object()}, False),
    ],
)
def test_hybrids_are_served_where_a_graph_holds_what_moves_their_states(state: dict[str, Any], served: bool) -> None:
    states = group(GDNAttentionMetadataBuilder, "layers.1")
    made = runner(
        FlashAttentionMetadataBuilder, FlashAttentionMetadataBuilder, states, model_state=MambaHybridModelState
    )
    vars(made.model_state).update(state)
    reason = "MambaHybridModelState has work of its own after each step"
    assert tail_obstacle(made) == (None if served else reason)


@pytest.mark.parametrize(("speculator", "method"), [(EagleSpeculator, "eagle3"), (DFlashSpeculator, "dflash")])
def test_other_drafters_are_served(speculator: type, method: str) -> None:
    builders = (FlashAttentionMetadataBuilder, FlashAttentionMetadataBuilder)
    assert tail_obstacle(runner(*builders, speculator=speculator, method=method)) is None


@pytest.mark.parametrize(
    ("folder", "name", "method"),
    [
        # Several MTP layers, one for each draft: it never asks for padding to be masked.
        ("multi_module_mtp", "MultiModuleMTPSpeculator", "mtp"),
        # Its positions do not advance.
        ("gemma4", "Gemma4Speculator", "mtp"),
        ("dflash2", "DFlash2Speculator", "dflash"),
        ("lilicorr", "LiLiCorrSpeculator", "dflash"),
    ],
)
def test_drafters_that_share_their_methods_are_not(folder: str, name: str, method: str) -> None:
    module = pytest.importorskip(f"vllm.v1.worker.gpu.spec_decode.{folder}.speculator", exc_type=ImportError)
    builders = (FlashAttentionMetadataBuilder, FlashAttentionMetadataBuilder)
    made = runner(*builders, speculator=getattr(module, name), method=method)
    assert f"{name} drafts in a way of its own" in (tail_obstacle(made) or "")


@pytest.mark.parametrize(
    ("path", "value", "left"),
    [
        ("speculative_config.method", "draft_model", Part.V2_SAMPLING),
        ("speculator.acceptance_estimator", object(), Part.V2_SAMPLING),
        ("sampler.return_sampling_mask", True, Part.V2_DRAFTING),
        ("batch_sharder", object(), Part.V2_DRAFTING),
        ("lora_config", object(), Part(0)),
    ],
)
def test_one_half_is_left_where_the_other_is_refused(path: str, value: Any, left: Part) -> None:
    made = changed(path, value)
    assert left == Part(sum(part.value for part in HALVES if why_not(made, part) is None))


def test_all_reasons_are_said() -> None:
    made = changed("lora_config", object())
    made.speculative_config.method = "ngram"
    assert why_not(made, Part.V2_SAMPLING) == "adapters (LoRA) change from batch to batch"
    words = "the speculative method is ngram; adapters (LoRA) change from batch to batch"
    assert why_not(made, HALVES) == why_not(made, Part.V2_DRAFTING) == words
