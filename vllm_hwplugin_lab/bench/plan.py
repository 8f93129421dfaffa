# SPDX-License-Identifier: Apache-2.0
"""The engines that a benchmark starts, and their measurements."""

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

from vllm_hwplugin.base.cachedir import own_folder, private_folder
from vllm_hwplugin.base.errors import HwpluginError

from ._checkpoints import DRAFT_TOKENS, Checkpoints, load_prompts
from ._host import Host
from ._job import Job, Workload
from ._settings import engine_environment, engine_options
from ._shapes import NO_DRAFTS, SHAPES, cache_bytes, why_not, write_configs

TINY = "tiny"
#: Unpatched and patched vLLM on Model Runner V1.
SIDES = ("stock", "patched")
#: The same on Model Runner V2.
MRV2_SIDES = ("mrv2", "mrv2-patched")
ALL_SIDES = (*SIDES, *MRV2_SIDES)
#: The plugin with its defaults, on either runner: the baseline for a variable of the patched sides.
PLUGIN_SIDES = ("plugin", "mrv2-plugin")
#: Patched side -> its baseline.
STOCK_OF = {"patched": "stock", "mrv2-patched": "mrv2"}

#: The methods that Model Runner V2 runs, with the first vLLM that does (`_validate_v2_model_runner` of
#: vllm/config/vllm.py up to 0.21, `_get_v2_model_runner_unsupported_features` since).
_MRV2_SINCE = {
    "eagle": Version("0.20.0"),
    "eagle3": Version("0.20.0"),
    "mtp": Version("0.20.0"),
    "dflash": Version("0.24.0"),
    "dspark": Version("0.25.0"),
    "draft_model": Version("0.31.0"),
    NO_DRAFTS: Version("0.20.0"),
}

#: vLLM's ``worker_extension_cls`` for dummy shapes.
_DUMMY_EXTENSION = "vllm_hwplugin_lab.bench._dummy_worker.BenchWorker"
_PROMPT_TOKENS = 128
_MAX_MODEL_LEN = 512

#: Share of a GPU's memory for all concurrent engines.
_GPU_SHARE = 0.9
#: For rounded-up blocks, blocks for drafts, and vLLM's own blocks.
_KV_SLACK = 1.25
_LEAST_KV = 1 << 30


class NotOnThisHost(HwpluginError):
    """The requested benchmark cannot run here."""


@dataclass(frozen=True)
class Case:
    """A target, a drafter and a number of drafted tokens (0 with `NO_DRAFTS`)."""

    shape: str
    method: str
    k: int

    @property
    def label(self) -> str:
        return f"{self.shape} {self.method} k={self.k}"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Settings that all engines of a command share; part of the results file.

    Attributes:
        acceptance_length: Synthetic acceptance length of dummy shapes; None: 1 + k / 2.
        gpu_memory_utilization: Of each engine; None: an equal part.
        vllm_arguments: vLLM's engine arguments that override the command's.
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
    """The settings of ``bench``."""

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
    """Return the job of a side of a case.

    Args:
        side: One of `ALL_SIDES` or `PLUGIN_SIDES`.
        host: Decides dtype and graphs.
        checkpoints: Only needed for the tiny shape.
        folder: An existing folder for the config files of dummy shapes.
        own_process: Whether the engine core runs in its own process, as for users; else it shares the caller's.
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
        # The engines of all sides run at the same time.
        options = {
            "gpu_memory_utilization": share_of_gpu(settings.gpu_memory_utilization, settings.sides),
            # With a given size vLLM does not measure free memory, which concurrent engines change.
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


def with_arguments(options: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's options with these arguments; dictionaries are merged."""
    merged = dict(options)
    for name, value in arguments.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = {**merged[name], **value} if both else value
    return merged


def shapes_folder() -> Path:
    """Return the folder for the config files of dummy shapes.

    It is the same in each run, because the model's path is part of vLLM's key for compiled graphs: another folder would
    compile them again.

    Raises:
        GateError: VLLM_HWPLUGIN_CACHE_DIR has an invalid value.
        UntrustedFolder, OSError: There is no cache folder for this user.
    """
    return private_folder(own_folder() / "shapes")


