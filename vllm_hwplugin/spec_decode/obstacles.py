# SPDX-License-Identifier: Apache-2.0
"""Why CUDA graphs of a step are not used: one table for both model runners and all captured parts.

A log line has reasons in the table's order. docs/obstacles.md is made from it.
"""

from __future__ import annotations

import dis
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from enum import Flag, auto
from operator import attrgetter
from typing import Any, Final, NamedTuple

from vllm import envs
from vllm.config import KVTransferConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.model_executor.offloader.base import NoopOffloader, get_offloader
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.sample import logits_processor

from vllm_hwplugin.base import features, gates
from vllm_hwplugin.base.fallback import in_a_line
from vllm_hwplugin.spec_decode.builders import (
    allows,
    builder_of,
    builders_of,
    flash_versions,
    known,
    longest_as_decode,
    refusing,
    updated_in_place,
    why_not_in_graph,
)
from vllm_hwplugin.spec_decode.capture_sizes import encodes_only
from vllm_hwplugin.spec_decode.delta_rule_obstacles import is_delta_rule, why_no_delta_rule
from vllm_hwplugin.spec_decode.drafters import (
    CACHED_METHODS,
    DRAFTERS,
    MASK_METHODS,
    SPECULATORS,
    STANDALONE_METHODS,
    TRIED_METHODS,
)
from vllm_hwplugin.spec_decode.kv_cache_room import GRAPHS_LEFT, TOO_SMALL
from vllm_hwplugin.spec_decode.ranks import Beyond, all_ranks

logger = logging.getLogger("vllm.hwplugin")

_VERIFIED: Final = "how many drafts are verified changes from step to step"

#: If a name here is set, a proposer works on the host between its one-token steps.
_HOST_SIDE: Final = (
    "supports_mm_inputs",
    "uses_mrope",
    "draft_uses_xdrope_dim",
    "constant_draft_positions",
    "use_heterogeneous_vocab",
    "use_local_argmax_reduction",
    "allowed_attn_types",
    "eplb_state",
)
#: The methods of a KV connector that vLLM calls at each layer, and the method that vLLM asks beforehand.
_AT_LAYERS: Final = ("wait_for_layer_load", "save_kv_layer")
_ANSWER: Final = "requires_piecewise_for_cudagraph"
#: What Python makes of a method without statements. A decorated method has its decorator's instructions, which call it.
_NOTHING: Final = frozenset(("RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"))
_ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
#: V2's samplers of batches without drafts.
_SAMPLERS: Final = ("Sampler", "GPUWatermarkSampler")
#: The logits processors of V2's sampler: they do nothing for a request that does not ask for them.
_LOGITS_PROCESSORS: Final = ("LogitBiasState", "PenaltiesState", "BadWordsState")


class Part(Flag):
    """What is captured of a step, each part separately: by `v1-draft-phase` and `v1-step-inputs`, on V2 likewise."""

    #: A drafter's passes, by `draft-full-graph` and `draft-loop-graph`.
    V1_PASSES = auto()
    V1_CHAIN = auto()
    V1_SAMPLING = auto()
    V1_DRAFTING = auto()
    V1_INPUTS = auto()
    #: Metadata of a step whose other inputs are captured.
    V1_METADATA = auto()
    #: Whole batches of any shape, by `v1-mixed-graphs`.
    V1_MIXED = auto()
    V2_SAMPLING = auto()
    V2_DRAFTING = auto()
    V2_INPUTS = auto()
    #: As on V1.
    V2_METADATA = auto()
    #: A drafter's steps, by `v2-fused-drafts`.
    V2_STEPS = auto()
    #: Whole batches of any shape, by `v2-mixed-graphs`.
    V2_MIXED = auto()


#: The parts that an engine without a drafter can have.
WITHOUT_DRAFTS: Final = Part.V2_SAMPLING | Part.V2_INPUTS | Part.V2_METADATA | Part.V2_MIXED

