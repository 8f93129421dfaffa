# SPDX-License-Identifier: Apache-2.0
"""Decide which patched-in features a worker of vLLM uses, and why not the rest.

It depends on the model runner, the speculative method, the CUDA graph mode and the model. A feature's own report
(`vllm_hwplugin.base.run_records.use`) takes precedence over this table.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON

from vllm_hwplugin.base import gates
from vllm_hwplugin.base.run_records import RunRecord
from vllm_hwplugin.base.terms import TERMS, Term, read_term
from vllm_hwplugin.linear import layers
from vllm_hwplugin.spec_decode import capture_sizes, dflash_context_norm, draft_schedule, step_counts
from vllm_hwplugin.spec_decode.drafters import CACHED_METHODS, DRAFTERS, MASK_METHODS
from vllm_hwplugin.spec_decode.engine_report import NO_SPECULATION, UNNEEDED, Findings, Unused, report, use_of
from vllm_hwplugin.spec_decode.obstacles import PARTS, decodes_plainly
from vllm_hwplugin.spec_decode.v1.draft_decision import drafter_obstacle

# By kind of drafter, its methods and what they are called in a report.
_KINDS: Final = {"cached": (CACHED_METHODS, "drafters with a KV cache"), "masks": (MASK_METHODS, "DFlash")}

#: There FLASH_ATTN refuses such a cache, and FLASHINFER up to 0.32 takes a request's drafts for a prompt. Triton has no
#: such numbers below compute capability 8.9.
_FP8_CACHE: Final = (
    "the fp8 KV cache costs the graphs on this GPU if vLLM up to 0.32 chooses FLASHINFER for it: set "
    "--attention-backend TRITON_ATTN (from compute capability 8.9) or --kv-cache-dtype auto, or use vLLM 0.33"
)


def report_worker(worker: Any) -> None:
    """Report what a ready worker uses, as `compile_or_warm_up_model`'s last step."""
    report(worker, _examine)
    step_counts.begin()


def _examine(worker: Any, entry: RunRecord) -> Findings:
    config, spec = worker.vllm_config, worker.vllm_config.speculative_config
    drafts_here = _drafter(worker) is not None
    counts = drafts_here or _decodes_plainly(worker)
    drafts = "no speculation" if spec is None else f"{spec.method} k={spec.num_speculative_tokens}"
    return Findings(
        described=f"worker {worker.rank} ({current_platform.device_type}, Model Runner "
        f"{'V2' if worker.use_v2_model_runner else 'V1'}, {drafts}, {config.compilation_config.cudagraph_mode.name} "
        "graphs)",
        uses={name: use_of(reasons) for name, reasons in why_unused(worker, entry).items()},
        # A pipeline stage that does not draft leaves this to the last stage.
        demanded=PARTS if spec is None or drafts_here else (),
        # Ranks of tensor parallelism take the same steps.
        engine=config.parallel_config.data_parallel_index if worker.is_driver_worker and counts else None,
    )


def _drafter(worker: Any) -> Any:
    """Return the drafter; in a pipeline only the last stage has one."""
    return getattr(worker.model_runner, "speculator" if worker.use_v2_model_runner else "drafter", None)


def _decodes_plainly(worker: Any) -> bool:
    return bool(worker.use_v2_model_runner) and decodes_plainly(worker.model_runner)


def _quantized_cache_before_hopper(config: Any) -> bool:
    cuda = current_platform.device_type == "cuda"
    return cuda and config.cache_config.cache_dtype.startswith("fp8") and not current_platform.has_device_capability(90)


def _no_graphs(config: Any) -> Unused:
    """Return the reason for decode batches without FULL graphs, and its cure."""
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
    elif mode.decode_mode().name != "FULL" and _quantized_cache_before_hopper(config):
        cure = f"{_FP8_CACHE}; if that is not it, {cure}"
    return Unused(
        f"the target's cudagraph_mode is {mode.name}", mode.decode_mode().name != "FULL", cause=cause, cure=cure
    )


def why_unused(worker: Any, entry: RunRecord) -> dict[str, tuple[Unused, ...]]:
    """Return each feature's reasons not to use it, in order.

    The worker's model is loaded and its KV cache set up; `entry` has each feature's `uses_when`.
    """
    facts, vllm = EngineFacts(worker), entry.vllm_version or "0"
    declared = {name: entry.features[name].get("uses_when", "").splitlines() for name in entry.live}
    return {
        name: tuple(facts.reason(term) for term in map(read_term, terms) if term.asked_on(vllm))
        for name, terms in declared.items()
        if terms
    }


