# SPDX-License-Identifier: Apache-2.0
"""Which live features a worker of vLLM uses, and why it does not use the others.

It depends on the model runner, the speculative method, the CUDA graph mode and the model. The rules take plain values,
so they need no device. What a feature found out by itself outweighs them (`vllm_hwplugin.journal.use`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from packaging.version import Version
from vllm.platforms import current_platform

from vllm_hwplugin import features
from vllm_hwplugin.journal import Journal, Use
from vllm_hwplugin.spec_decode import capture_sizes, dflash_context_norm, step_counts
from vllm_hwplugin.spec_decode.engine_report import Findings, report, use_of
from vllm_hwplugin.spec_decode.v1 import draft_decision
from vllm_hwplugin.spec_decode.v1.draft_decision import DrafterFacts
from vllm_hwplugin.spec_decode.v1.draft_facts import drafter_facts

V1: Final = "V1"
V2: Final = "V2"

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

_NO_SPECULATION = "there is no speculative decoding"
# Their draft models norm the context keys of all layers in one call, in the method that the feature patches.
_DFLASH_FAMILY = ("dflash", "dspark", "dflash2")
# Their drafts have keys and values of their own in the KV cache.
_CACHED_DRAFTS = ("eagle", "eagle3", "mtp", "dflash", "draft_model")
_BIASED_LOADERS = ("llama_eagle", "llama4_eagle", "llama_eagle3")


@dataclass(frozen=True)
class WorkerFacts:
    """What decides which features of the model runner an engine uses.

    Attributes:
        vllm: its version.
        runner: `V1` or `V2`.
        method: of the speculative config; None without speculation.
        drafts_here: whether this worker drafts: with pipeline parallelism only the last one does.
        drafter: class of what drafts on the V1 runner.
        proposer: of a V1 drafter that runs a draft model, what decides about its graphs; None for any other.
        mm_prefix: whether the target sees its images in both directions.
        named_backend: whether an attention backend is named, for the target or for the draft.
        decode_graphs: whether the target decodes in FULL CUDA graphs.
        sizes_set: whether the plugin has set the capture sizes.
        mixed_graphs: whether it has these for batches with prompts as well.
        context_norm: why vLLM's own norm of context keys serves, where that is known.
        fuses: whether the steps of Model Runner V2's drafter may be one graph.
        sleeps: whether the engine may sleep.
        stages: of the pipeline.
        data_parallel_ranks: how many replicas keep step with each other.
        mamba: whether the model has states other than keys and values.
        kv_connector: whether there is one.
        reasons: whether structured output may follow reasoning.
        draft_module: the file name of the draft model's class, without its end.
        draft_windows: whether a layer of Model Runner V2's draft has a sliding window.
    """

    vllm: Version
    runner: str
    method: str | None = None
    num_speculative_tokens: int = 0
    drafts_here: bool = True
    drafter: str = ""
    proposer: DrafterFacts | None = None
    mm_prefix: bool = False
    named_backend: bool = False
    decode_graphs: bool = True
    sizes_set: bool = False
    mixed_graphs: bool = False
    context_norm: str | None = None
    fuses: bool = False
    sleeps: bool = False
    stages: int = 1
    data_parallel_ranks: int = 1
    mamba: bool = False
    kv_connector: bool = False
    reasons: bool = False
    draft_module: str = ""
    draft_windows: bool = False


def uses_of(facts: WorkerFacts, live: Collection[str]) -> dict[str, Use]:
    """Of each feature in `live` that works in the model runner, whether an engine of these facts uses it."""
    return {name: use_of(rule(facts)) for name, rule in _RULES.items() if name in live}


def _drafting(facts: WorkerFacts) -> str | None:
    if facts.method is None:
        return _NO_SPECULATION
    return None if facts.drafts_here else "another stage of the pipeline drafts"


def _capture_sizes(facts: WorkerFacts) -> str | None:
    """Why the sizes are vLLM's or the user's is in the journal of the process that made the configuration."""
    if facts.method is None:
        return _NO_SPECULATION
    if not facts.sizes_set:
        return "the capture sizes are not the plugin's"
    return None if facts.decode_graphs else "the target does not decode in FULL CUDA graphs"


def _draft_full_graph(facts: WorkerFacts) -> str | None:
    if (reason := _drafting(facts)) is not None:
        return reason
    if facts.runner == V2:
        return "Model Runner V2 drafts with code and CUDA graphs of its own"
    if facts.proposer is None:
        return f"{facts.drafter or facts.method} runs no draft model that the feature covers"
    return draft_decision.drafter_obstacle(facts.proposer)


def _v1_draft_phase(facts: WorkerFacts) -> str | None:
    """What the graphs need beside these it finds out by itself, when they are captured."""
    if (reason := _draft_full_graph(facts)) is not None:
        return reason
    return None if facts.decode_graphs else "the target does not decode in FULL CUDA graphs"


def _recorded(facts: WorkerFacts, runner: str) -> str | None:
    """What else stands against graphs of a step's parts is found when they are captured (`obstacles`)."""
    if (reason := _drafting(facts)) is not None:
        return reason
    if facts.runner != runner:
        return f"the engine runs on Model Runner {facts.runner}"
    return None if facts.decode_graphs else "the target does not decode in FULL CUDA graphs"


