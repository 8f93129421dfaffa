# SPDX-License-Identifier: Apache-2.0
"""Which engines a benchmark starts, and what each measures."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.version import Version

from vllm_hwplugin.cachedir import own_folder, private_folder
from vllm_hwplugin.errors import HwpluginError

from ._checkpoints import DRAFT_TOKENS, Checkpoints, load_prompts
from ._host import Host
from ._job import Job, Workload
from ._settings import engine_environment, engine_options
from ._shapes import NO_DRAFTS, SHAPES, cache_bytes, why_not, write_configs

TINY = "tiny"
#: On the V1 runner.
SIDES = ("stock", "patched")
#: The same two on Model Runner V2.
MRV2_SIDES = ("mrv2", "mrv2-patched")
ALL_SIDES = (*SIDES, *MRV2_SIDES)
#: With the plugin as it is by default, on either runner: what a variable of the patched sides is held to.
PLUGIN_SIDES = ("plugin", "mrv2-plugin")
#: Patched side -> the one that it is held to.
STOCK_OF = {"patched": "stock", "mrv2-patched": "mrv2"}

#: The first vLLM whose Model Runner V2 runs a method (`_validate_v2_model_runner` of vllm/config/vllm.py up to 0.21,
#: `_get_v2_model_runner_unsupported_features` since); it runs no other.
_MRV2_SINCE = {
    "eagle": Version("0.20.0"),
    "eagle3": Version("0.20.0"),
    "mtp": Version("0.20.0"),
    "dflash": Version("0.24.0"),
    "draft_model": Version("0.31.0"),
    NO_DRAFTS: Version("0.20.0"),
}

#: vLLM's ``worker_extension_cls`` for dummy shapes.
_DUMMY_EXTENSION = "vllm_hwplugin_lab.bench._dummy_worker.BenchWorker"
_PROMPT_TOKENS = 128
_MAX_MODEL_LEN = 512

#: What engines that are alive together may claim of a GPU.
_GPU_SHARE = 0.9
#: Rounded-up blocks, blocks for drafts, and what vLLM keeps to itself.
_KV_SLACK = 1.25
_LEAST_KV = 1 << 30


class NotOnThisHost(HwpluginError):
    """The benchmark asked for cannot run here."""


@dataclass(frozen=True)
class Case:
    """What is compared: one target, one drafter, one number of drafted tokens; 0 with `NO_DRAFTS`."""

    shape: str
    method: str
    k: int

    @property
    def label(self) -> str:
        return f"{self.shape} {self.method} k={self.k}"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What all engines of a command share; goes into the results file.

    Attributes:
        acceptance_length: synthetic, of a dummy shape; None: 1 + k / 2.
        gpu_memory_utilization: of each engine; None: an equal part.
        vllm_arguments: engine arguments of vLLM's, in place of what a command would choose.
    """

    sides: tuple[str, ...] = SIDES
    cudagraph_mode: str
    vllm_environment: Mapping[str, str]
    patched_environment: Mapping[str, str]
    acceptance_length: float | None = None
    gpu_memory_utilization: float | None = None
    vllm_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Settings(Asked):
    """Of ``bench``."""

    batches: tuple[int, ...]
    rounds: int
    tokens: int
    tiny_prompts: int
    tiny_tokens: int
    profile_tokens: int


def job_for(
    case: Case,
    side: str,
    settings: Settings,
    host: Host,
    checkpoints: Checkpoints | None,
    folder: Path,
    *,
    own_process: bool = False,
) -> Job:
    """The engine of one side of a case.

    Args:
        case: shape, method and k.
        side: one of `ALL_SIDES` or `PLUGIN_SIDES`.
        settings: shared by all engines.
        host: decides type and graphs.
        checkpoints: only needed for the tiny shape.
        folder: an existing folder for the config files of the dummy shapes.
        own_process: the engine's core is a process of its own, as users have it; else it is in its caller's.
    """
    options = engine_options(
        host.device,
        max_model_len=_MAX_MODEL_LEN,
        cudagraph_mode=settings.cudagraph_mode,
        max_num_seqs=max(settings.batches),
    )
    home = folder / f"{case.shape}-{case.method}-{case.k}-{side}"
    options |= model_of(case, synthetic_length(case, settings.acceptance_length), checkpoints, home)
    options = with_arguments(options, settings.vllm_arguments)
    if host.device != "cpu":
        # The engines of all sides are alive together.
        options = {
            "gpu_memory_utilization": share_of_gpu(settings.gpu_memory_utilization, settings.sides),
            # With a size that is given vLLM does not measure free memory, which other engines change meanwhile.
            "kv_cache_memory_bytes": kv_cache_bytes(case, options["max_num_seqs"], options["max_model_len"]),
            **options,
        }
    return Job(
        label=f"{case.label} {side}",
        patched=is_patched(side),
        options=options,
        environment=environment_of(side, host, settings, own_process=own_process),
        workloads=tuple(_workload(case, batch, settings, host, checkpoints) for batch in settings.batches),
        tokenize=case.shape == TINY,
    )


