# SPDX-License-Identifier: Apache-2.0
"""Which graphs well-known launches have, and the page that is made from it.

Each launch is built from what the table of obstacles reads: the classes of attention builders, the drafter and the
configuration. Nothing is loaded. `python -m tests.spec_decode.test_launches` writes docs/launches.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest import mock

import pytest

pytest.importorskip("vllm.v1.worker.gpu.model_runner", exc_type=ImportError)

from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.dp_utils import DPSyncState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from vllm_hwplugin.spec_decode.obstacles import Part, why_not

from .metadata_builders import FLASH_MLA
from .test_obstacles import change, runner_v2

PAGE: Final = Path(__file__).parents[2] / "docs" / "launches.md"
TEXT: Final = """# Which graphs popular launches have

Parts of a step that run in graphs with the plugin, on Model Runner V2: **S** sampling, **D** drafting, **I** inputs,
**M** also attention metadata, **X** batches with prompts (FULL graphs). (X): with `--gdn-prefill-backend triton`.
"none": vLLM has no FULL graphs there.

| launch | H100, H200 | B200 | A100, L40S, RTX 4090 |
|---|---|---|---|
{rows}

- The table is computed from the reasons of [obstacles.md](obstacles.md), for default attention backends as read in vLLM
  0.32 and 0.33. No launch was started for it; [model-runner-v2.md](model-runner-v2.md#how-it-is-known) says what ran.
- Your engine's log line and `vllm-hwplugin doctor` say what your engine has.
- On B200 FLASHINFER runs TRTLLM kernels, whose graphs `VLLM_HWPLUGIN_MORE_GRAPHS=trtllm` asks for.
- With DP8 a drafter with experts has D with `VLLM_HWPLUGIN_MORE_GRAPHS=shared-experts`.
- X of a model that takes images is for batches of text. X over FlashAttention 2 and 4 was never run on a GPU.
- On H100 {basic} of {all} launches have sampling and inputs in graphs, and {mixed} batches with prompts; {named} with
  `--gdn-prefill-backend triton` where the target has a gated delta rule.
- [(X) was measured](model-runner-v2.md#gated-delta-rule) with Qwen3.5-4B's shape, not with long prompts, which
  FlashInfer's kernels may compute faster.
- With an fp8 KV cache on Ada, `--attention-backend TRITON_ATTN` keeps the graphs that vLLM up to 0.32 drops.
- Tokens of an image see each other in Gemma 4 31B and 26B-A4B, not in E4B: vLLM 0.30 and newer choose attention for
  H100 and B200 that has no FULL graphs with a drafter. `--attention-backend TRITON_ATTN` has them; compare the times,
  because the kernels differ.

## Why batches with prompts have no graph on H100

A graph repeats the shapes and the kernels of its capture. The attention below decides them on the host in each step, as
read in vLLM 0.33.

{reasons}

This page is made from `tests/spec_decode/test_launches.py` by `make docs`.
"""

_BACKENDS = "vllm.v1.attention.backends"
_ALWAYS, _UNIFORM = AttentionCGSupport.ALWAYS, AttentionCGSupport.UNIFORM_BATCH


class Attention(NamedTuple):
    """A builder by its class, what it declares, and the FlashAttention version or kernel of its layers."""

    path: str
    support: AttentionCGSupport = _UNIFORM
    flash: int | None = None
    kernel: str = ""
    #: Why no graph takes a batch with prompts.
    host: str = ""


FLASH = {
    version: Attention(f"{_BACKENDS}.flash_attn.FlashAttentionMetadataBuilder", support, version)
    for version, support in ((2, _UNIFORM), (3, _ALWAYS), (4, _UNIFORM))
}
TRITON = Attention(f"{_BACKENDS}.triton_attn.TritonAttentionMetadataBuilder", _ALWAYS)
FLASHINFER = Attention(f"{_BACKENDS}.flashinfer.FlashInferMetadataBuilder")
TRTLLM = FLASHINFER._replace(kernel="TRTLLM_GEN")
GDN = Attention(
    f"{_BACKENDS}.gdn_attn.GDNAttentionMetadataBuilder",
    host="gated delta rule: FlashInfer, vLLM's choice for prompts on Hopper and Blackwell, may read lengths on the "
    "host; with `--gdn-prefill-backend triton` there are graphs, except with data parallelism",
)
MAMBA = Attention(
    f"{_BACKENDS}.mamba2_attn.Mamba2AttentionMetadataBuilder",
    host="Mamba 2: decodes and prompts have different kernels, and prompts are cut into chunks",
)
SPARSE_MLA = Attention(
    f"{_BACKENDS}.mla.flashmla_sparse.FlashMLASparseMetadataBuilder",
    host="sparse MLA: keys of prompts are gathered in chunks as large as a workspace",
)
INDEXER = Attention(
    f"{_BACKENDS}.mla.indexer.DeepseekV32IndexerMetadataBuilder",
    host="its indexer: prompts are cut into chunks as large as a workspace",
)
V4 = (
    Attention(
        "vllm.models.deepseek_v4.sparse_mla.DeepseekV4FlashMLAMetadataBuilder",
        _ALWAYS,
        host="sparse MLA: decodes and prompts have different kernels, though it declares `ALWAYS`",
    ),
    INDEXER,
)
FLASHMLA = Attention(
    f"{_BACKENDS}.mla.flashmla.FlashMLAMetadataBuilder",
    host="FLASHMLA: decodes and prompts have different kernels, and decodes all have the same number of tokens",
)
FLASH_ATTN_MLA = Attention(
    FLASH_MLA,
    host="FLASH_ATTN_MLA: prompts of more than 512 tokens have another kernel; other steps have graphs with "
    "`VLLM_HWPLUGIN_MORE_GRAPHS=mla-prompts`",
)
FLASHINFER_MLA = Attention(f"{_BACKENDS}.mla.flashinfer_mla.FlashInferMLAMetadataBuilder", _ALWAYS)
OWN = Attention(
    "vllm.models.minimax_m3.common.sparse_attention.MiniMaxM3SparseMetadataBuilder",
    host="sparse attention: decodes and prompts have different kernels, and decodes all have the same number of tokens",
)
COMPOSITE = Attention(
    f"{_BACKENDS}.composite.CompositeAttentionMetadataBuilder",
    AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    host="TRITON_FLASH_ATTN: an image in a batch decides which kernel runs, so vLLM has no FULL graphs with a drafter; "
    "steps of text have graphs with `VLLM_HWPLUGIN_MORE_GRAPHS=image-spans`",
)

#: What vLLM chooses for layers of plain attention.
GPUS: Final = {"hopper": FLASH[3], "blackwell": TRTLLM, "older": FLASH[2]}


class Launch(NamedTuple):
    """One launch; `target` and `draft` by GPU. None: as the target, or none that the GPU has memory or kernels for."""

    name: str
    target: Mapping[str, tuple[Attention, ...] | None]
    draft: Mapping[str, tuple[Attention, ...]] | None = None
    drafter: str = "MTPSpeculator"
    method: str = "mtp"
    #: Attributes of the runner.
    more: Mapping[str, Any] = {}
    hybrid: bool = False
    without_graphs: tuple[str, ...] = ()


def plain(*others: Attention) -> dict[str, tuple[Attention, ...] | None]:
    return {gpu: (attention, *others) for gpu, attention in GPUS.items()}


def on_large(*attention: Attention, blackwell: tuple[Attention, ...] = ()) -> dict[str, tuple[Attention, ...] | None]:
    return {"hopper": attention, "blackwell": blackwell or attention, "older": None}


_EAGLE: Final = {"drafter": "EagleSpeculator", "method": "eagle3"}
_IMAGES: Final = {"supports_mm_inputs": True}
_DP: Final = {"vllm_config.parallel_config.data_parallel_size": 8}
_DENSE_DRAFT: Final = {"speculative_config.draft_model_config.is_moe": False}

_DENSE_MLA: Final = on_large(FLASHMLA, blackwell=(FLASHINFER_MLA,))

LAUNCHES: Final = (
    Launch("Llama-3.1-8B, Eagle3", plain(), **_EAGLE),
    Launch(
        "Qwen3-8B, DFlash",
        plain(),
        {"hopper": (FLASH[3],), "blackwell": (FLASH[4],), "older": (FLASH[2],)},
        "DFlashSpeculator",
        "dflash",
    ),
    Launch("Qwen3-8B-FP8, TP2, Eagle3", plain(), **_EAGLE),
    Launch("Qwen3-32B, TP2, Eagle3", plain(), **_EAGLE),
    Launch("Qwen3-30B-A3B, Eagle3", plain(), **_EAGLE),
    Launch("Qwen3-30B-A3B, DP2, Eagle3", plain(), **_EAGLE, more={**_DP, **_DENSE_DRAFT}),
    # FlashAttention 2 has no attention sinks.
    Launch("gpt-oss-20b and 120b, Eagle3", {**plain(), "older": (TRITON,)}, **_EAGLE),
    Launch("Qwen3.5-4B and 9B, MTP", plain(GDN), plain(), more=_IMAGES, hybrid=True),
    Launch(
        "Qwen3.6-27B and 35B-A3B, MTP, fp8 KV cache",
        plain(GDN),
        plain(),
        more=_IMAGES,
        hybrid=True,
        without_graphs=("older",),
    ),
    Launch("Qwen3.5-397B, TP8, MTP", {**plain(GDN), "older": None}, plain(), more=_IMAGES, hybrid=True),
    Launch("Qwen3.5-397B, DP8, MTP", {**plain(GDN), "older": None}, plain(), more={**_IMAGES, **_DP}, hybrid=True),
    Launch("Qwen3-Next-80B, TP4, MTP", plain(GDN), plain(), hybrid=True),
    Launch("Qwen3-VL-8B, Eagle3", plain(), more=_IMAGES, **_EAGLE),
    Launch(
        "Gemma 4 31B and 26B-A4B, assistant",
        {"hopper": (COMPOSITE,), "blackwell": (COMPOSITE,), "older": (TRITON,)},
        drafter="Gemma4Speculator",
        more={**_IMAGES, "model_config.is_mm_prefix_lm": True},
        without_graphs=("hopper", "blackwell"),
    ),
    Launch(
        "the same with `--attention-backend TRITON_ATTN`",
        dict.fromkeys(GPUS, (TRITON,)),
        drafter="Gemma4Speculator",
        more={**_IMAGES, "model_config.is_mm_prefix_lm": True},
    ),
    Launch(
        "the same with `--language-model-only`",
        {"hopper": (FLASH[4],), "blackwell": (TRITON,), "older": (TRITON,)},
        drafter="Gemma4Speculator",
        more={"model_config.is_mm_prefix_lm": True},
    ),
    Launch(
        "Gemma 4 E4B, assistant",
        {"hopper": (FLASH[4],), "blackwell": (TRITON,), "older": (TRITON,)},
        drafter="Gemma4Speculator",
        more=_IMAGES,
    ),
    Launch("DeepSeek-V3.1, TP8, MTP", on_large(FLASH_ATTN_MLA, blackwell=(FLASHINFER_MLA,))),
    Launch("DeepSeek-V3.2 and GLM-5.2, TP8, MTP", on_large(SPARSE_MLA, INDEXER)),
    Launch("DeepSeek-V3.2, DP8, MTP", on_large(SPARSE_MLA, INDEXER), more=_DP),
    Launch("DeepSeek-V4-Flash, MTP", on_large(*V4)),
    Launch("GLM-4.7, TP8, MTP", {**plain(), "older": None}),
    Launch("GLM-4.7, DP8, MTP", {**plain(), "older": None}, more=_DP),
    Launch("Kimi-K2.6, TP8, Eagle3, fp8 KV cache", _DENSE_MLA, more=_IMAGES, **_EAGLE),
    Launch("MiniMax-M3, TP8, Eagle3", on_large(OWN), more=_IMAGES, **_EAGLE),
    Launch("Nemotron-3-Super, MTP", plain(MAMBA), plain(), hybrid=True),
    Launch("Step-3.7 and MiMo-V2.5, MTP layers", {**plain(), "older": None}, drafter="MultiModuleMTPSpeculator"),
    Launch("Kimi-K2, DSpark, not adaptive", _DENSE_MLA, drafter="DSparkSpeculator", method="dspark"),
)


def group_of(attention: Attention, layers: dict[str, Any], prefill: str = "triton") -> Any:
    module, _, name = attention.path.rpartition(".")
    body = {"__module__": module, "get_cudagraph_support": lambda *_: attention.support}
    made = type(name, (), body)()
    if attention.kernel:
        made.flashinfer_trtllm_api_decode_kernel = SimpleNamespace(name=attention.kernel)
    layer = f"layers.{len(layers)}"
    layers[layer] = SimpleNamespace(impl=SimpleNamespace(vllm_flash_attn_version=attention.flash))
    if attention is GDN:
        made.gdn_prefill_backend, made.checkpoint_builder = prefill, None
        layers[layer] = type("QwenGatedDeltaNetAttention", (), {})()
    return SimpleNamespace(
        layer_names=[layer], kv_cache_spec=None, get_metadata_builder=lambda ubatch=0: made, kernel_block_size=None
    )


def runner_of(launch: Launch, gpu: str, prefill: str = "") -> Any:
    """`prefill` computes prompts of a gated delta rule; empty for vLLM's choice."""
    prefill = prefill or ("triton" if gpu == "older" else "flashinfer")
    runner, layers = runner_v2(), {}
    target = launch.target[gpu]
    assert target is not None
    runner.attn_groups = [[group_of(attention, layers, prefill)] for attention in target]
    runner.compilation_config = SimpleNamespace(static_forward_context=layers)
    speculator = type(launch.drafter, (SimpleNamespace,), {})()
    draft = target if launch.draft is None else launch.draft[gpu]
    speculator.attn_groups = [[group_of(attention, {})] for attention in draft]
    speculator.requires_non_causal = launch.method == "dflash"
    speculator._build_uniform_batch_dp_sync = None
    runner.speculator, runner.speculative_config.method = speculator, launch.method
    if launch.hybrid:
        runner.model_state = object.__new__(MambaHybridModelState)
        vars(runner.model_state).update(_align_mode=False, recoverssm=None)
    if gpu in launch.without_graphs:
        runner.cudagraph_manager.cudagraph_mode = CUDAGraphMode.PIECEWISE
    for path, value in launch.more.items():
        change(runner, path, value)
    return runner


def parts_of(launch: Launch, gpu: str) -> str:
    """Letters of the parts that are in graphs, and in brackets of those that an option adds."""
    if launch.target[gpu] is None:
        return "-"
    parts, more = _parts(runner_of(launch, gpu)), _parts(runner_of(launch, gpu, "triton"))
    return parts if parts == more else f"{parts}({more.removeprefix(parts)})"


def _parts(runner: Any) -> str:
    if runner.cudagraph_manager.cudagraph_mode.decode_mode() != CUDAGraphMode.FULL:
        return "none"
    parts = (Part.V2_SAMPLING, Part.V2_DRAFTING, Part.V2_INPUTS, Part.V2_METADATA, Part.V2_MIXED)
    # As of 0.33.
    with mock.patch.object(DPSyncState, "skip_drafts", False, create=True):
        sampling, drafting, inputs, metadata, mixed = (why_not(runner, part) is None for part in parts)
    inputs &= sampling or drafting
    # If vLLM drafts, vLLM makes the metadata.
    has = {"S": sampling, "D": drafting, "I": inputs, "M": inputs and drafting and metadata, "X": mixed}
    return "".join(letter for letter, held in has.items() if held) or "none"


def markdown() -> str:
    rows = (f"| {launch.name} | {' | '.join(parts_of(launch, gpu) for gpu in GPUS)} |" for launch in LAUNCHES)
    hopper = [parts_of(launch, "hopper") for launch in LAUNCHES]
    lacking: dict[str, list[str]] = {}
    for launch, parts in zip(LAUNCHES, hopper, strict=True):
        if not parts.endswith("X"):
            reason = "; ".join(attention.host for attention in launch.target["hopper"] or () if attention.host)
            lacking.setdefault(reason, []).append(launch.name)
    reasons = (f"- {reason} ({'; '.join(names)})" for reason, names in lacking.items())
    basic, mixed = sum({"S", "I"} <= {*parts} for parts in hopper), sum(parts.endswith("X") for parts in hopper)
    counts = {"basic": basic, "mixed": mixed, "named": sum("X" in parts for parts in hopper), "all": len(hopper)}
    return TEXT.format(rows="\n".join(rows), reasons="\n".join(reasons), **counts)


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run `make docs`"


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.name)
def test_a_launch_lacks_graphs_of_prompts_only_where_attention_works_on_the_host(launch: Launch) -> None:
    target = launch.target["hopper"]
    assert target is not None
    assert parts_of(launch, "hopper").endswith("X") != any(attention.host for attention in target)


if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