def _v2_mixed_graphs(facts: WorkerFacts) -> str | None:
    """What else is against them, they find when the managers of graphs exist."""
    return "the engine runs on Model Runner V1" if facts.runner == V1 else None


def _dflash_full_graph(facts: WorkerFacts) -> str | None:
    return _other_method(facts, ("dflash",)) or _draft_full_graph(facts)


def _dflash_context_norm(facts: WorkerFacts) -> str | None:
    return _other_method(facts, _DFLASH_FAMILY) or _drafting(facts) or facts.context_norm


def _dflash_draft_backend(facts: WorkerFacts) -> str | None:
    """By the parts of the feature's variants; what it does for other drafters of 0.21 and 0.22 it says by itself."""
    if (reason := _other_method(facts, ("dflash",)) or _drafting(facts)) is not None:
        return reason
    if facts.vllm < Version("0.21.0"):
        return None
    if Version("0.24.0") <= facts.vllm < Version("0.25.0"):
        if facts.runner == V1:
            return "the V1 runner of this vLLM selects the draft's backend by itself"
        return None if facts.named_backend else "no attention backend is named, so the draft selects its own anyway"
    if facts.runner == V2:
        return "Model Runner V2 builds the draft without the code that the feature changes"
    return None if facts.mm_prefix else "the target has no images that are seen in both directions"


def _v2_drafting(facts: WorkerFacts) -> str | None:
    if (reason := _drafting(facts)) is not None:
        return reason
    return "the V1 runner drafts with code of its own" if facts.runner == V1 else None


def _v2_draft_metadata(facts: WorkerFacts) -> str | None:
    if (reason := _v2_drafting(facts)) is not None:
        return reason
    if facts.num_speculative_tokens < 3:
        return f"with {facts.num_speculative_tokens} draft tokens vLLM makes the metadata of each step"
    return None


def _v2_fused_drafts(facts: WorkerFacts) -> str | None:
    """What the steps' own facts say, they say when graphs are captured."""
    if (reason := _v2_drafting(facts)) is not None:
        return reason
    if not facts.fuses:
        return f"{facts.drafter} does not draft step by step"
    return None if facts.decode_graphs else "the target has no FULL graphs for decode batches"


def _v2_capture_metadata(facts: WorkerFacts) -> str | None:
    if (reason := _v2_drafting(facts)) is not None:
        return reason
    if facts.method in _DFLASH_FAMILY:
        return f"{facts.drafter} builds the metadata that it captures with"
    return None if facts.decode_graphs else "the target has no FULL graphs for decode batches"


def _v2_graph_addresses(facts: WorkerFacts) -> str | None:
    if facts.runner == V1:
        return "the V1 runner's graphs do not read such tensors"
    return None if facts.sleeps else "the engine never sleeps: sleep mode is off"


def _nwor(facts: WorkerFacts) -> str | None:
    """What else is against it, it finds when the KV cache is made."""
    return _NO_SPECULATION if facts.method is None else None


def _v1_alone(facts: WorkerFacts, has: str) -> str | None:
    return f"Model Runner V2 has {has} of its own" if facts.runner == V2 else None


def _dp_drafter(facts: WorkerFacts) -> str | None:
    if (reason := _drafting(facts) or _other_method(facts, _CACHED_DRAFTS)) is not None:
        return reason
    if facts.data_parallel_ranks == 1:
        return "there is one data parallel rank"
    return _v1_alone(facts, "drafters")


