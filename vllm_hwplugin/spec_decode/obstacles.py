# SPDX-License-Identifier: Apache-2.0
"""What stands against graphs of a step: one table for both model runners and all parts that are recorded.

A log line has reasons in the table's order. docs/obstacles.md is made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Flag, auto
from operator import attrgetter
from typing import Any, Final, NamedTuple

from vllm import envs
from vllm.model_executor.offloader.base import NoopOffloader, get_offloader
from vllm.v1.sample import logits_processor

from vllm_hwplugin.spec_decode.builders import host_work, known, refusing, why_not_in_graph
from vllm_hwplugin.spec_decode.v1.draft_facts import builder_classes, chain_facts

STAGES: Final = "stages of a pipeline exchange tokens in the host's order"
CONTEXT: Final = "the context is split among ranks"
ADAPTERS: Final = "adapters (LoRA) change from batch to batch"
ENCODER: Final = "the model has an encoder"
VERIFIED: Final = "how many drafts are verified changes from step to step"

#: The methods whose `propose` is recorded, and V2's classes that draft by nothing else: later versions have more.
_METHODS: Final = ("eagle", "eagle3", "mtp", "dflash")
_SPECULATORS: Final = ("EagleSpeculator", "MTPSpeculator", "DFlashSpeculator")
#: Those of V2's sampler: they do nothing for a request that asks for nothing of theirs.
_LOGITS_PROCESSORS: Final = ("LogitBiasState", "PenaltiesState", "BadWordsState")


class Part(Flag):
    """What is recorded of a step, each by itself: of V1 by `v1-draft-phase` and `v1-step-inputs`, of V2 likewise."""

    V1_SAMPLING = auto()
    V1_DRAFTING = auto()
    V1_INPUTS = auto()
    #: Of a step whose other inputs are recorded.
    V1_METADATA = auto()
    V2_SAMPLING = auto()
    V2_DRAFTING = auto()
    V2_INPUTS = auto()


class Obstacle(NamedTuple):
    """One row.

    Attributes:
        reason: with `{}` for what `found` returns.
        hinders: what cannot be recorded then.
        found: of a runner, whether the obstacle is there, or which it is.
    """

    reason: str
    hinders: Part
    found: Callable[[Any], object]


def why_not(runner: Any, parts: Part) -> str | None:
    """All that stands against recording one of `parts`; None where nothing does.

    Args:
        runner: a `GPUModelRunner` of V1 or of Model Runner V2 that has its KV cache.
    """
    if runner.speculative_config is None or getattr(runner, "drafter", getattr(runner, "speculator", None)) is None:
        return "this worker does not draft"
    found = [(row.reason, row.found(runner)) for row in OBSTACLES if row.hinders & parts]
    return "; ".join(reason.format(what) for reason, what in found if what) or None


def first(obstacles: Mapping[str, object]) -> str | None:
    """The first of these reasons that holds, or None."""
    return next((reason for reason, holds in obstacles.items() if holds), None)


def _has(*names: str) -> Callable[[Any], bool]:
    """Whether the runner, or what it owns, has one of these, which not every version or engine has."""

    def found(runner: Any) -> bool:
        for name in names:
            owner, _, name = name.rpartition(".")
            if getattr(attrgetter(owner)(runner) if owner else runner, name, None):
                return True
        return False

    return found


def _ranks(*kinds: str) -> Callable[[Any], bool]:
    """Whether there are several ranks of this kind of parallelism."""
    return lambda r: any(getattr(r.vllm_config.parallel_config, f"{kind}_parallel_size", 1) > 1 for kind in kinds)


def _names(things: Iterable[Any]) -> str:
    return ", ".join(sorted({type(one).__name__ for one in things}))


def _builders(groups: Iterable[Iterable[Any]]) -> Iterator[Any]:
    return (group.get_metadata_builder(0) for one in groups for group in one)


def _host_builders(runner: Any) -> str:
    return _names(one for one in _builders(runner.attn_groups) if host_work(one))


def _draft_groups(runner: Any) -> Any:
    return getattr(runner.speculator, "attn_groups", ())


def _planned_first_pass(runner: Any) -> str:
    """The first pass reads metadata of the target's builders, and the graph does not make that again."""
    own = {name for groups in _draft_groups(runner) for group in groups for name in group.layer_names}
    shared = [[group for group in groups if not own.isdisjoint(group.layer_names)] for groups in runner.attn_groups]
    return _names(one for one in _builders(shared) if known(type(one)).planned_by_kernel)