#: What each feature captures, part by part. A feature without any of its parts is unused.
PARTS: Final[Mapping[str, Mapping[str, Part]]] = {
    features.DRAFT_FULL_GRAPH: {"passes": Part.V1_PASSES},
    features.DFLASH_FULL_GRAPH: {"passes": Part.V1_PASSES},
    features.DRAFT_LOOP_GRAPH: {"steps": Part.V1_PASSES | Part.V1_CHAIN},
    features.V1_DRAFT_PHASE: {"sampling": Part.V1_SAMPLING, "drafting": Part.V1_DRAFTING},
    features.V1_STEP_INPUTS: {"inputs": Part.V1_INPUTS},
    features.V1_MIXED_GRAPHS: {"mixed batches": Part.V1_MIXED},
    features.V2_TAIL_GRAPH: {"sampling": Part.V2_SAMPLING, "drafting": Part.V2_DRAFTING},
    features.V2_STEP_INPUTS: {"inputs": Part.V2_INPUTS},
    features.V2_FUSED_DRAFTS: {"steps": Part.V2_STEPS},
    features.V2_MIXED_GRAPHS: {"mixed batches": Part.V2_MIXED},
}


class Obstacle(NamedTuple):
    """One row.

    Attributes:
        reason: the text, with `{}` for the result of `find`.
        hinders: the parts that cannot be captured then.
        find: returns whether the obstacle is present, or which it is; its argument is a runner, or a drafter if
            the drafter has the graphs.
    """

    reason: str
    hinders: Part
    find: Callable[[Any], object]


def why_not(owner: Any, parts: Part, *, together: bool = True, beyond: Beyond = Beyond.NONE) -> str | None:
    """Return every reason not to capture one of `parts`, or None.

    The ranks of tensor parallelism capture the same graphs: a reason on one rank, such as an error in a row, is a
    reason on all.

    Args:
        owner: a `GPUModelRunner` of V1 or of Model Runner V2 that has its KV cache, or at least its managers of graphs
            for `V2_MIXED` and its attention groups for `V1_MIXED`. For `V1_PASSES` and `V1_CHAIN` a V1 drafter, for
            `V2_STEPS` a speculator, each with its attention groups; `V1_PASSES` also works before they exist.
        together: all ranks make this call, and wait for each other; False: the reasons of this rank only.
        beyond: as for `all_ranks`.
    """
    reason = _reasons(owner, parts)
    if not together or all_ranks(reason is None, beyond):
        return reason
    return reason or "it cannot be captured on another rank"


def _reasons(owner: Any, parts: Part) -> str | None:
    drafter = getattr(owner, "drafter", getattr(owner, "speculator", owner))
    if not getattr(owner, "is_last_pp_rank", True):
        # Another stage samples and drafts.
        parts &= Part.V2_MIXED
    elif owner.speculative_config is None or drafter is None:
        parts &= WITHOUT_DRAFTS if decodes_plainly(owner) else Part(0)
    if not parts:
        return "this worker does not draft"
    reasons = (_reason(row, owner) for row in OBSTACLES if row.hinders & parts)
    return "; ".join(reason for reason in reasons if reason) or None


def _reason(row: Obstacle, owner: Any) -> str:
    """Return a row's reason, or ""; an error counts as a reason."""
    try:
        obstacle = row.find(owner)
    except Exception as error:
        logger.debug("obstacles: %s", row.reason, exc_info=True)
        return f"{in_a_line(error)}, so it is not known whether {row.reason.replace('{}', '…')}"
    return row.reason.format(obstacle) if obstacle else ""


def decodes_plainly(runner: Any) -> bool:
    """Whether this runner samples without a drafter and graphs are asked for."""
    if runner.speculative_config is not None or not gates.is_on(gates.PLAIN_DECODE) or encodes_only(runner.vllm_config):
        return False
    # A model that only embeds has no sampler.
    return getattr(runner, "sampler", None) is not None


def builder_classes(proposer: Any) -> frozenset[type]:
    """Return a V1 drafter's metadata builder classes; empty before `initialize_attn_backend`."""
    return frozenset(type(group.get_metadata_builder()) for group in proposer.draft_attn_groups)


