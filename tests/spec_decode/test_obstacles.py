# SPDX-License-Identifier: Apache-2.0
"""When CUDA graphs of a step are not used, each row of the table by itself, and the page that is made from it.

`python -m tests.spec_decode.test_obstacles` writes docs/obstacles.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any, Final

import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

import torch
from vllm.config import CUDAGraphMode, KVTransferConfig
from vllm.model_executor.offloader import base as offloading
from vllm.model_executor.offloader.uva import UVAOffloader
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.flex_attention import FlexAttentionMetadataBuilder
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder
from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, LogitsProcessors, MinTokensLogitsProcessor
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.gpu.sample.logits_processor import loader
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

from vllm_hwplugin.base.gates import MORE_GRAPHS, PLAIN_DECODE
from vllm_hwplugin.spec_decode import obstacles
from vllm_hwplugin.spec_decode.kv_cache_room import GRAPHS_LEFT
from vllm_hwplugin.spec_decode.obstacles import OBSTACLES, Part, why_not

from ..obstacles_page import PAGE, TOLD, markdown
from .metadata_builders import BACKENDS, FLASH_MLA, FLASHINFER, FLEX, builder
from .v2.samplers import sampler


def test_the_page_is_up_to_date_and_has_each_part() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run `make docs`"
    assert list(TOLD) == list(Part)


# -- who has graphs, as far as the table reads it ---------------------------------------------------------------------


def group(cls: type, *layers: str, **attributes: Any) -> Any:
    """An attention group with a builder that has not been set up: what it is decides."""
    made = type(cls.__name__, (cls,), {"__init__": lambda self: None, "__module__": cls.__module__})()
    vars(made).update(attributes)
    return SimpleNamespace(
        layer_names=list(layers), kv_cache_spec=None, get_metadata_builder=lambda ubatch=0: made, kernel_block_size=None
    )


def parallel() -> SimpleNamespace:
    sizes = ("pipeline", "decode_context", "prefill_context", "data")
    return SimpleNamespace(
        **{f"{one}_parallel_size": 1 for one in sizes},
        enable_eplb=False,
        use_ubatching=False,
        all2all_backend="allgather_reducescatter",
    )


def config(kv_transfer_config: KVTransferConfig | None = None) -> SimpleNamespace:
    return SimpleNamespace(parallel_config=parallel(), lora_config=None, kv_transfer_config=kv_transfer_config)


def runner_v1() -> Any:
    """A `GPUModelRunner` of V1 that drafts with Eagle3."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(method="eagle3", num_speculative_tokens=3),
        drafter=SimpleNamespace(
            draft_loop=SimpleNamespace(failed=False),
            draft_attn_groups=[group(TritonAttentionMetadataBuilder, "draft")],
            needs_extra_input_slots=False,
        ),
        vllm_config=config(),
        lora_config=None,
        model_config=SimpleNamespace(
            is_encoder_decoder=False, is_hybrid=False, rswa_window=None, uses_mrope=False, uses_xdrope_dim=0
        ),
        cache_config=SimpleNamespace(mamba_cache_mode="none", kv_sharing_fast_prefill=False),
        enable_prompt_embeds=False,
        is_mm_prefix_lm=False,
        attn_groups=[[group(TritonAttentionMetadataBuilder, "target")]],
        supports_mm_inputs=False,
        model=None,
        input_batch=SimpleNamespace(logitsprocs=LogitsProcessors()),
        cudagraph_dispatcher=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
        compilation_config=SimpleNamespace(static_forward_context={}),
        get_model=lambda: None,
    )