def _draft_lookahead(facts: WorkerFacts) -> str | None:
    if (reason := _other_method(facts, _CACHED_DRAFTS)) is not None:
        return reason
    return "vLLM allocates blocks that a KV connector may send or load" if facts.kv_connector else None


def _draft_schedule(facts: WorkerFacts) -> str | None:
    if (reason := _other_method(facts, _DFLASH_FAMILY) or _drafting(facts)) is not None:
        return reason
    if facts.runner == V1:
        return "the V1 runner makes no schedule for drafts"
    return None if facts.draft_windows else "no layer of the draft has a sliding window"


def _eagle_bias(facts: WorkerFacts) -> str | None:
    if (reason := _drafting(facts)) is not None:
        return reason
    loaders = ", ".join(_BIASED_LOADERS)
    return None if facts.draft_module in _BIASED_LOADERS else f"no draft was loaded by {loaders}"


def _mtp_embeddings(facts: WorkerFacts) -> str | None:
    return _other_method(facts, ("mtp",)) or _drafting(facts) or _v1_alone(facts, "code for embeddings")


def _mixed_graphs(facts: WorkerFacts) -> str | None:
    if facts.runner == V1:
        return "the V1 runner captures for the longest request"
    return None if facts.mixed_graphs else "batches with prompts have no FULL graphs"


def _nan_logits(facts: WorkerFacts) -> str | None:
    if (reason := _drafting(facts)) is not None:
        return reason
    return "the V1 runner has a sampler of its own" if facts.runner == V1 else None


def _padded_request(facts: WorkerFacts) -> str | None:
    return _NO_SPECULATION if facts.method is None else None


def _pipeline_drafts(facts: WorkerFacts) -> str | None:
    if facts.method is None:
        return _NO_SPECULATION
    return "the pipeline has one stage" if facts.stages == 1 else None


def _reasoning_end(facts: WorkerFacts) -> str | None:
    if facts.method is None:
        return _NO_SPECULATION
    return None if facts.reasons else "no reasoning parser is named for structured outputs"


def _recovered_token(facts: WorkerFacts) -> str | None:
    return _drafting(facts) or _v1_alone(facts, "a sampler")


def _vacated_row(facts: WorkerFacts) -> str | None:
    if (reason := _v1_alone(facts, "block tables")) is not None:
        return reason
    if not facts.mamba:
        return "the model has no states but keys and values"
    return "there is one data parallel rank" if facts.data_parallel_ranks == 1 else None


def _other_method(facts: WorkerFacts, methods: Collection[str]) -> str | None:
    if facts.method is None:
        return _NO_SPECULATION
    return None if facts.method in methods else f"the speculative method is {facts.method}"


_RULES: Final[Mapping[str, Callable[[WorkerFacts], str | None]]] = {
    features.CAPTURE_SIZES: _capture_sizes,
    features.DRAFT_FULL_GRAPH: _draft_full_graph,
    # Whether the steps make a chain it decides by itself, wherever there are graphs.
    features.DRAFT_LOOP_GRAPH: _draft_full_graph,
    features.DFLASH_FULL_GRAPH: _dflash_full_graph,
    features.V1_DRAFT_PHASE: _v1_draft_phase,
    features.V2_STEP_INPUTS: partial(_recorded, runner=V2),
    features.V2_TAIL_GRAPH: partial(_recorded, runner=V2),
    features.V2_MIXED_GRAPHS: _v2_mixed_graphs,
    features.DFLASH_DRAFT_BACKEND: _dflash_draft_backend,
    features.DFLASH_CONTEXT_NORM: _dflash_context_norm,
    features.V2_DRAFT_METADATA: _v2_draft_metadata,
    features.V2_FUSED_DRAFTS: _v2_fused_drafts,
    features.V2_CAPTURE_METADATA: _v2_capture_metadata,
    features.V2_GRAPH_ADDRESSES: _v2_graph_addresses,
    features.NWOR: _nwor,
    features.V1_STEP_INPUTS: partial(_recorded, runner=V1),
    # Some of them work in the scheduler; that they are used follows from the configuration that a worker has as well.
    features.BACKPORT_DP_DRAFTER: _dp_drafter,
    features.BACKPORT_DRAFT_LOOKAHEAD: _draft_lookahead,
    features.BACKPORT_DRAFT_SCHEDULE: _draft_schedule,
    features.BACKPORT_EAGLE_BIAS: _eagle_bias,
    features.BACKPORT_MIXED_GRAPHS: _mixed_graphs,
    features.BACKPORT_MTP_EMBEDDINGS: _mtp_embeddings,
    features.BACKPORT_NAN_LOGITS: _nan_logits,
    features.BACKPORT_PADDED_REQUEST: _padded_request,
    features.BACKPORT_PIPELINE_DRAFTS: _pipeline_drafts,
    features.BACKPORT_REASONING_END: _reasoning_end,
    features.BACKPORT_RECOVERED_TOKEN: _recovered_token,
    features.BACKPORT_VACATED_ROW: _vacated_row,
}