def working_by_layer(transfer: KVTransferConfig | None) -> str:
    """Return the KV connector class that may work by layer, or "".

    In an engine with FULL graphs, vLLM calls a connector before and after each attention layer, on the host, to load or
    save keys. A captured pass skips that. A connector that needs it can say so, and vLLM then has no FULL graphs; not
    all connectors say so.
    """
    if transfer is None:
        return ""
    cls: Any = KVConnectorFactory.get_connector_class(transfer)
    name: str = cls.__name__
    if name == "MultiConnector":
        parts = transfer.kv_connector_extra_config.get("connectors", ())
        return next((part for config in parts if (part := working_by_layer(KVTransferConfig(**config)))), "")
    if any(_ANSWER in vars(base) for base in cls.__mro__ if base is not KVConnectorBase_V1):
        # vLLM asked it, and it does not work by layer with these options.
        return ""
    return "" if all(_does_nothing(getattr(cls, hook)) for hook in _AT_LAYERS) else name


def _does_nothing(method: Any) -> bool:
    code = getattr(method, "__code__", None)
    return code is not None and all(step.opname in _NOTHING for step in dis.get_instructions(code))


def _has(*names: str) -> Callable[[Any], bool]:
    """Return a check for attributes that not every version or engine has."""

    def has(runner: Any, name: str) -> bool:
        owner, _, attribute = name.rpartition(".")
        return bool(getattr(attrgetter(owner)(runner) if owner else runner, attribute, None))

    return lambda runner: any(has(runner, name) for name in names)


def _ranks(*kinds: str) -> Callable[[Any], bool]:
    """Return a check for several ranks of any kind of parallelism named."""
    return lambda r: any(getattr(r.vllm_config.parallel_config, f"{kind}_parallel_size", 1) > 1 for kind in kinds)


def _coupled_draft(runner: Any) -> bool:
    """Whether ranks of data parallelism have draft models."""
    return _ranks("data")(runner) and getattr(runner.speculative_config, "method", None) in CACHED_METHODS


def _agrees_on_drafts(runner: Any) -> bool:
    """Whether ranks of data parallelism agree again while they draft."""
    # From 0.30 on vLLM drafts by what the target's batch agreed.
    return _coupled_draft(runner) and not hasattr(runner.speculator, "_build_uniform_batch_dp_sync")


def _pads_drafts(runner: Any) -> bool:
    """Whether vLLM drafts for all requests that a mixed graph holds."""
    if not _coupled_draft(runner):
        return False
    from vllm.v1.worker.gpu import dp_utils

    # Up to 0.32 ranks agree on the number of requests in the graph, up to 0.28 without this class.
    return not hasattr(getattr(dp_utils, "DPSyncState", None), "skip_drafts")


def shares_experts(runner: Any) -> bool:
    """Whether draft passes exchange tokens between ranks of data parallelism."""
    return _coupled_draft(runner) and runner.speculative_config.draft_model_config.is_moe


def _exchanges_otherwise(runner: Any) -> str:
    """Return why graphs cannot hold passes over shared experts, or ""."""
    if not shares_experts(runner):
        return ""
    if not gates.asks_for("shared-experts"):
        return f"graphs of such passes never ran on several GPUs; {gates.MORE_GRAPHS}=shared-experts asks for them"
    spec, parallel = runner.speculative_config, runner.vllm_config.parallel_config
    if spec.method in MASK_METHODS | STANDALONE_METHODS:
        return f"{spec.method} has other passes"
    if getattr(spec, "num_speculative_tokens_per_batch_size", None) is not None:
        return "the number of drafts follows a schedule"
    if getattr(parallel, "enable_elastic_ep", False):
        return "the number of ranks may change"
    if parallel.all2all_backend != "allgather_reducescatter":
        return f"{parallel.all2all_backend} may need the same graph on each rank"
    return "NCCL may write to another rank's graph" if _registers_graphs(runner) else ""