def runner_v2(target: type = TritonAttentionMetadataBuilder, draft: type = FlashAttentionMetadataBuilder) -> Any:
    """A `GPUModelRunner` of V2; the target's builders make metadata for the drafter's layer `mtp`, too."""
    speculator = object.__new__(MTPSpeculator)
    speculator.speculative_config = SimpleNamespace(
        method="mtp",
        uses_dynamic_speculative_decoding=lambda: False,
        draft_model_config=SimpleNamespace(is_moe=True),
    )
    speculator.attn_groups = [[group(draft, "mtp")]]
    return SimpleNamespace(
        vllm_config=config(),
        speculative_config=speculator.speculative_config,
        speculator=speculator,
        rejection_sampler=object(),
        attn_groups=[[group(target, "layers.0", "mtp")]],
        lora_config=None,
        model_state=object.__new__(DefaultModelState),
        model_config=SimpleNamespace(
            logits_processors=None, is_encoder_decoder=False, uses_mrope=False, rswa_window=None
        ),
        sampler=SimpleNamespace(),
        supports_mm_inputs=False,
        cudagraph_manager=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, use_breakable_cg=False),
        max_num_reqs=8,
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def proposer() -> Any:
    """V1's drafter of Eagle3, which leaves the layers' KV connector to the target."""
    return type("EagleProposer", (SimpleNamespace,), {})(
        speculative_config=SimpleNamespace(
            method="eagle3", num_speculative_tokens=3, enforce_eager=False, disable_padded_drafter_batch=False
        ),
        vllm_config=config(kv_transfer_config=KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")),
        model=None,
        parallel_drafting=False,
        hidden_size=8,
        draft_model_config=SimpleNamespace(get_hidden_size=lambda: 8),
        draft_attn_groups=[group(TritonAttentionMetadataBuilder, "draft")],
    )


def speculator() -> Any:
    """V2's drafter of Eagle3, from 0.21 to 0.27."""
    return SimpleNamespace(
        speculative_config=object(),
        num_speculative_steps=3,
        dp_size=1,
        attn_groups=[[group(TritonAttentionMetadataBuilder, "draft")]],
        decode_cudagraph_manager=SimpleNamespace(needs_capture=lambda: True),
    )


PARTS: Final = {
    runner_v1: Part.V1_SAMPLING | Part.V1_DRAFTING | Part.V1_INPUTS | Part.V1_METADATA | Part.V1_MIXED,
    runner_v2: Part.V2_SAMPLING | Part.V2_DRAFTING | Part.V2_INPUTS | Part.V2_METADATA | Part.V2_MIXED,
    proposer: Part.V1_PASSES | Part.V1_CHAIN,
    speculator: Part.V2_STEPS,
}
PHASE, TAIL, MIXED = Part.V1_SAMPLING | Part.V1_DRAFTING, Part.V2_SAMPLING | Part.V2_DRAFTING, Part.V2_MIXED
V1_MIXED, V1_METADATA = Part.V1_MIXED, Part.V1_METADATA


def refused(owner: Any, make: Callable[..., Any], words: str = "") -> Part:
    """Which parts cannot be recorded, for a reason with these words."""
    found = [part for part in PARTS[make] if words in (why_not(owner, part) or "") and why_not(owner, part)]
    return Part(sum(part.value for part in found))


def change(owner: Any, path: str, value: Any) -> Any:
    at, names = owner, path.split(".")
    for one in names[:-1]:
        at = getattr(at, one)
    setattr(at, names[-1], value)
    return owner


@pytest.mark.parametrize("make", PARTS)
def test_nothing_stands_against_graphs_of_these(make: Callable[..., Any]) -> None:
    assert refused(make(), make) == Part(0)


@pytest.mark.parametrize(
    ("make", "path", "value"),
    [
        (proposer, "speculative_config.num_speculative_tokens", 2),
        (speculator, "num_speculative_steps", 3),
        (runner_v2, "max_num_reqs", 1),
        (runner_v2, "supports_mm_inputs", True),
        (runner_v2, "model_state.mm_pruner", object()),
        (runner_v2, "lora_config", SimpleNamespace(specialize_active_lora=False)),
        # It loads prompts before the target runs, and saves them after it.
        (
            runner_v2,
            "vllm_config.kv_transfer_config",
            KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both"),
        ),
    ],
)
def test_nor_at_the_last_value_that_is_served(make: Callable[..., Any], path: str, value: Any) -> None:
    assert refused(change(make(), path, value), make) == Part(0)


class Uniform(TritonAttentionMetadataBuilder):
    """Its graphs are of batches whose requests have equally many tokens."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class FlashInferMLAMetadataBuilder:
    """vLLM's says that it always has graphs, and raises in a capture of more tokens of a request."""

    __module__ = f"{BACKENDS}.mla.flashinfer_mla"

    @classmethod
    def get_cudagraph_support(cls, *_: Any) -> AttentionCGSupport:
        return AttentionCGSupport.ALWAYS


class ModelStateOfAnother(DefaultModelState):
    """Of a model that works in its own way."""

    def __init__(self) -> None:
        pass


class Breakable:
    """vLLM's wrapper of a model in breakable CUDA graphs."""

    runtime_mode = None


#: A drafter or runner, what is changed, words of the reason that is then said, and the parts that it hinders.
CASES: Final = [
    *(
        (make, f"vllm_config.{GRAPHS_LEFT}", True, "be too small", PARTS[make])
        for make in (proposer, runner_v1, runner_v2)
    ),
    (proposer, "__class__", type("Gemma4Proposer", (SimpleNamespace,), {}), "Gemma4Proposer", Part.V1_PASSES),
    (proposer, "__class__", type("DFlashProposer", (SimpleNamespace,), {}), "DFlashProposer", Part.V1_PASSES),
    (proposer, "speculative_config.enforce_eager", True, "enforce_eager", Part.V1_PASSES),
    (proposer, "speculative_config.disable_padded_drafter_batch", True, "disable_padded", Part.V1_PASSES),
    (proposer, "vllm_config.parallel_config.data_parallel_size", 2, "data parallelism", Part.V1_PASSES),
    (proposer, "vllm_config.parallel_config.decode_context_parallel_size", 2, "per-rank", Part.V1_PASSES),
    (proposer, "vllm_config.lora_config", object(), "LoRA", Part.V1_PASSES),
    (proposer, "model", Breakable(), "breakable", Part.V1_PASSES),
    (proposer, "speculative_config.method", "dflash", "ExampleConnector may load", Part.V1_PASSES),
    (proposer, "vllm_config.use_cumem_cudagraph_pool", True, "memory pool", Part.V1_PASSES),
    (proposer, "_share_mtp_indices", True, "top-k indices", Part.V1_PASSES),
    (proposer, "speculative_config.num_speculative_tokens", 1, "no chain", Part.V1_CHAIN),
    (proposer, "parallel_drafting", True, "no chain", Part.V1_CHAIN),
    (proposer, "hidden_size", 16, "wider", Part.V1_CHAIN),
    (proposer, "uses_mrope", True, "between steps: uses_mrope", Part.V1_CHAIN),
    (proposer, "draft_attn_groups", [group(builder(FLASHINFER), "draft")], "between steps (Fl", Part.V1_CHAIN),
    (speculator, "num_speculative_steps", 2, "2 draft tokens", Part.V2_STEPS),
    (speculator, "advance_draft_positions", False, "positions stay", Part.V2_STEPS),
    (speculator, "attn_groups", [[group(builder(FLEX), "draft")]], "(FlexAttention", Part.V2_STEPS),
    (speculator, "dp_size", 2, "data-parallel", Part.V2_STEPS),
    (speculator, "eplb_state", object(), "experts are balanced", Part.V2_STEPS),
    (speculator, "decode_cudagraph_manager.needs_capture", lambda: False, "no graph of a draft", Part.V2_STEPS),
    (runner_v1, "speculative_config", None, "does not draft", PARTS[runner_v1]),
    (runner_v1, "drafter", None, "does not draft", PARTS[runner_v1]),
    (runner_v1, "speculative_config.method", "draft_model", "method is draft_model", PHASE | V1_MIXED),
    (runner_v1, "speculative_config.method", "ngram_gpu", "changes from step to step", Part.V1_INPUTS),
    (runner_v1, "drafter.draft_loop", None, "needs draft-loop-graph", PHASE),
    (runner_v1, "drafter.draft_loop.failed", True, "capturing the graphs", PHASE),
    (runner_v1, "drafter.uses_mrope", True, "between steps: uses_mrope", PHASE),
    (runner_v1, "drafter.needs_extra_input_slots", True, "its own tokens", PHASE),
    (runner_v1, "drafter.set_per_group_block_table", object(), "each KV cache group", Part.V1_METADATA),
    (runner_v1, "vllm_config.parallel_config.data_parallel_size", 2, "data parallelism", V1_METADATA | V1_MIXED),
    (runner_v1, "vllm_config.parallel_config.pipeline_parallel_size", 2, "pipeline", PHASE | Part.V1_INPUTS | V1_MIXED),
    (runner_v1, "vllm_config.parallel_config.prefill_context_parallel_size", 2, "split", Part.V1_INPUTS | V1_MIXED),
    (runner_v1, "vllm_config.parallel_config.decode_context_parallel_size", 2, "split", Part.V1_INPUTS | V1_MIXED),
    (runner_v1, "vllm_config.parallel_config.enable_eplb", True, "experts", PHASE),
    (runner_v1, "vllm_config.parallel_config.use_ubatching", True, "split in two", PHASE | V1_MIXED),
    (runner_v1, "lora_config", object(), "LoRA", Part.V1_INPUTS | V1_MIXED),
    (runner_v1, "model_config.is_encoder_decoder", True, "encoder", PHASE | Part.V1_INPUTS | V1_MIXED),
    (runner_v1, "enable_prompt_embeds", True, "embeddings", PHASE | Part.V1_INPUTS | V1_MIXED),
    (runner_v1, "model", Breakable(), "broken", V1_MIXED),
    (runner_v1, "supports_mm_inputs", True, "prompts may have images", V1_MIXED),
    (runner_v1, "attn_groups", [[group(Uniform)], [group(Uniform)]], ": Uniform supports UNIFORM_BATCH", V1_MIXED),
    (runner_v1, "attn_groups", [[group(FlashInferMLAMetadataBuilder)]], "not known to serve prompts", V1_MIXED),
    (runner_v1, "cudagraph_dispatcher.cudagraph_mode", CUDAGraphMode.FULL, "mode is FULL", V1_MIXED),
    (runner_v1, "cudagraph_dispatcher.cudagraph_mode", CUDAGraphMode.PIECEWISE, "mode is PIECEWISE", V1_MIXED),
    (
        runner_v1,
        "vllm_config.kv_transfer_config",
        KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both"),
        "ExampleConnector may load and save prompts layer by layer",
        V1_MIXED,
    ),
    (runner_v1, "model_config.uses_mrope", True, "several dimensions", Part.V1_INPUTS),
    (runner_v1, "model_config.uses_xdrope_dim", 4, "several dimensions", Part.V1_INPUTS),
    (runner_v1, "get_model", lambda: SimpleNamespace(get_mtp_target_hidden_states=None), "other states", PHASE),
    (runner_v1, "drafter.draft_attn_groups", [group(builder(FLASHINFER), "draft")], "in each step (Fl", PHASE),
    (runner_v1, "attn_groups", [[group(FlexAttentionMetadataBuilder)]], "on the host", Part.V1_METADATA),
    (runner_v1, "is_mm_prefix_lm", True, "see each other", Part.V1_METADATA),
    (runner_v1, "model_config.rswa_window", 64, "through a window", V1_METADATA | V1_MIXED),
    (runner_v1, "cache_config.kv_sharing_fast_prefill", True, "share keys", V1_METADATA | V1_MIXED),
    (runner_v1, "routed_experts_initialized", True, "slots are copied", Part.V1_METADATA),
    (runner_v2, "speculator", None, "does not draft", PARTS[runner_v2]),
    (runner_v2, "rejection_sampler", None, "not verified", TAIL),
    (runner_v2, "speculator.acceptance_estimator", object(), "acceptance", Part.V2_DRAFTING),
    (runner_v2, "adaptive_verification", object(), "verified changes", Part.V2_INPUTS | Part.V2_DRAFTING),
    (runner_v2, "vllm_config.parallel_config.data_parallel_size", 2, "draft for all requests", MIXED),
    (runner_v2, "vllm_config.parallel_config.pipeline_parallel_size", 2, "pipeline", TAIL),
    (runner_v2, "vllm_config.parallel_config.decode_context_parallel_size", 2, "split among", TAIL | MIXED),
    (runner_v2, "vllm_config.parallel_config.prefill_context_parallel_size", 2, "split among", TAIL | MIXED),
    (runner_v2, "vllm_config.parallel_config.enable_eplb", True, "experts", TAIL),
    (runner_v2, "vllm_config.parallel_config.enable_elastic_ep", True, "join while the others serve", MIXED),
    (runner_v2, "lora_config", SimpleNamespace(specialize_active_lora=True), "LoRA", MIXED),
    (runner_v2, "model_config.is_encoder_decoder", True, "encoder", TAIL | MIXED),
    (
        runner_v2,
        "model_state.encoder_runner",
        SimpleNamespace(is_realtime=True),
        "between tokens",
        Part.V2_INPUTS | MIXED,
    ),
    (runner_v2, "model_state", ModelStateOfAnother(), "before each step", Part.V2_INPUTS),
    (runner_v2, "aux_output_connector", object(), "hidden states leave", TAIL),
    (runner_v2, "batch_sharder", object(), "part of the batch", Part.V2_SAMPLING),
    (runner_v2, "sampler.return_sampling_mask", True, "sampling masks", Part.V2_SAMPLING),
    (runner_v2, "attn_groups", [[group(FlexAttentionMetadataBuilder)]], "on the host", Part.V2_METADATA),
    (runner_v2, "attn_groups", [[group(Uniform)] * 2], ": Uniform supports UNIFORM_BATCH", MIXED),
    (runner_v2, "attn_groups", [[group(FlashInferMLAMetadataBuilder)]], "not known to serve prompts", MIXED),
    # Its batches of text have mixed graphs.
    (runner_v2, "model_config.is_mm_prefix_lm", True, "see each other", Part.V2_METADATA),
    (runner_v2, "model_config.rswa_window", 64, "through a window", Part.V2_INPUTS | MIXED),
    (runner_v2, "cudagraph_manager.cudagraph_mode", CUDAGraphMode.FULL, "mode is FULL", MIXED),
    (runner_v2, "cudagraph_manager.cudagraph_mode", CUDAGraphMode.PIECEWISE, "mode is PIECEWISE", MIXED),
    (runner_v2, "cudagraph_manager.use_breakable_cg", True, "broken", MIXED),
    (
        runner_v2,
        "vllm_config.kv_transfer_config",
        KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both"),
        "ExampleConnector may load and save prompts layer by layer",
        MIXED,
    ),
    (runner_v2, "fast_prefill", object(), "skip layers", MIXED),
]


@pytest.mark.parametrize("index", range(len(OBSTACLES)))
def test_a_row_that_raises_is_a_reason_for_its_parts_alone(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(_: Any) -> None:
        raise AttributeError("no such thing\nmore")

    row = OBSTACLES[index]
    monkeypatch.setattr(obstacles, "OBSTACLES", [row._replace(find=raises)])
    reasons = {part: why_not(runner_v2(), part) or "" for part in Part}
    assert all(("AttributeError: no such thing, " in reasons[part]) is bool(row.hinders & part) for part in Part)


@pytest.mark.parametrize(("make", "path", "value", "words", "parts"), CASES)
def test_each_row_hinders_its_parts(
    make: Callable[..., Any], path: str, value: Any, words: str, parts: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As up to 0.32.
    monkeypatch.delattr("vllm.v1.worker.gpu.dp_utils.DPSyncState.skip_drafts", raising=False)
    assert refused(change(make(), path, value), make, words) == parts


def test_weights_on_the_host_and_a_count_of_nans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "_instance", UVAOffloader(1 << 30))
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    for make, recorded, sampling in ((runner_v1, PHASE, Part.V1_SAMPLING), (runner_v2, TAIL, Part.V2_SAMPLING)):
        assert refused(make(), make, "loaded from the host") == recorded
        assert refused(make(), make, "VLLM_COMPUTE_NANS_IN_LOGITS") == sampling


def plain_v2() -> Any:
    """A `GPUModelRunner` of V2 without speculation."""
    made = runner_v2()
    made.speculative_config = made.speculator = made.rejection_sampler = None
    made.sampler = type("Sampler", (SimpleNamespace,), {})()
    return made


WITHOUT_DRAFTS = Part.V2_SAMPLING | Part.V2_INPUTS | Part.V2_METADATA | Part.V2_MIXED


@pytest.mark.parametrize(
    ("path", "value", "words", "parts"),
    [
        ("sampler", type("DiffusionSampler", (), {})(), "DiffusionSampler samples", Part.V2_SAMPLING | Part.V2_MIXED),
        ("sampler.trace_replay_state", object(), "bring the tokens", Part.V2_SAMPLING),
        ("attn_groups", [[group(FlexAttentionMetadataBuilder)]], "on the host", Part.V2_METADATA),
        ("vllm_config.parallel_config.enable_eplb", True, "experts", Part.V2_SAMPLING),
        # It embeds, and samples nothing.
        ("sampler", None, "does not draft", WITHOUT_DRAFTS),
        ("vllm_config.is_encoder_only", True, "does not draft", WITHOUT_DRAFTS),
    ],
)
def test_without_drafts_there_are_graphs_of_inputs_and_sampling_unless_they_are_off(
    path: str, value: Any, words: str, parts: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLAIN_DECODE, "0")
    assert refused(plain_v2(), runner_v2, "does not draft") == WITHOUT_DRAFTS | Part.V2_DRAFTING
    monkeypatch.delenv(PLAIN_DECODE)
    assert refused(plain_v2(), runner_v2) == refused(plain_v2(), runner_v2, "does not draft") == Part.V2_DRAFTING
    assert why_not(plain_v2(), TAIL) is None
    assert refused(change(plain_v2(), path, value), runner_v2, words) & WITHOUT_DRAFTS == parts


def test_ranks_of_data_parallelism_have_graphs_of_what_they_agree_on_beforehand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agreed = pytest.importorskip("vllm.v1.worker.gpu.dp_utils", exc_type=ImportError).DPSyncState
    made = change(runner_v2(), "vllm_config.parallel_config.data_parallel_size", 2)
    made.speculative_config.draft_model_config.is_moe = False
    # As up to 0.32.
    monkeypatch.delattr(agreed, "skip_drafts", raising=False)
    assert refused(made, runner_v2) == refused(made, runner_v2, "draft for all requests") == MIXED
    monkeypatch.setattr(agreed, "skip_drafts", False, raising=False)
    assert refused(made, runner_v2) == Part(0)
    assert refused(change(made, "supports_mm_inputs", True), runner_v2, "each other's images") == MIXED
    # As up to 0.29.
    made.speculator = type("EagleSpeculator", (SimpleNamespace,), {})(attn_groups=made.speculator.attn_groups)
    assert refused(made, runner_v2, "agree on each draft pass") == Part.V2_DRAFTING
    # It has no model.
    made.speculative_config.method = "ngram"
    assert not refused(made, runner_v2, "agree on each draft pass")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("vllm_config.parallel_config.enable_elastic_ep", True, "the number of ranks may change"),
        ("vllm_config.parallel_config.all2all_backend", "deepep_low_latency", "deepep_low_latency may need"),
        ("speculative_config.num_speculative_tokens_per_batch_size", [[1, 3]], "the number of drafts"),
        ("speculative_config.method", "draft_model", "draft_model has other passes"),
        ("vllm_config.use_cumem_cudagraph_pool", True, "NCCL may write"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True", "NCCL may write"),
        ("NCCL_LEGACY_CUDA_REGISTER", "1", "NCCL may write"),
        ("VLLM_USE_NCCL_SYMM_MEM", "1", "NCCL may write"),
    ],
)
def test_ranks_that_share_a_drafts_experts_draft_in_graphs_that_exchange_the_same(
    path: str, value: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm.v1.worker.gpu.dp_utils", exc_type=ImportError)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    made = change(runner_v2(), "vllm_config.parallel_config.data_parallel_size", 2)
    assert refused(made, runner_v2, "=shared-experts asks for them") == Part.V2_DRAFTING
    monkeypatch.setenv(MORE_GRAPHS, "shared-experts")
    assert not refused(made, runner_v2, "draft's experts")
    if path.isupper():
        monkeypatch.setenv(path, value)
    else:
        change(made, path, value)
    assert refused(made, runner_v2, f"draft's experts, and {words}") == Part.V2_DRAFTING
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    by_graphs = words == "NCCL may write" and path != "VLLM_USE_NCCL_SYMM_MEM"
    assert bool(refused(made, runner_v2, "draft's experts")) is not by_graphs
    made.speculative_config.draft_model_config.is_moe = False
    assert not refused(made, runner_v2, "draft's experts")


def test_each_stage_of_a_pipeline_has_graphs_of_mixed_batches_and_knows_of_no_image() -> None:
    for last in (True, False):
        made = change(runner_v2(), "vllm_config.parallel_config.pipeline_parallel_size", 2)
        made.is_last_pp_rank = last
        if not last:
            made.speculator = made.sampler = None
        assert why_not(made, MIXED) is None
        assert why_not(made, TAIL) == (
            "stages of a pipeline exchange tokens in the host's order" if last else "this worker does not draft"
        )
        assert refused(change(made, "supports_mm_inputs", True), runner_v2, "each other's images") == MIXED


def test_each_stage_of_a_pipeline_without_a_drafter_has_the_same_reason() -> None:
    """The first stage has no sampler, and the last stage blamed another rank."""
    for last in (True, False):
        made = change(plain_v2(), "vllm_config.parallel_config.pipeline_parallel_size", 2)
        made.is_last_pp_rank = last
        if not last:
            made.sampler = None
        assert why_not(made, MIXED) == "the pipeline has several stages and no drafter"


def test_beside_a_drafter_no_request_brings_the_tokens_that_are_to_be_sampled() -> None:
    assert why_not(change(runner_v2(), "sampler.trace_replay_state", object()), TAIL) is None


def test_all_reasons_are_said_in_order() -> None:
    made = change(runner_v2(), "vllm_config.parallel_config.enable_eplb", True)
    made = change(made, "speculator.acceptance_estimator", object())
    assert why_not(made, Part.V2_SAMPLING) == "experts are counted on the host in each step"
    words = "acceptance is estimated in each step; experts are counted on the host in each step"
    assert why_not(made, TAIL) == why_not(made, Part.V2_DRAFTING) == words


# -- V1 ---------------------------------------------------------------------------------------------------------------


def test_kernels_that_need_smaller_blocks_have_their_tables_made_in_each_step() -> None:
    made = runner_v1()
    made.drafter.draft_attn_groups[0].kernel_block_size = 16
    assert refused(made, runner_v1, "block tables") == PHASE


def test_schedules_for_windows_are_made_in_each_step() -> None:
    for window, hindered in ((None, False), ((-1, -1), False), ((127, 0), True)):
        made = runner_v1()
        made.attn_groups[0].append(group(TritonAttentionMetadataBuilder, aot_schedule=True, aot_sliding_window=window))
        assert refused(made, runner_v1, "windows") == (Part.V1_METADATA if hindered else Part(0))


@pytest.mark.parametrize(
    ("hybrid", "mode", "hindered"), [(True, "align", True), (True, "none", False), (False, "all", False)]
)
def test_states_of_hybrids_are_moved_where_prefixes_are_cached(hybrid: bool, mode: str, hindered: bool) -> None:
    made = change(runner_v1(), "model_config.is_hybrid", hybrid)
    made.cache_config.mamba_cache_mode = mode
    assert refused(made, runner_v1, "mamba_cache_mode is") == (Part.V1_INPUTS if hindered else Part(0))


def test_logits_processors_of_others_leave_v1s_sampling_to_vllm() -> None:
    class Foreign(MinTokensLogitsProcessor):
        pass

    own = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor)
    for classes, hindered in ((own, Part(0)), ((*own, Foreign), Part.V1_SAMPLING)):
        processors = LogitsProcessors([cls.__new__(cls) for cls in classes])
        made = change(runner_v1(), "input_batch.logitsprocs", processors)
        assert refused(made, runner_v1, "Foreign") == refused(made, runner_v1) == hindered


# -- Model Runner V2 --------------------------------------------------------------------------------------------------


class Installed(LogitsProcessor):
    """What a package brings that is installed beside vLLM."""

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        return logits + 1


def test_vllms_own_sampler_is_served_but_not_with_processors_of_an_installed_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM finds them by an entry point; the configuration does not name them."""
    assert refused(change(runner_v2(), "sampler", sampler(monkeypatch)), runner_v2) == Part(0)
    found = EntryPoint("installed", f"{__name__}:{Installed.__name__}", loader.LOGITSPROCS_GROUP)
    monkeypatch.setattr(loader, "entry_points", lambda group: [found])
    made = change(runner_v2(), "sampler", sampler(monkeypatch))
    assert refused(made, runner_v2, "custom logits processors: Installed") == Part.V2_SAMPLING


def test_watermarks_are_not_served() -> None:
    watermarking = pytest.importorskip("vllm.v1.watermarking.gpu_sampler", exc_type=ImportError)
    made = change(runner_v2(), "sampler", object.__new__(watermarking.GPUWatermarkSampler))
    assert refused(made, runner_v2, "watermarked") == TAIL


@pytest.mark.parametrize("non_causal", [False, True])
def test_trtllm_kernels_serve_a_draft_whose_queries_see_no_later_ones(
    non_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_HWPLUGIN_MORE_GRAPHS", "trtllm")
    kernel = SimpleNamespace(name="TRTLLM_GEN")
    made = runner_v2(draft=type("FlashInferBuilder", (), {"flashinfer_trtllm_api_decode_kernel": kernel}))
    made.speculator.requires_non_causal = non_causal
    assert refused(made, runner_v2) == (Part.V2_DRAFTING if non_causal else Part(0))


@pytest.mark.parametrize(
    ("path", "hindered"),
    [
        (FLASH_MLA, Part(0)),
        ("vllm.model_executor.layers.attention.mla_attention.MLACommonMetadataBuilder", Part(0)),
        ("vllm_hwplugin.musa.mla.MusaFlashMLAMetadataBuilder", Part(0)),
        (f"{BACKENDS}.mla.flashmla.FlashMLAMetadataBuilder", Part.V2_METADATA),
    ],
)
def test_mla_is_served_on_v2_and_flashmlas_plans_are_the_hosts(path: str, hindered: Part) -> None:
    made = runner_v2(builder(path), builder(path))
    assert refused(made, runner_v2) & (TAIL | Part.V2_INPUTS | Part.V2_METADATA) == hindered
    made = change(runner_v1(), "attn_groups", [[group(builder(path))]])
    assert refused(made, runner_v1, "on the host") == Part.V1_METADATA


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
    made = runner_v2()
    made.attn_groups[0].append(group(GDNAttentionMetadataBuilder, "layers.1"))
    made.model_state = object.__new__(MambaHybridModelState)
    vars(made.model_state).update(state)
    assert refused(made, runner_v2, "after each step") == (Part(0) if served else TAIL)
    assert refused(made, runner_v2, "before each step") == Part(0)
    assert refused(made, runner_v2, "on the host") == Part.V2_METADATA
    assert refused(made, runner_v2, "gated delta rule") == MIXED


@pytest.mark.parametrize(
    ("folder", "name", "served"),
    [
        # Several MTP layers, one for each draft: it never asks for padding to be masked.
        ("multi_module_mtp", "MultiModuleMTPSpeculator", False),
        ("gemma4", "Gemma4Speculator", True),
        ("dflash2", "DFlash2Speculator", True),
        ("lilicorr", "LiLiCorrSpeculator", True),
    ],
)
def test_drafters_that_share_the_method_of_another_are_served_where_they_share_its_propose(
    folder: str, name: str, served: bool
) -> None:
    module = pytest.importorskip(f"vllm.v1.worker.gpu.spec_decode.{folder}.speculator", exc_type=ImportError)
    cls = getattr(module, name)
    assert ("propose" not in vars(cls)) == served
    made = runner_v2()
    made.speculator.__class__ = cls
    assert refused(made, runner_v2, "drafts in its own way") == (Part(0) if served else Part.V2_DRAFTING)


def test_a_draft_model_is_served_where_a_graph_can_make_all_of_its_metadata() -> None:
    """That of its first pass, too, which other drafters share with the target."""
    module = "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator"
    newer = pytest.importorskip(module, exc_type=ImportError).StandaloneARSpeculator
    # Of 0.31.
    older = type("PlainDraftModelSpeculator", (newer,), {})
    views, planned = (FlashAttentionMetadataBuilder, Part(0)), (builder(FLASH_MLA), Part.V2_DRAFTING)
    for cls, (draft, hindered) in itertools.product((newer, older), (views, planned)):
        made = runner_v2(draft=draft)
        assert refused(made, runner_v2, "in each step (Fl") == Part(0)
        made = change(made, "speculative_config.method", "draft_model")
        made.speculator.__class__ = cls
        assert refused(made, runner_v2) == refused(made, runner_v2, "in each step (Fl") == hindered


def test_n_grams_are_served_without_any_metadata() -> None:
    module = "vllm.v1.worker.gpu.spec_decode.ngram.speculator"
    made = change(runner_v2(), "speculative_config.method", "ngram")
    made.speculator = object.__new__(pytest.importorskip(module, exc_type=ImportError).NgramGPUSpeculator)
    assert refused(made, runner_v2) == Part(0)


#: Rows that a single change of a drafter or runner does not show in each part; tests above have more for it.
OTHERS: Final = {
    "weights are loaded from the host in each step",
    "VLLM_COMPUTE_NANS_IN_LOGITS is set",
    "{} drafts in its own way",
    "{} samples in its own way",
    "some layers have a gated delta rule, and {}",
    "how many drafts are verified changes from step to step, and {}",
    "requests may bring the tokens that are to be sampled",
    "mamba_cache_mode is {}, whose states are moved on the host",
    "{} has its own work after each step",
    "there are custom logits processors: {}",
    "samples are watermarked",
    "block tables of the draft layers are made again in each step",
    "metadata must be built in each step ({})",
    "ranks of data parallelism agree on each draft pass on the host",
    "ranks of data parallelism share the draft's experts, and {}",
    "ranks of data parallelism, and stages of a pipeline, do not know of each other's images",
    "ranks of data parallelism do not know of each other's longest requests",
    "a schedule for windows depends on the longest sequence",
    "the pipeline has several stages and no drafter",
}


def test_each_part_of_each_row_has_a_case() -> None:
    lacking = set()
    for row in OBSTACLES:
        left = row.hinders
        for make, path, value, words, parts in CASES:
            if left & PARTS[make] and words != "does not draft":
                found = row.find(change(make(), path, value))
                left &= ~parts if found and words in row.reason.format(found) else ~Part(0)
        if left:
            lacking.add(row.reason)
    assert lacking == OTHERS


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