def _plans_by_window(runner: Any) -> bool:
    planned = (one for one in _builders(runner.attn_groups) if getattr(one, "aot_schedule", False))
    return any(one.aot_sliding_window not in (None, (-1, -1)) for one in planned)


def _other_method(runner: Any) -> str:
    method: str = runner.speculative_config.method
    return "" if method in _METHODS else method


def _other_speculator(runner: Any) -> str:
    return "" if type(runner.speculator).__name__ in _SPECULATORS else _names([runner.speculator])


def _state_before(runner: Any) -> str:
    return "" if type(runner.model_state).__name__ == "DefaultModelState" else _names([runner.model_state])


def _state_after(runner: Any) -> str:
    """A hybrid's kernels pass over rows that no request has, so a graph can hold them.

    Up to 0.31 those that move states between blocks come about in the first step, and `RecoverSSMState` keeps a step's
    states on the host.
    """
    state, owner = runner.model_state, type(runner.model_state).postprocess_state.__qualname__.partition(".")[0]
    ready = not getattr(state, "_align_mode", False) or getattr(state._mamba_ctx, "is_initialized", False)
    hybrid = owner == "MambaHybridModelState" and getattr(state, "recoverssm", None) is None and ready
    return "" if owner == "ModelState" or hybrid else _names([state])


def _custom_processors(runner: Any) -> str:
    """V2's sampler has them from 0.31 on. An installed package brings some without being asked."""
    if hasattr(runner, "input_batch"):
        own, processors = f"{logits_processor.__name__}.", runner.input_batch.logitsprocs.all
        return _names(one for one in processors if not f"{type(one).__module__}.".startswith(own))
    processors = getattr(runner.sampler, "logits_processors", ())
    return _names(one for one in processors if type(one).__name__ not in _LOGITS_PROCESSORS)


def _moved_states(runner: Any) -> str:
    mode: str = runner.cache_config.mamba_cache_mode
    return mode if runner.model_config.is_hybrid and mode != "none" else ""


def _other_blocks(runner: Any) -> bool:
    return any(getattr(group, "kernel_block_size", None) is not None for group in runner.drafter.draft_attn_groups)


def _lacks_graphs(runner: Any) -> str:
    drafter, spec = runner.drafter, runner.speculative_config
    needed = getattr(drafter, "draft_context" if spec.use_dflash() else "draft_loop", None)
    if needed is None and not spec.use_dflash() and spec.num_speculative_tokens > 1:
        return "it needs draft-loop-graph's graphs"
    return "recording the graphs that it is built on failed" if needed is not None and needed.failed else ""


_PHASE: Final = Part.V1_SAMPLING | Part.V1_DRAFTING
_TAIL: Final = Part.V2_SAMPLING | Part.V2_DRAFTING
_SAMPLES: Final = Part.V1_SAMPLING | Part.V2_SAMPLING
_V1, _V2, _METADATA, _DRAFTS = Part.V1_INPUTS, Part.V2_INPUTS, Part.V1_METADATA, Part.V2_DRAFTING