def _registers_graphs(runner: Any) -> bool:
    """Whether NCCL may register memory of graphs with other ranks."""
    # A captured kernel then writes to the addresses that the other ranks had in the same capture, and another rank may
    # replay another graph. NCCL registers symmetric memory and CUDA's virtual memory, and `cudaMalloc`'s if asked to.
    registers = any("expandable_segments:True" in os.environ.get(name, "") for name in _ALLOCATOR)
    registers |= getattr(runner.vllm_config, "use_cumem_cudagraph_pool", False)
    registers |= os.environ.get("NCCL_LEGACY_CUDA_REGISTER", "0") != "0"
    return bool(envs.VLLM_USE_NCCL_SYMM_MEM) or (registers and os.environ.get("NCCL_GRAPH_REGISTER") != "0")


def _names(things: Iterable[Any]) -> str:
    return ", ".join(sorted({type(thing).__name__ for thing in things}))


def _host_builders(runner: Any) -> str:
    """Name builders that work on the host; on V1 also MLA's."""
    # `v1-step-inputs` does not know the host's lengths within MLA's metadata.
    on_v1 = hasattr(runner, "input_batch")
    return _names(
        builder
        for builder in builders_of(runner.attn_groups)
        if not allows(builder, "decode") or (on_v1 and not known(type(builder)).chain)
    )


def _not_in_graph(runner: Any) -> str | None:
    """Return why no graph may make the draft's metadata, or None."""
    # A standalone draft model's first pass has more tokens per request than some builders take for a decode.
    if updated_in_place(runner.speculator):
        return None
    standalone = runner.speculative_config.method in STANDALONE_METHODS
    causal = not getattr(runner.speculator, "requires_non_causal", False)
    groups = getattr(runner.speculator, "attn_groups", ())
    return why_not_in_graph(groups, "chain" if standalone else "one_token", causal=causal)


def _plans_by_window(runner: Any) -> bool:
    planned = (builder for builder in builders_of(runner.attn_groups) if getattr(builder, "aot_schedule", False))
    return any(builder.aot_sliding_window not in (None, (-1, -1)) for builder in planned)


def _other_proposer(proposer: Any) -> str:
    """Name an unsupported proposer; DFlash's needs the hunk that adds context graphs."""
    name = type(proposer).__name__
    rows = (row for row in DRAFTERS if row.proposer == name and not row.v1)
    return "" if any(not row.masks or hasattr(proposer, "draft_context") for row in rows) else name


def _breakable_in_any_mode(proposer: Any) -> bool:
    model = getattr(proposer, "model", None)
    return "Breakable" in type(model).__name__ and getattr(model, "runtime_mode", None) is None


def _host_side(proposer: Any) -> str:
    return ", ".join(name for name in _HOST_SIDE if getattr(proposer, name, None))


def _other_method(runner: Any) -> str:
    method: str | None = getattr(runner.speculative_config, "method", None)
    return "" if method is None or method in TRIED_METHODS else method


def _other_speculator(runner: Any) -> str:
    speculator = runner.speculator
    return "" if speculator is None or type(speculator).__name__ in SPECULATORS else _names([speculator])


def _other_sampler(runner: Any) -> str:
    """Name another sampler."""
    # A model that fills in several tokens together has one, and counts the tokens as drafts.
    # Only the last stage of a pipeline samples.
    sampler = runner.sampler
    name = type(sampler).__name__
    return "" if runner.speculator is not None or sampler is None or name in _SAMPLERS else name


def _no_decode_apart(runner: Any) -> str:
    manager = getattr(runner, "cudagraph_manager", None)
    mode = (runner.cudagraph_dispatcher if manager is None else manager).cudagraph_mode
    return "" if mode.separate_routine() and mode.decode_mode() == CUDAGraphMode.FULL else mode.name


def _broken_at_attention(runner: Any) -> bool:
    manager = getattr(runner, "cudagraph_manager", None)
    return "Breakable" in type(runner.model).__name__ if manager is None else bool(manager.use_breakable_cg)