class EngineFacts:
    """Answer the terms of `uses_when` for a worker."""

    def __init__(self, worker: Any) -> None:
        config, self._drafter = worker.vllm_config, _drafter(worker)
        spec, model, parallel = config.speculative_config, config.model_config, config.parallel_config
        self._worker, self._config, self._spec = worker, config, spec
        self._mode, self._method = config.compilation_config.cudagraph_mode, getattr(spec, "method", None)
        self._runner = "V2" if worker.use_v2_model_runner else "V1"
        named = config.attention_config.backend is not None or getattr(spec, "attention_backend", None) is not None
        #: By term, whether its reason holds, which costs the engine nothing; or a function of the term's values.
        self._unneeded: dict[str, object] = {
            "attention-backend": not named,
            "copied-head": lambda: worker.model_runner.draft_head is None,
            "data-parallel": parallel.data_parallel_size == 1,
            "draft-loader:": self._loaded_otherwise,
            "draft-setting:": lambda name: getattr(spec, name, None) is None,
            "windowed-draft": self._windowless,
            "dtype:": lambda name: model.dtype is not getattr(torch, name, None),
            "hopper": not layers.ON_HOPPER,
            "image-features": lambda: not hasattr(worker.model_runner.model, "deepstack_input_embeds_num_tokens"),
            "images": not model.is_mm_prefix_lm,
            "inner-state": not model.has_inner_state,
            "mixed-graphs": self._mode.mixed_mode().name != "FULL",
            "no-kv-connector": config.kv_transfer_config is not None,
            "pipeline": parallel.pipeline_parallel_size == 1,
            "reasoning-parser": not config.structured_outputs_config.reasoning_parser,
            "samples": model.runner_type == "pooling",
            "sleep-mode": not model.enable_sleep_mode,
            "three-drafts": spec is not None and spec.num_speculative_tokens < 3,
            "token-by-token": self._method in MASK_METHODS,
            "triton": not HAS_TRITON,
        }

    def reason(self, term: Term) -> Unused:
        """Return a term's reason against a feature, and whether it holds."""
        text, values, method, drafter = TERMS[term.name], term.values, self._method, self._drafter
        match term.name:
            case "speculation":
                return NO_SPECULATION._replace(holds=self._spec is None)
            case "plain-decode":
                cure = "" if gates.is_on(gates.PLAIN_DECODE) else f"--speculative-config, or {gates.PLAIN_DECODE}=1"
                return NO_SPECULATION._replace(text=text, holds=self._undrafted, cure=cure)
            case "drafts-here":
                return Unused(text, self._is_early_stage(), cause=text)
            case "runner:":
                here, wanted = text.format(self._runner), values[0].upper()
                return Unused(here, wanted != self._runner, cause=here, wants=wanted)
            case "method:":
                names = [row.name for row in DRAFTERS if row.method in values and not row.v1]
                return self._other_drafter(text, method not in values, " or ".join(dict.fromkeys(names or values)))
            case "drafter:":
                methods, wants = _KINDS[values[0]]
                return self._other_drafter(text, method not in methods, wants)
            case "model-drafts":
                wants = "drafters that run a model"
                return self._other_drafter(text, lambda: not hasattr(drafter, "draft_graphs"), wants)
            case "stepwise-drafts":
                wants = "drafters that draft step by step"
                return self._other_drafter(text, lambda: not hasattr(drafter, "fused_drafts"), wants)
            case "decode-graphs":
                return _no_graphs(self._config)
            case "obstacles":
                return Unused("{}", lambda: drafter_obstacle(drafter, self._mode, together=False))
            case "capture-sizes":
                return Unused(text, capture_sizes.why_left(self._config.compilation_config))
            case "draft-counts":
                return Unused(text, draft_schedule.why_fixed(self._config.compilation_config))
            case "context-norm":
                return Unused("{}", dflash_context_norm.context_norm_obstacle)
        holds = self._unneeded[term.name]
        return Unused(
            text.format(", ".join(values)), partial(holds, *values) if callable(holds) else holds, cause=UNNEEDED
        )

    def _other_drafter(self, text: str, holds: object, wants: str) -> Unused:
        return Unused(text.format(self._method), holds, cause=f"the drafter is {self._method}", wants=wants)

    def _undrafted(self) -> str:
        if self._spec is not None:
            return ""
        if not gates.is_on(gates.PLAIN_DECODE):
            return f"{gates.PLAIN_DECODE} is off"
        # Model Runner V1, and a stage before the last, are other reasons.
        elsewhere = self._runner == "V1" or self._is_early_stage()
        return "" if elsewhere or _decodes_plainly(self._worker) else "nothing is sampled"

    def _is_early_stage(self) -> bool:
        """Whether another stage of the pipeline samples."""
        if self._spec is not None:
            return self._drafter is None
        pipeline = self._config.parallel_config.pipeline_parallel_size > 1
        return pipeline and not getattr(self._worker.model_runner, "is_last_pp_rank", True)

    def _loaded_otherwise(self, *modules: str) -> bool:
        return type(getattr(self._drafter, "model", None)).__module__.rpartition(".")[2] not in modules

    def _windowless(self) -> bool:
        groups = (group for groups in getattr(self._drafter, "attn_groups", None) or () for group in groups)
        return not any(getattr(group.kv_cache_spec, "sliding_window", None) for group in groups)
