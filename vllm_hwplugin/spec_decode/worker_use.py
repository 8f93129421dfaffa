# SPDX-License-Identifier: Apache-2.0
"""Which live features a worker of vLLM uses, and why it does not use the others.

It depends on the model runner, the speculative method, the CUDA graph mode and the model. What a feature found out by
itself outweighs what stands here (`vllm_hwplugin.journal.use`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from packaging.version import Version
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON

from vllm_hwplugin import features, gates
from vllm_hwplugin.journal import Journal
from vllm_hwplugin.linear import layers
from vllm_hwplugin.spec_decode import capture_sizes, dflash_context_norm, step_counts
from vllm_hwplugin.spec_decode.engine_report import Findings, report, use_of
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

# Their draft models norm the context keys of all layers in one call, in the method that the feature patches.
_DFLASH_FAMILY: Final = ("dflash", "dspark", "dflash2")
# Their drafts have keys and values of their own in the KV cache.
_CACHED_DRAFTS: Final = ("eagle", "eagle3", "mtp", "dflash", "draft_model")
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
    unused = _unused(worker, Version(entry.vllm_version or "0"))
    return Findings(
        # Everything that decides.
        described=f"worker {worker.rank} ({current_platform.device_type}, Model Runner "
        f"{'V2' if worker.use_v2_model_runner else 'V1'}, {drafts}, {config.compilation_config.cudagraph_mode.name} "
        "graphs)",
        uses={name: use_of(reasons) for name, reasons in unused.items() if name in entry.live},
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


def _unused(worker: Any, vllm: Version) -> dict[str, Mapping[str, object]]:
    """By feature of the model runner, what would leave it without use, each with whether that is so.

    Args:
        worker: one whose model is loaded and whose KV cache is set up.
        vllm: the version.
    """
    config, drafter = worker.vllm_config, _drafter(worker)
    spec, model, parallel = config.speculative_config, config.model_config, config.parallel_config
    mode, v2 = config.compilation_config.cudagraph_mode, bool(worker.use_v2_model_runner)
    method = None if spec is None else spec.method
    few = spec is not None and spec.num_speculative_tokens < 3
    kind = "" if drafter is None else type(drafter).__name__
    covered = drafter is not None and hasattr(drafter, "draft_graphs")
    passes = drafter_obstacle(drafter, mode) if covered else None
    own_norm = dflash_context_norm.context_norm_obstacle()
    drafted_by = type(getattr(drafter, "model", None)).__module__.rpartition(".")[2]
    groups = (group for one in getattr(drafter, "attn_groups", None) or () for group in one) if v2 else ()
    named = config.attention_config.backend is not None or getattr(spec, "attention_backend", None) is not None

    def of(*methods: str) -> dict[str, object]:
        return speculates | {f"the speculative method is {method}": method not in methods}

    def on_v2(own: str) -> dict[str, object]:
        return {f"Model Runner V2 has {own} of its own": v2}

    speculates: dict[str, object] = {"there is no speculative decoding": spec is None}
    elsewhere: dict[str, object] = {"another stage of the pipeline drafts": drafter is None}
    drafts = speculates | elsewhere
    on_v1 = {"the engine runs on Model Runner V1": not v2}
    plain = spec is None and gates.read(gates.PLAIN_DECODE).flag
    unasked: dict[str, object] = {
        f"there is no speculative decoding, and {gates.PLAIN_DECODE} is not set": spec is None
    }
    tail = {} if plain and (not v2 or _decodes_plainly(worker)) else unasked | elsewhere
    decodes: dict[str, object] = {"the target does not decode in FULL CUDA graphs": mode.decode_mode().name != "FULL"}
    one_rank: dict[str, object] = {"there is one data parallel rank": parallel.data_parallel_size == 1}
    v1_graphs = drafts | {
        "Model Runner V2 drafts with code and CUDA graphs of its own": v2,
        f"{kind or method} runs no draft model that the feature covers": not covered,
        f"{passes}": passes,
    }
    # By the parts of the feature for each version; what it does for other drafters of 0.21 and 0.22 it says by itself.
    backend: dict[str, object] = {
        "Model Runner V2 builds the draft without the code that the feature changes": v2,
        "the target has no images that are seen in both directions": not model.is_mm_prefix_lm,
    }
    if vllm < Version("0.21.0"):
        backend = {}
    elif Version("0.24.0") <= vllm < Version("0.25.0"):
        backend = {
            "the V1 runner of this vLLM selects the draft's backend by itself": not v2,
            "no attention backend is named, so the draft selects its own anyway": not named,
        }
    return {
        # Why the sizes are vLLM's or the user's is in the journal of the process that made the configuration.
        features.CAPTURE_SIZES: speculates
        | {"the capture sizes are not the plugin's": capture_sizes.largest_own(config.compilation_config) is None}
        | decodes,
        features.DRAFT_FULL_GRAPH: v1_graphs,
        features.DRAFT_LOOP_GRAPH: v1_graphs,
        features.DFLASH_FULL_GRAPH: of("dflash") | v1_graphs,
        # What else stands against graphs is found when they are captured (`obstacles`).
        features.V1_DRAFT_PHASE: v1_graphs | decodes,
        features.V1_STEP_INPUTS: drafts | {"the engine runs on Model Runner V2": v2} | decodes,
        features.V2_STEP_INPUTS: tail | on_v1 | decodes,
        features.V2_TAIL_GRAPH: tail | on_v1 | decodes,
        features.V2_MIXED_GRAPHS: tail | on_v1,
        features.DFLASH_DRAFT_BACKEND: of("dflash") | drafts | backend,
        features.DFLASH_CONTEXT_NORM: of(*_DFLASH_FAMILY) | drafts | {f"{own_norm}": own_norm},
        features.V2_DRAFT_METADATA: drafts | on_v1 | {"vLLM makes the metadata of one or two draft tokens": few},
        features.V2_FUSED_DRAFTS: drafts
        | on_v1
        | {f"{kind} does not draft step by step": not hasattr(drafter, "fused_drafts")}
        | decodes,
        features.V2_CAPTURE_METADATA: drafts
        | on_v1
        | {f"{kind} builds the metadata that it captures with": method in _DFLASH_FAMILY}
        | decodes,
        features.V2_GRAPH_ADDRESSES: on_v1
        | {"the engine never sleeps: sleep mode is off": not model.enable_sleep_mode},
        features.NWOR: speculates,
        features.LINEAR: {
            "this is no GPU of compute capability 9.0, or VLLM_BATCH_INVARIANT is on": not layers.ON_HOPPER,
            "the model is not in bfloat16": model.dtype is not torch.bfloat16,
        },
        # Some of them work in the scheduler; that they are used follows from the configuration that a worker has, too.
        features.BACKPORT_DP_DRAFTER: of(*_CACHED_DRAFTS) | drafts | one_rank | on_v2("drafters"),
        features.BACKPORT_DRAFT_LOOKAHEAD: of(*_CACHED_DRAFTS)
        | {"vLLM allocates blocks that a KV connector may send or load": config.kv_transfer_config is not None},
        features.BACKPORT_DRAFT_SCHEDULE: of(*_DFLASH_FAMILY)
        | drafts
        | on_v1
        | {
            "no layer of the draft has a sliding window": not any(
                getattr(group.kv_cache_spec, "sliding_window", None) for group in groups
            )
        },
        features.BACKPORT_EAGLE_BIAS: drafts
        | {f"no draft was loaded by {', '.join(_BIASED_LOADERS)}": drafted_by not in _BIASED_LOADERS},
        features.BACKPORT_MIXED_GRAPHS: on_v1
        | {"batches with prompts have no FULL graphs": mode.mixed_mode().name != "FULL"},
        features.BACKPORT_MTP_EMBEDDINGS: of("mtp") | drafts | on_v2("code for embeddings"),
        features.BACKPORT_NAN_LOGITS: drafts | on_v1,
        features.BACKPORT_PADDED_REQUEST: speculates,
        features.BACKPORT_PIPELINE_DRAFTS: speculates
        | {"the pipeline has one stage": parallel.pipeline_parallel_size == 1},
        features.BACKPORT_REASONING_END: speculates
        | {
            "no reasoning parser is named for structured outputs": (
                not config.structured_outputs_config.reasoning_parser
            )
        },
        features.BACKPORT_RECOVERED_TOKEN: drafts | on_v2("a sampler"),
        features.BACKPORT_TOP_K_TOP_P: {
            "the model is for pooling, and samples nothing": model.runner_type == "pooling",
            "there is no Triton, and vLLM sorts": not HAS_TRITON,
        }
        # What its hunks for 0.32 change, V1 does not ask for.
        | (on_v1 if vllm >= Version("0.32.0") else {}),
        features.BACKPORT_VACATED_ROW: on_v2("block tables")
        | {"the model has no states but keys and values": not model.has_inner_state}
        | one_rank,
    }