def _some_batches_only(runner: Any) -> str:
    # On V1 nothing bounds the requests of a graph, as FlashAttention 2 needs, or the tokens of one, as MLA does.
    refused, on_v1 = [], hasattr(runner, "input_batch")
    for group in (group for groups in runner.attn_groups for group in groups):
        builder, flash = builder_of(group), flash_versions(group, runner.compilation_config)
        name, support = type(builder).__name__, builder.get_cudagraph_support(runner.vllm_config, group.kv_cache_spec)
        if (
            not on_v1
            and support == AttentionCGSupport.UNIFORM_BATCH
            and (is_delta_rule(builder) or (flash and flash <= {2, 4}) or longest_as_decode(builder))
        ):
            continue
        if support != AttentionCGSupport.ALWAYS:
            refused.append(f"{name} supports {support.name}")
        elif not allows(builder, "prompts"):
            # ALWAYS may also mean any mix of decodes.
            refused.append(f"{name} is not known to serve prompts in one")
    return ", ".join(dict.fromkeys(refused))


def _counts_on_host(runner: Any) -> str:
    """Return what reads requests' counts that adaptive verification changes."""
    if not _has("adaptive_verification")(runner):
        return ""
    if _ranks("data")(runner):
        return "ranks of data parallelism each change theirs"
    by_host = (
        builder for builder in builders_of(runner.attn_groups) if is_delta_rule(builder) or longest_as_decode(builder)
    )
    return next((f"{type(builder).__name__} takes requests by the host's counts" for builder in by_host), "")


def _state_before(runner: Any) -> str:
    """Name another model state."""
    # A hybrid's kernels that move states run in vLLM in each step, and work with what a graph has made.
    known_states = ("DefaultModelState", "MambaHybridModelState")
    return "" if type(runner.model_state).__name__ in known_states else _names([runner.model_state])


def _state_after(runner: Any) -> str:
    """Name a state whose work after a step no graph can hold."""
    # A hybrid's kernels pass over rows that no request has, so a graph can hold them. Up to 0.31 the kernels that move
    # states between blocks come about in the first step, and `RecoverSSMState` keeps a step's states on the host.
    state, owner = runner.model_state, type(runner.model_state).postprocess_state.__qualname__.partition(".")[0]
    ready = not getattr(state, "_align_mode", False) or getattr(state._mamba_ctx, "is_initialized", False)
    hybrid = owner == "MambaHybridModelState" and getattr(state, "recoverssm", None) is None and ready
    return "" if owner == "ModelState" or hybrid else _names([state])


def custom_processors(runner: Any) -> str:
    """Return the names of custom logits processors, or "".

    V2's sampler has them from 0.31 on. An installed package may bring some by itself.
    """
    if hasattr(runner, "input_batch"):
        own, processors = f"{logits_processor.__name__}.", runner.input_batch.logitsprocs.all
        return _names(thing for thing in processors if not f"{type(thing).__module__}.".startswith(own))
    processors = getattr(runner.sampler, "logits_processors", ())
    return _names(thing for thing in processors if type(thing).__name__ not in _LOGITS_PROCESSORS)


def _moved_states(runner: Any) -> str:
    mode: str = runner.cache_config.mamba_cache_mode
    return mode if runner.model_config.is_hybrid and mode != "none" else ""


def _other_blocks(runner: Any) -> bool:
    return any(getattr(group, "kernel_block_size", None) is not None for group in runner.drafter.draft_attn_groups)


def _lacks_graphs(runner: Any) -> str:
    drafter, spec = runner.drafter, runner.speculative_config
    needed = getattr(drafter, "draft_context" if spec.method in MASK_METHODS else "draft_loop", None)
    if needed is None and spec.method not in MASK_METHODS and spec.num_speculative_tokens > 1:
        return "it needs draft-loop-graph's graphs"
    return "capturing the graphs that it is built on failed" if needed is not None and needed.failed else ""


_PHASE: Final = Part.V1_SAMPLING | Part.V1_DRAFTING
_TAIL: Final = Part.V2_SAMPLING | Part.V2_DRAFTING
_SAMPLES: Final = Part.V1_SAMPLING | Part.V2_SAMPLING
_PASSES, _CHAIN, _STEPS, _MIXED = Part.V1_PASSES, Part.V1_CHAIN, Part.V2_STEPS, Part.V2_MIXED
_V1, _V2, _METADATA, _DRAFTS = Part.V1_INPUTS, Part.V2_INPUTS, Part.V1_METADATA, Part.V2_DRAFTING
_V1_MIXED: Final = Part.V1_MIXED