OBSTACLES: Final = (
    Obstacle("the speculative method is {}", _PHASE | _DRAFTS, _other_method),
    Obstacle("{} drafts in a way of its own", _DRAFTS, _other_speculator),
    Obstacle("drafts are not verified by rejection", _TAIL, lambda r: r.rejection_sampler is None),
    Obstacle(VERIFIED, _V1, lambda r: r.speculative_config.method == "ngram_gpu"),
    Obstacle(VERIFIED, _TAIL, _has("adaptive_verification")),
    Obstacle(
        "the number of drafts changes from step to step",
        _DRAFTS,
        lambda r: r.speculative_config.uses_dynamic_speculative_decoding(),
    ),
    Obstacle("acceptance is estimated in each step", _DRAFTS, _has("speculator.acceptance_estimator")),
    Obstacle("{}", _PHASE, _lacks_graphs),
    Obstacle(
        "the drafter works on the host between steps: {}", _PHASE, lambda r: ", ".join(chain_facts(r.drafter).host_side)
    ),
    Obstacle(
        "the drafter has tokens of its own in its first pass",
        _PHASE,
        lambda r: not r.speculative_config.use_dflash() and r.drafter.needs_extra_input_slots,
    ),
    Obstacle(
        "the drafter has metadata of each KV cache group",
        _METADATA,
        _has("drafter.set_per_group_attn_metadata", "drafter.set_per_group_block_table"),
    ),
    Obstacle("ranks of data parallelism agree on each step on the host", _METADATA | _TAIL, _ranks("data")),
    Obstacle(STAGES, _PHASE | _V1 | _TAIL, _ranks("pipeline")),
    Obstacle(CONTEXT, _V1 | _TAIL, _ranks("decode_context", "prefill_context")),
    Obstacle(
        "experts are counted on the host in each step",
        _PHASE | _TAIL,
        attrgetter("vllm_config.parallel_config.enable_eplb"),
    ),
    Obstacle("batches are split in two", _PHASE, attrgetter("vllm_config.parallel_config.use_ubatching")),
    Obstacle(
        "weights are loaded from the host in each step",
        _PHASE | _TAIL,
        lambda _: not isinstance(get_offloader(), NoopOffloader),
    ),
    Obstacle(ADAPTERS, _V1 | _TAIL, attrgetter("lora_config")),
    Obstacle(ENCODER, _PHASE | _V1 | _TAIL, attrgetter("model_config.is_encoder_decoder")),
    Obstacle("prompts may be embeddings", _PHASE | _V1, attrgetter("enable_prompt_embeds")),
    Obstacle("the model takes images or the like", _V2, attrgetter("supports_mm_inputs")),
    Obstacle(
        "positions have several dimensions", _V1 | _V2, _has("model_config.uses_mrope", "model_config.uses_xdrope_dim")
    ),
    Obstacle("mamba_cache_mode is {}, whose states are moved on the host", _V1, _moved_states),
    Obstacle("{} has work of its own before each step", _V2, _state_before),
    Obstacle("{} has work of its own after each step", _TAIL, _state_after),
    Obstacle("hidden states leave the engine in each step", _TAIL, _has("aux_output_connector")),
    Obstacle("VLLM_COMPUTE_NANS_IN_LOGITS is set", _SAMPLES, lambda _: envs.VLLM_COMPUTE_NANS_IN_LOGITS),
    Obstacle("there are custom logits processors: {}", _SAMPLES, _custom_processors),
    Obstacle("sampling masks leave the engine in each step", Part.V2_SAMPLING, _has("sampler.return_sampling_mask")),
    Obstacle("ranks sample a part of the batch each", Part.V2_SAMPLING, _has("batch_sharder")),
    Obstacle("samples are watermarked", _TAIL, lambda r: "Watermark" in type(r.sampler).__name__),
    Obstacle(
        "the target has other states for its drafter",
        _PHASE,
        lambda r: hasattr(r.get_model(), "get_mtp_target_hidden_states"),
    ),
    Obstacle(
        "metadata has to be built in each step ({})", _PHASE, lambda r: refusing(builder_classes(r.drafter), "chain")
    ),
    # From 0.32 on, where a backend needs smaller blocks than the KV cache's, as it may in hybrids.
    Obstacle("block tables of the draft layers are made anew in each step", _PHASE, _other_blocks),
    Obstacle("metadata has to be built in each step ({})", _DRAFTS, lambda r: why_not_in_graph(_draft_groups(r))),
    Obstacle("{}: the first pass's plan is made by its first kernel, once", _DRAFTS, _planned_first_pass),
    Obstacle("{} may make metadata on the host", _METADATA | _V2, _host_builders),
    Obstacle("a schedule for windows depends on the longest sequence", _METADATA, _plans_by_window),
    Obstacle(
        "which keys are seen depends on prompts", _METADATA | _V2, _has("is_mm_prefix_lm", "model_config.rswa_window")
    ),
    Obstacle("layers share keys in fast prefills", _METADATA, attrgetter("cache_config.kv_sharing_fast_prefill")),
    Obstacle("slots are copied to the host in each step", _METADATA, _has("routed_experts_initialized")),
)
