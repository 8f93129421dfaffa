# SPDX-License-Identifier: Apache-2.0
"""Which patched-in features a worker of vLLM uses, and why not the others.

It depends on the model runner, the speculative method, the CUDA graph mode and the model. What a feature reports by
itself (`vllm_hwplugin.journal.use`) takes precedence over this table.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from packaging.version import Version
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON

from vllm_hwplugin import features, gates
from vllm_hwplugin.journal import Journal
from vllm_hwplugin.linear import layers
from vllm_hwplugin.spec_decode import capture_sizes, dflash_context_norm, step_counts
from vllm_hwplugin.spec_decode.drafters import CACHED_METHODS, MASK_METHODS
from vllm_hwplugin.spec_decode.engine_report import NO_SPECULATION, UNNEEDED, Findings, Unused, report, use_of
from vllm_hwplugin.spec_decode.obstacles import decodes_plainly
from vllm_hwplugin.spec_decode.v1.draft_decision import drafter_obstacle

# They make an engine faster, so where one is not used, something is lost.
_GRAPHS: Final = (
    features.DRAFT_FULL_GRAPH,
    features.DRAFT_LOOP_GRAPH,
    features.DFLASH_FULL_GRAPH,
    features.V1_DRAFT_PHASE,
    features.V2_STEP_INPUTS,
    features.V2_TAIL_GRAPH,
    features.V2_MIXED_GRAPHS,
    features.V2_FUSED_DRAFTS,
    features.V1_STEP_INPUTS,
)

_BIASED_LOADERS: Final = ("llama_eagle", "llama4_eagle", "llama_eagle3")


def report_worker(worker: Any) -> None:
    """Say what a worker uses: the last thing that the patched `compile_or_warm_up_model` does.

    Args:
        worker: vLLM's `Worker`, or that of another platform; its runner is ready to serve.
    """
    report(worker, _examine)
    step_counts.begin()


def _examine(worker: Any, entry: Journal) -> Findings:
    config, spec = worker.vllm_config, worker.vllm_config.speculative_config
    drafts_here = _drafter(worker) is not None
    counts = drafts_here or _decodes_plainly(worker)
    drafts = "no speculation" if spec is None else f"{spec.method} k={spec.num_speculative_tokens}"
    reasons = why_unused(worker, Version(entry.vllm_version or "0"))
    return Findings(
        # Everything that decides.
        described=f"worker {worker.rank} ({current_platform.device_type}, Model Runner "
        f"{'V2' if worker.use_v2_model_runner else 'V1'}, {drafts}, {config.compilation_config.cudagraph_mode.name} "
        "graphs)",
        uses={name: use_of(found) for name, found in reasons.items() if name in entry.live},
        # A stage of a pipeline that does not draft leaves it to the last one.
        demanded=_GRAPHS if spec is None or drafts_here else (),
        # Ranks of tensor parallelism take the same steps.
        engine=config.parallel_config.data_parallel_index if worker.is_driver_worker and counts else None,
    )


def _drafter(worker: Any) -> Any:
    """What drafts in this worker; with pipeline parallelism only the last stage does."""
    return getattr(worker.model_runner, "speculator" if worker.use_v2_model_runner else "drafter", None)


def _decodes_plainly(worker: Any) -> bool:
    return bool(worker.use_v2_model_runner) and decodes_plainly(worker.model_runner)


def _no_graphs(config: Any) -> Unused:
    """Whether decode batches have no FULL CUDA graphs, and what to change."""
    mode = config.compilation_config.cudagraph_mode
    cause = f"decode batches have no FULL CUDA graphs (cudagraph_mode {mode.name})"
    cure = "set cudagraph_mode FULL_AND_PIECEWISE; if vLLM lowered it, choose another --attention-backend"
    if mode.name == "NONE":
        cpu = current_platform.device_type == "cpu"
        cause = f"this engine has no CUDA graphs ({'CPU device' if cpu else 'cudagraph_mode NONE'})"
        if cpu:
            cure = ""
        elif config.model_config.enforce_eager:
            cause, cure = "this engine has no CUDA graphs", "start it without --enforce-eager"
    return Unused(
        f"the target's cudagraph_mode is {mode.name}", mode.decode_mode().name != "FULL", cause=cause, cure=cure
    )


def why_unused(worker: Any, vllm: Version) -> dict[str, tuple[Unused, ...]]:
    """Return by feature of the model runner the reasons not to use it; the first that holds counts.

    Args:
        worker: one whose model is loaded and whose KV cache is set up.
        vllm: the version.
    """
    config, drafter = worker.vllm_config, _drafter(worker)
    spec, model, parallel = config.speculative_config, config.model_config, config.parallel_config
    mode, v2 = config.compilation_config.cudagraph_mode, bool(worker.use_v2_model_runner)
    method = None if spec is None else spec.method
    few = spec is not None and spec.num_speculative_tokens < 3
    named = config.attention_config.backend is not None or getattr(spec, "attention_backend", None) is not None
    sizes_left = capture_sizes.why_left(config.compilation_config)

    def other_method(wants: str, *methods: str) -> Unused:
        text = f"the speculative method is {method}"
        return Unused(text, method not in methods, cause=f"the drafter is {method}", wants=wants)

    def on_v2(own: str) -> Unused:
        return Unused(f"Model Runner V2 has {own}", v2, cause="the engine runs on Model Runner V2", wants="V1")

    def unneeded(text: str, holds: object) -> Unused:
        return Unused(text, holds, cause=UNNEEDED)

    def loaded_otherwise() -> bool:
        return type(getattr(drafter, "model", None)).__module__.rpartition(".")[2] not in _BIASED_LOADERS

    def windowless() -> bool:
        groups = (group for one in getattr(drafter, "attn_groups", None) or () for group in one)
        return not any(getattr(group.kv_cache_spec, "sliding_window", None) for group in groups)

    speculates = NO_SPECULATION._replace(holds=spec is None)
    dflash, dflashes = other_method("DFlash", "dflash"), other_method("DFlash", *MASK_METHODS)
    cached = other_method("drafters with a KV cache", *CACHED_METHODS)
    elsewhere = Unused(
        "another stage of the pipeline drafts",
        spec is not None and drafter is None,
        cause="another stage of the pipeline drafts",
    )
    drafts = (speculates, elsewhere)
    on_v1 = Unused("the engine runs on Model Runner V1", not v2, cause="the engine runs on Model Runner V1", wants="V2")
    unasked = NO_SPECULATION._replace(
        text=f"there is no speculative decoding, and {gates.PLAIN_DECODE} is not set",
        holds=lambda: (
            spec is None and not (gates.read(gates.PLAIN_DECODE).flag and (not v2 or _decodes_plainly(worker)))
        ),
        cure=f"--speculative-config, or {gates.PLAIN_DECODE}=1",
    )
    tail = (unasked, elsewhere)
    graphless = _no_graphs(config)
    one_rank = unneeded("there is one data parallel rank", parallel.data_parallel_size == 1)
    uncovered = Unused(
        f"{method} runs no draft model that the feature covers",
        lambda: not hasattr(drafter, "draft_graphs"),
        cause=f"the drafter is {method}",
        wants="drafters that run a model",
    )
    v1_graphs = (
        *drafts,
        on_v2("drafting code and CUDA graphs of its own"),
        uncovered,
        graphless,
        Unused("{}", lambda: drafter_obstacle(drafter, mode)),
    )
    # By the parts of the feature for each version; what it does for other drafters of 0.21 and 0.22 it says by itself.
    backend: tuple[Unused, ...] = (
        on_v2("no use for the code that the feature changes"),
        unneeded("the target has no images that are seen in both directions", not model.is_mm_prefix_lm),
    )
    if vllm < Version("0.21.0"):
        backend = ()
    elif Version("0.24.0") <= vllm < Version("0.25.0"):
        backend = (
            unneeded("the V1 runner of this vLLM selects the draft's backend by itself", not v2),
            unneeded("no attention backend is named, so the draft selects its own anyway", not named),
        )
    return {
        features.CAPTURE_SIZES: (speculates, graphless, Unused("the capture sizes are vLLM's: {}", sizes_left)),
        features.DRAFT_FULL_GRAPH: v1_graphs,
        features.DRAFT_LOOP_GRAPH: v1_graphs,
        features.DFLASH_FULL_GRAPH: (speculates, dflash, *v1_graphs),
        # What else stands against graphs is found when they are captured (`obstacles`).
        features.V1_DRAFT_PHASE: v1_graphs,
        features.V1_STEP_INPUTS: (*drafts, on_v2("step inputs of its own"), graphless),
        features.V2_STEP_INPUTS: (*tail, on_v1, graphless),
        features.V2_TAIL_GRAPH: (*tail, on_v1, graphless),
        features.V2_MIXED_GRAPHS: (*tail, on_v1),
        features.DFLASH_DRAFT_BACKEND: (speculates, dflash, *drafts, *backend),
        features.DFLASH_CONTEXT_NORM: (
            speculates,
            dflashes,
            *drafts,
            Unused("{}", dflash_context_norm.context_norm_obstacle),
        ),
        features.V2_DRAFT_METADATA: (
            *drafts,
            on_v1,
            unneeded("vLLM makes the metadata of one or two draft tokens", few),
        ),
        features.V2_FUSED_DRAFTS: (
            *drafts,
            on_v1,
            Unused(
                f"{method} does not draft step by step",
                lambda: not hasattr(drafter, "fused_drafts"),
                cause=f"the drafter is {method}",
                wants="drafters that draft step by step",
            ),
            graphless,
        ),
        features.V2_CAPTURE_METADATA: (
            *drafts,
            on_v1,
            unneeded(f"{method} builds the metadata that it captures with", method in MASK_METHODS),
            graphless,
        ),
        features.V2_GRAPH_ADDRESSES: (
            on_v1,
            unneeded("the engine never sleeps: sleep mode is off", not model.enable_sleep_mode),
        ),
        features.NWOR: (speculates,),
        features.LINEAR: (
            unneeded("this is no GPU of compute capability 9.0, or VLLM_BATCH_INVARIANT is on", not layers.ON_HOPPER),
            unneeded("the model is not in bfloat16", model.dtype is not torch.bfloat16),
        ),
        # Some of them work in the scheduler; that they are used follows from the configuration that a worker has, too.
        features.BACKPORT_DP_DRAFTER: (speculates, cached, *drafts, one_rank, on_v2("drafters of its own")),
        features.BACKPORT_DRAFT_LOOKAHEAD: (
            speculates,
            cached,
            unneeded(
                "vLLM allocates blocks that a KV connector may send or load", config.kv_transfer_config is not None
            ),
        ),
        features.BACKPORT_DRAFT_SCHEDULE: (
            speculates,
            dflashes,
            *drafts,
            on_v1,
            unneeded("no layer of the draft has a sliding window", windowless),
        ),
        features.BACKPORT_EAGLE_BIAS: (
            *drafts,
            unneeded(f"no draft was loaded by {', '.join(_BIASED_LOADERS)}", loaded_otherwise),
        ),
        features.BACKPORT_MIXED_GRAPHS: (
            on_v1,
            unneeded("batches with prompts have no FULL graphs", mode.mixed_mode().name != "FULL"),
        ),
        features.BACKPORT_MTP_EMBEDDINGS: (
            speculates,
            other_method("MTP", "mtp"),
            *drafts,
            on_v2("code for embeddings of its own"),
        ),
        features.BACKPORT_NAN_LOGITS: (*drafts, on_v1),
        features.BACKPORT_PADDED_REQUEST: (speculates,),
        features.BACKPORT_PIPELINE_DRAFTS: (
            speculates,
            unneeded("the pipeline has one stage", parallel.pipeline_parallel_size == 1),
        ),
        features.BACKPORT_REASONING_END: (
            speculates,
            unneeded(
                "no reasoning parser is named for structured outputs",
                not config.structured_outputs_config.reasoning_parser,
            ),
        ),
        features.BACKPORT_RECOVERED_TOKEN: (*drafts, on_v2("a sampler of its own")),
        features.BACKPORT_TOP_K_TOP_P: (
            unneeded("the model is for pooling, and samples nothing", model.runner_type == "pooling"),
            unneeded("there is no Triton, and vLLM sorts", not HAS_TRITON),
            # What its hunks for 0.32 change, V1 does not ask for.
            *((on_v1,) if vllm >= Version("0.32.0") else ()),
        ),
        features.BACKPORT_VACATED_ROW: (
            on_v2("block tables of its own"),
            unneeded("the model has no states but keys and values", not model.has_inner_state),
            one_rank,
        ),
    }