OBSTACLES: Final = (
    Obstacle(TOO_SMALL, ~_STEPS, _has(f"vllm_config.{GRAPHS_LEFT}")),
    Obstacle("{} has its own drafting code, which no patched-in feature covers", _PASSES, _other_proposer),
    Obstacle("the speculative config asks for enforce_eager", _PASSES, attrgetter("speculative_config.enforce_eager")),
    Obstacle(
        "disable_padded_drafter_batch gives the drafter batches of varying query length",
        _PASSES,
        attrgetter("speculative_config.disable_padded_drafter_batch"),
    ),
    Obstacle("with data parallelism the ranks agree on a graph mode by token count only", _PASSES, _ranks("data")),
    Obstacle(
        "decode context parallelism keeps per-rank lengths at changing addresses", _PASSES, _ranks("decode_context")
    ),
    Obstacle(
        "layers that the drafter shares with the target map tokens to LoRA adapters by the target's batch",
        _PASSES,
        attrgetter("vllm_config.lora_config"),
    ),
    Obstacle(
        "the draft model already runs in breakable CUDA graphs, which capture in every mode",
        _PASSES,
        _breakable_in_any_mode,
    ),
    # From 0.32 on.
    Obstacle(
        "sleep_mode_offload_cudagraph puts all graphs into one memory pool, where a draft may overwrite the target's "
        "output",
        _PASSES,
        _has("vllm_config.use_cumem_cudagraph_pool"),
    ),
    Obstacle(
        "the draft model shares top-k indices between steps by a host-side switch", _PASSES, _has("_share_mtp_indices")
    ),
    Obstacle(
        "{} may load and save keys layer by layer, also the keys of a prompt's draft",
        _PASSES,
        lambda p: p.speculative_config.method in MASK_METHODS and working_by_layer(p.vllm_config.kv_transfer_config),
    ),
    Obstacle(
        "one pass drafts every token, so there is no chain",
        _CHAIN,
        lambda p: p.speculative_config.num_speculative_tokens < 2 or p.parallel_drafting,
    ),
    Obstacle("metadata must be built between steps ({})", _CHAIN, lambda p: refusing(builder_classes(p), "chain")),
    Obstacle(
        # DeepSeek V4's MTP passes several residual streams on, side by side.
        "the states that the draft model passes on are wider than the states that it samples from",
        _CHAIN,
        lambda p: p.hidden_size != p.draft_model_config.get_hidden_size(),
    ),
    Obstacle("the drafter does host work between steps: {}", _CHAIN, _host_side),
    Obstacle(
        "{} draft tokens have no two steps after the first",
        _STEPS,
        lambda s: s.num_speculative_steps < 3 and str(s.num_speculative_steps),
    ),
    Obstacle(
        "vLLM has no graph of a draft step: decode batches have none, or each capture size is above max_num_seqs",
        _STEPS,
        lambda s: not s.decode_cudagraph_manager.needs_capture(),
    ),
    Obstacle(
        # Before 0.23.0 every speculator's positions go up.
        "the draft's positions stay the same, so vLLM makes the metadata once as it is",
        _STEPS,
        lambda s: not getattr(s, "advance_draft_positions", True),
    ),
    Obstacle("ranks of a data-parallel engine agree on each step; this was never run", _STEPS, lambda s: s.dp_size > 1),
    Obstacle("the draft's experts are balanced by the host, before each step", _STEPS, _has("eplb_state")),
    Obstacle(
        "no graph may hold the building of the draft layers' metadata ({})",
        _STEPS,
        lambda s: why_not_in_graph(s.attn_groups),
    ),
    Obstacle("cudagraph_mode is {}", _V1_MIXED | _MIXED, _no_decode_apart),
    Obstacle(
        "{} may load and save prompts layer by layer",
        _V1_MIXED | _MIXED,
        lambda r: working_by_layer(r.vllm_config.kv_transfer_config),
    ),
    Obstacle("prompts skip layers", _MIXED, _has("fast_prefill")),
    Obstacle("graphs are broken at attention", _V1_MIXED | _MIXED, _broken_at_attention),
    Obstacle("only some batches can have graphs: {}", _V1_MIXED | _MIXED, _some_batches_only),
    Obstacle("some layers have a gated delta rule, and {}", _MIXED, why_no_delta_rule),
    Obstacle("the speculative method is {}", _PHASE | _V1_MIXED, _other_method),
    Obstacle("{} drafts in its own way", _DRAFTS, _other_speculator),
    Obstacle(
        "drafts are not verified by rejection",
        _TAIL,
        lambda r: r.speculator is not None and r.rejection_sampler is None,
    ),
    Obstacle("{} samples in its own way", Part.V2_SAMPLING | _MIXED, _other_sampler),
    Obstacle(_VERIFIED, _V1, lambda r: r.speculative_config.method == "ngram_gpu"),
    Obstacle(_VERIFIED, _V2 | _DRAFTS, _has("adaptive_verification")),
    Obstacle(f"{_VERIFIED}, and {{}}", _MIXED, _counts_on_host),
    Obstacle("acceptance is estimated in each step", _DRAFTS, _has("speculator.acceptance_estimator")),
    Obstacle("{}", _PHASE, _lacks_graphs),
    Obstacle("the drafter works on the host between steps: {}", _PHASE, lambda r: _host_side(r.drafter)),
    Obstacle(
        "the drafter adds its own tokens in its first pass",
        _PHASE,
        lambda r: r.speculative_config.method not in MASK_METHODS and r.drafter.needs_extra_input_slots,
    ),
    Obstacle(
        "the drafter has metadata of each KV cache group",
        _METADATA,
        _has("drafter.set_per_group_attn_metadata", "drafter.set_per_group_block_table"),
    ),
    # Nothing of sampling and inputs is agreed.
    Obstacle("ranks of data parallelism agree on each step on the host", _METADATA | _V1_MIXED, _ranks("data")),
    Obstacle("ranks of data parallelism agree on each draft pass on the host", _DRAFTS, _agrees_on_drafts),
    Obstacle("ranks of data parallelism draft for all requests that a mixed batch's graph holds", _MIXED, _pads_drafts),
    Obstacle(
        "ranks join while the others serve (elastic expert parallelism)",
        _MIXED,
        _has("vllm_config.parallel_config.enable_elastic_ep"),
    ),
    Obstacle("ranks of data parallelism share the draft's experts, and {}", _DRAFTS, _exchanges_otherwise),
    Obstacle(
        "ranks of data parallelism, and stages of a pipeline, do not know of each other's images",
        _MIXED,
        lambda r: _ranks("data", "pipeline")(r) and r.supports_mm_inputs,
    ),
    Obstacle(
        "ranks of data parallelism do not know of each other's longest requests",
        _MIXED,
        lambda r: _ranks("data")(r) and any(map(longest_as_decode, builders_of(r.attn_groups))),
    ),
    Obstacle("stages of a pipeline exchange tokens in the host's order", _PHASE | _V1 | _TAIL, _ranks("pipeline")),
    Obstacle("the pipeline has several stages", _V1_MIXED, _ranks("pipeline")),
    Obstacle(
        "the pipeline has several stages and no drafter",
        _MIXED,
        lambda r: r.speculative_config is None and _ranks("pipeline")(r),
    ),
    Obstacle(
        "the context is split among ranks",
        _V1 | _V1_MIXED | _TAIL | _MIXED,
        _ranks("decode_context", "prefill_context"),
    ),
    Obstacle(
        "experts are counted on the host in each step",
        _PHASE | _TAIL,
        attrgetter("vllm_config.parallel_config.enable_eplb"),
    ),
    Obstacle("batches are split in two", _PHASE | _V1_MIXED, attrgetter("vllm_config.parallel_config.use_ubatching")),
    Obstacle(
        "weights are loaded from the host in each step",
        _PHASE | _TAIL,
        lambda _: not isinstance(get_offloader(), NoopOffloader),
    ),
    Obstacle("adapters (LoRA) change from batch to batch", _V1 | _V1_MIXED, attrgetter("lora_config")),
    Obstacle(
        "each number of adapters (LoRA) has its own graphs",
        _MIXED,
        lambda r: getattr(r.lora_config, "specialize_active_lora", False),
    ),
    Obstacle(
        "the model has an encoder",
        _PHASE | _V1 | _V1_MIXED | _TAIL | _MIXED,
        attrgetter("model_config.is_encoder_decoder"),
    ),
    Obstacle("prompts may be embeddings", _PHASE | _V1 | _V1_MIXED, attrgetter("enable_prompt_embeds")),
    # Models do more with an image than embed it, and a replay runs no Python.
    Obstacle("prompts may have images or the like", _V1_MIXED, attrgetter("supports_mm_inputs")),
    Obstacle(
        "images or the like may come between tokens that were sampled",
        _V2 | _MIXED,
        lambda r: getattr(getattr(r.model_state, "encoder_runner", None), "is_realtime", False),
    ),
    Obstacle("positions have several dimensions", _V1, _has("model_config.uses_mrope", "model_config.uses_xdrope_dim")),
    Obstacle("mamba_cache_mode is {}, whose states are moved on the host", _V1, _moved_states),
    Obstacle("{} has its own work before each step", _V2, _state_before),
    Obstacle("{} has its own work after each step", _TAIL, _state_after),
    Obstacle("hidden states leave the engine in each step", _TAIL, _has("aux_output_connector")),
    Obstacle("VLLM_COMPUTE_NANS_IN_LOGITS is set", _SAMPLES, lambda _: envs.VLLM_COMPUTE_NANS_IN_LOGITS),
    Obstacle("there are custom logits processors: {}", _SAMPLES, custom_processors),
    Obstacle("sampling masks leave the engine in each step", Part.V2_SAMPLING, _has("sampler.return_sampling_mask")),
    # vLLM refuses such requests together with speculation.
    Obstacle(
        "requests may bring the tokens that are to be sampled",
        Part.V2_SAMPLING,
        lambda r: r.speculator is None and getattr(r.sampler, "trace_replay_state", None),
    ),
    Obstacle("ranks sample a part of the batch each", Part.V2_SAMPLING, _has("batch_sharder")),
    Obstacle("samples are watermarked", _TAIL, lambda r: "Watermark" in type(r.sampler).__name__),
    Obstacle(
        "the target has other states for its drafter",
        _PHASE,
        lambda r: hasattr(r.get_model(), "get_mtp_target_hidden_states"),
    ),
    Obstacle(
        "metadata must be built in each step ({})", _PHASE, lambda r: refusing(builder_classes(r.drafter), "chain")
    ),
    # From 0.32 on, where a backend needs smaller blocks than the KV cache's, as it may in hybrids.
    Obstacle("block tables of the draft layers are made again in each step", _PHASE, _other_blocks),
    Obstacle("metadata must be built in each step ({})", _DRAFTS, _not_in_graph),
    Obstacle("{} may make metadata on the host", _METADATA | Part.V2_METADATA, _host_builders),
    Obstacle("a schedule for windows depends on the longest sequence", _METADATA, _plans_by_window),
    Obstacle(
        "tokens of an image see each other",
        # A token after the prompt is in no image: on V2 a graph makes its other inputs, and vLLM its metadata.
        _METADATA | Part.V2_METADATA,
        _has("is_mm_prefix_lm", "model_config.is_mm_prefix_lm"),
    ),
    Obstacle(
        "a prompt is seen whole, and later tokens through a window",
        _METADATA | _V1_MIXED | _V2 | _MIXED,
        _has("model_config.rswa_window"),
    ),
    Obstacle(
        "layers share keys in fast prefills", _METADATA | _V1_MIXED, attrgetter("cache_config.kv_sharing_fast_prefill")
    ),
    Obstacle("slots are copied to the host in each step", _METADATA, _has("routed_experts_initialized")),
)