def report_worker(worker: Any) -> None:
    """Say what a worker uses: the last thing that the patched `compile_or_warm_up_model` does.

    Args:
        worker: vLLM's `Worker`, or that of another platform; its runner is ready to serve.
    """
    report(worker, _examine)
    step_counts.begin()


def _examine(worker: Any, entry: Journal) -> Findings:
    facts = worker_facts(worker, entry)
    return Findings(
        described=_describe(worker, facts),
        uses=uses_of(facts, entry.live),
        # A stage of a pipeline that does not draft leaves it to the last one.
        demanded=_GRAPHS if facts.method is None or facts.drafts_here else (),
        # Ranks of tensor parallelism take the same steps.
        engine=worker.vllm_config.parallel_config.data_parallel_index
        if worker.is_driver_worker and facts.drafts_here
        else None,
    )


def worker_facts(worker: Any, entry: Journal) -> WorkerFacts:
    """The facts of a worker whose model is loaded and whose KV cache is set up."""
    config, runner = worker.vllm_config, worker.model_runner
    spec = config.speculative_config
    v2 = bool(worker.use_v2_model_runner)
    drafter = getattr(runner, "speculator" if v2 else "drafter", None)
    covered = drafter is not None and hasattr(drafter, "draft_graphs")
    mode = config.compilation_config.cudagraph_mode
    draft_groups = (group for groups in getattr(drafter, "attn_groups", None) or () for group in groups) if v2 else ()
    return WorkerFacts(
        vllm=Version(entry.vllm_version or "0"),
        runner=V2 if v2 else V1,
        method=None if spec is None else spec.method,
        num_speculative_tokens=0 if spec is None else spec.num_speculative_tokens,
        drafts_here=drafter is not None,
        drafter="" if drafter is None else type(drafter).__name__,
        proposer=drafter_facts(drafter, mode) if covered else None,
        mm_prefix=config.model_config.is_mm_prefix_lm,
        named_backend=config.attention_config.backend is not None
        or getattr(spec, "attention_backend", None) is not None,
        decode_graphs=mode.decode_mode().name == "FULL",
        sizes_set=capture_sizes.largest_own(config.compilation_config) is not None,
        mixed_graphs=mode.mixed_mode().name == "FULL",
        context_norm=dflash_context_norm.context_norm_obstacle(),
        fuses=v2 and hasattr(drafter, "fused_drafts"),
        sleeps=config.model_config.enable_sleep_mode,
        stages=config.parallel_config.pipeline_parallel_size,
        data_parallel_ranks=config.parallel_config.data_parallel_size,
        mamba=config.model_config.has_inner_state,
        kv_connector=config.kv_transfer_config is not None,
        reasons=bool(config.structured_outputs_config.reasoning_parser),
        draft_module=type(getattr(drafter, "model", None)).__module__.rpartition(".")[2],
        draft_windows=any(getattr(group.kv_cache_spec, "sliding_window", None) for group in draft_groups),
    )


def _describe(worker: Any, facts: WorkerFacts) -> str:
    """What the worker is, for the log: everything that decides."""
    drafts = f"{facts.method} k={facts.num_speculative_tokens}" if facts.method else "no speculation"
    mode = worker.vllm_config.compilation_config.cudagraph_mode.name
    return (
        f"worker {worker.rank} ({current_platform.device_type}, Model Runner {facts.runner}, {drafts}, {mode} graphs)"
    )