def model_of(case: Case, length: float | None, checkpoints: Checkpoints | None, home: Path) -> dict[str, Any]:
    """Return vLLM's options for the target and drafter of a case.

    Args:
        length: The synthetic acceptance length of a dummy shape.
        home: Prefix of the folder for a dummy shape's config files; its parent must exist.
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
            configs = _put(made, home)
        target, drafter = configs / target.name, None if drafter is None else configs / drafter.name
        options |= {"load_format": "dummy", "worker_extension_cls": _DUMMY_EXTENSION}
        # vLLM asks a tokenizer for the tokens of images.
        options["skip_tokenizer_init"] = shape.images is None
        if shape.tensor_parallel_size > 1:
            options["tensor_parallel_size"] = shape.tensor_parallel_size
        if shape.recurrent is not None:
            # vLLM prefers FlashInfer on Hopper, which needs nvcc at run time.
            options["gdn_prefill_backend"] = "triton"
        # Random weights accept nothing, so vLLM's synthetic acceptance decides at random.
        speculation |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
    if drafter is not None:
        speculation["model"] = str(drafter)
    options["model"] = str(target)
    return options if case.method == NO_DRAFTS else {**options, "speculative_config": speculation}


def _put(made: Path, home: Path) -> Path:
    """Move a folder to a name with its content's digest."""
    # If the name exists already, the folder is not moved.
    texts = {str(file.relative_to(made)): file.read_text(encoding="utf-8") for file in made.rglob("*.json")}
    digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()
    target = home.with_name(f"{home.name}-{digest[:12]}")
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    return target


def is_patched(side: str) -> bool:
    """Whether the plugin is on in a side."""
    return side in STOCK_OF or side in PLUGIN_SIDES


def on_v2(side: str) -> bool:
    """Whether a side is on Model Runner V2."""
    return side.startswith("mrv2")


def share_of_gpu(wanted: float | None, engines: Sequence[str]) -> float:
    """Return ``gpu_memory_utilization`` for each of several concurrent engines."""
    return wanted if wanted is not None else round(_GPU_SHARE / len(engines), 3)


def environment_of(side: str, host: Host, settings: Asked, *, own_process: bool) -> dict[str, str]:
    """Return the environment variables of a side's engine."""
    extra = dict(settings.vllm_environment)
    if side in STOCK_OF:
        extra |= settings.patched_environment
    if on_v2(side):
        # A runner that the user sets for all sides would make this side a second measurement of V1.
        extra.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    return engine_environment(
        host.device, patched=is_patched(side), extra=extra, v2_runner=on_v2(side), own_process=own_process
    )


def kv_cache_bytes(case: Case, requests: int, length: int) -> int:
    """Return the KV cache bytes for requests of a length.

    The cache also holds their drafts.
    """
    if case.shape == TINY:
        return _LEAST_KV
    return max(_LEAST_KV, int(cache_bytes(SHAPES[case.shape], case.method, case.k, requests, length) * _KV_SLACK))


def check(planned: Sequence[Case], host: Host, sides: Sequence[str] = SIDES) -> None:
    """Refuse cases that cannot run on this host, before an engine starts.

    Raises:
        NotOnThisHost: Dummy weights or Model Runner V2 on a CPU, a shape or drafter that this vLLM does not know, too
            few GPUs, or a method that this vLLM's Model Runner V2 refuses.
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
        NotOnThisHost: A side is on Model Runner V2, and :func:`why_not_mrv2` has a reason.
    """
    refused = [side for side in sides if on_v2(side)]
    if refused and (reason := why_not_mrv2(methods, host)) is not None:
        raise NotOnThisHost(f"--side {' '.join(refused)} cannot be measured: {reason}; omit it")


def why_not_mrv2(methods: Iterable[str], host: Host) -> str | None:
    """Return why this vLLM's V2 does not run a method.

    None: it runs all methods.
    """
    if host.device == "cpu":
        return "Model Runner V2 needs a GPU, because it is written in Triton, which has no CPU backend"
    for method in sorted(set(methods)):
        since = _MRV2_SINCE.get(method)
        if since is None:
            return f"Model Runner V2 runs {method} in no supported vLLM"
        if Version(host.vllm).release < since.release:
            return f"Model Runner V2 runs {method} from vLLM {since} on, found vLLM {host.vllm}"
    return None


def possible_sides(methods: Iterable[str], host: Host) -> tuple[str, ...]:
    """Return all sides that this host can run with these methods."""
    if host.device != "cuda" or why_not_mrv2(methods, host) is not None:
        return SIDES
    # V1 has no DSpark.
    return MRV2_SIDES if "dspark" in methods else ALL_SIDES


def synthetic_length(case: Case, asked: float | None) -> float | None:
    """Return the synthetic acceptance length in tokens per step.

    None for the tiny shape, whose acceptance is real, and without drafts.
    """
    if case.shape == TINY or case.method == NO_DRAFTS:
        return None
    return asked if asked is not None else 1 + case.k / 2


def _workload(case: Case, batch: int, settings: Settings, host: Host, checkpoints: Checkpoints | None) -> Workload:
    if case.shape == TINY:
        assert checkpoints is not None
        # The same prompts at every batch size, so that their acceptance can be compared.
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