def with_arguments(options: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's options with those asked for in their places; of a dictionary only what is asked for changes."""
    found = dict(options)
    for name, value in asked.items():
        both = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = {**found[name], **value} if both else value
    return found


def shapes_folder() -> Path:
    """For the config files of dummy shapes: the same one in each run, where the cache has a place for this user.

    vLLM's key to compiled graphs holds the model's path: from other folders it would compile them anew each time.

    Raises:
        GateError: the gate that names the cache folder has a bad value.
        UntrustedFolder, OSError: there is no place.
    """
    return private_folder(own_folder() / "shapes")


def model_of(case: Case, length: float | None, checkpoints: Checkpoints | None, home: Path) -> dict[str, Any]:
    """vLLM's options for the target and the drafter of a case.

    Args:
        case: shape, method and k.
        length: the synthetic acceptance of a dummy shape.
        checkpoints: of the tiny shape.
        home: a folder for the config files of a dummy shape, whose own folder exists.
    """
    speculation: dict[str, Any] = {"method": case.method, "num_speculative_tokens": case.k}
    options: dict[str, Any] = {}
    target: Path
    drafter: Path | None
    if case.shape == TINY:
        assert checkpoints is not None
        target, drafter = checkpoints.target, None if case.method == NO_DRAFTS else checkpoints.drafter(case.method)
    else:
        shape = SHAPES[case.shape]
        with TemporaryDirectory(dir=home.parent) as folder:
            made = Path(folder) / "made"
            target, drafter = write_configs(shape, made, case.method, case.k + 1)
            kept = _kept(made, home)
        target, drafter = kept / target.name, None if drafter is None else kept / drafter.name
        options |= {"load_format": "dummy", "skip_tokenizer_init": True, "worker_extension_cls": _DUMMY_EXTENSION}
        if shape.tensor_parallel_size > 1:
            options["tensor_parallel_size"] = shape.tensor_parallel_size
        if shape.recurrent is not None:
            # FlashInfer's, which vLLM prefers on Hopper, is compiled by nvcc, which a host need not have.
            options["gdn_prefill_backend"] = "triton"
        # Random weights accept nothing, so vLLM's own synthetic acceptance decides by coin.
        speculation |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
    if drafter is not None:
        speculation["model"] = str(drafter)
    options["model"] = str(target)
    return options if case.method == NO_DRAFTS else {**options, "speculative_config": speculation}


def _kept(made: Path, home: Path) -> Path:
    """Move a folder to a name that begins as ``home`` and ends as its files say, unless it is there already."""
    texts = {str(file.relative_to(made)): file.read_text(encoding="utf-8") for file in made.rglob("*.json")}
    digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()
    kept = home.with_name(f"{home.name}-{digest[:12]}")
    try:
        made.rename(kept)
    except OSError:
        if not kept.is_dir():
            raise
    return kept


def is_patched(side: str) -> bool:
    """Whether the plugin is on in it."""
    return side in STOCK_OF or side in PLUGIN_SIDES


def on_v2(side: str) -> bool:
    """Whether it is on Model Runner V2."""
    return side.startswith("mrv2")


def share_of_gpu(wanted: float | None, engines: Sequence[str]) -> float:
    """vLLM's ``gpu_memory_utilization`` of each of the engines that are alive together."""
    return wanted if wanted is not None else round(_GPU_SHARE / len(engines), 3)


def environment_of(side: str, host: Host, settings: Asked, *, own_process: bool) -> dict[str, str]:
    """The variables of one side's engine."""
    extra = dict(settings.vllm_environment)
    if side in STOCK_OF:
        extra |= settings.patched_environment
    if on_v2(side):
        # A runner that the user set for all sides would make this one a second measurement of V1.
        extra.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    return engine_environment(
        host.device, patched=is_patched(side), extra=extra, v2_runner=on_v2(side), own_process=own_process
    )


def kv_cache_bytes(case: Case, requests: int, length: int) -> int:
    """A KV cache that holds so many requests of so many tokens of a case's shape, and their drafts."""
    if case.shape == TINY:
        return _LEAST_KV
    return max(_LEAST_KV, int(cache_bytes(SHAPES[case.shape], case.method, case.k, requests, length) * _KV_SLACK))


def check(planned: Sequence[Case], host: Host, sides: Sequence[str] = SIDES) -> None:
    """Refuse before any engine starts what cannot work on this host.

    Raises:
        NotOnThisHost: dummy weights or Model Runner V2 on a CPU, a shape that this vLLM does not know with its drafter,
            more GPUs than there are, or what this vLLM's Model Runner V2 refuses.
    """
    for case in planned:
        if case.shape == TINY:
            if case.method not in (*DRAFT_TOKENS, NO_DRAFTS):
                raise NotOnThisHost(
                    f"--shape {TINY} has no drafter for {case.method}, only for {', '.join(DRAFT_TOKENS)}"
                )
            continue
        if host.device == "cpu":
            why = "" if case.method == NO_DRAFTS else ": vLLM's CPU sampler has no synthetic acceptance"
            raise NotOnThisHost(f"--shape {case.shape} needs a GPU{why}; use --shape {TINY}")
        if (reason := why_not(case.shape, case.method, Version(host.vllm), on_v2=any(map(on_v2, sides)))) is not None:
            raise NotOnThisHost(reason)
        needed = SHAPES[case.shape].tensor_parallel_size
        if needed > host.gpus:
            raise NotOnThisHost(f"--shape {case.shape} needs {needed} GPUs, and this host has {host.gpus}")
    check_sides(sides, [c.method for c in planned], host)


def check_sides(sides: Sequence[str], methods: Iterable[str], host: Host) -> None:
    """Refuse sides that this host cannot run.

    Raises:
        NotOnThisHost: one is on Model Runner V2, and :func:`why_not_mrv2` has a reason.
    """
    refused = [side for side in sides if on_v2(side)]
    if refused and (reason := why_not_mrv2(methods, host)) is not None:
        raise NotOnThisHost(f"--side {' '.join(refused)} cannot be measured: {reason}; leave it out")


def why_not_mrv2(methods: Iterable[str], host: Host) -> str | None:
    """Why this host's Model Runner V2 does not run one of the methods; None where it runs them all."""
    if host.device == "cpu":
        return "Model Runner V2 needs a GPU, because it is written in Triton, which has no CPU backend"
    for method in sorted(set(methods)):
        since = _MRV2_SINCE.get(method)
        if since is None:
            return f"Model Runner V2 runs {method} in no supported vLLM"
        if Version(host.vllm).release < since.release:
            return f"vLLM {host.vllm}'s Model Runner V2 refuses {method}, which it runs since {since}"
    return None


def possible_sides(methods: Iterable[str], host: Host) -> tuple[str, ...]:
    """All sides that this host can run with all the methods."""
    return ALL_SIDES if host.device == "cuda" and why_not_mrv2(methods, host) is None else SIDES


def synthetic_length(case: Case, asked: float | None) -> float | None:
    """Tokens a step that vLLM is told to accept on average; None for the tiny shape, whose acceptance is real, and
    without drafts.
    """
    if case.shape == TINY or case.method == NO_DRAFTS:
        return None
    return asked if asked is not None else 1 + case.k / 2


def _workload(case: Case, batch: int, settings: Settings, host: Host, checkpoints: Checkpoints | None) -> Workload:
    if case.shape == TINY:
        assert checkpoints is not None
        # The same prompts at every batch size, so that acceptance can be compared between them.
        prompts, tokens = load_prompts(checkpoints, max(settings.tiny_prompts, batch)), settings.tiny_tokens
    else:
        dice, vocabulary, tokens = random.Random(0), SHAPES[case.shape].vocabulary, settings.tokens
        prompts = tuple(tuple(dice.randrange(1, vocabulary) for _ in range(_PROMPT_TOKENS)) for _ in range(batch))
    return Workload(
        name=f"batch {batch}",
        prompts=prompts,
        max_tokens=tokens,
        batch=batch,
        rounds=settings.rounds,
        warmup_tokens=min(32, tokens),
        profile_tokens=settings.profile_tokens if host.device == "cuda" else 0,
    )
