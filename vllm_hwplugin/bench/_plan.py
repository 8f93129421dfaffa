# SPDX-License-Identifier: Apache-2.0
"""Which engines a benchmark starts, and what each measures."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..patching import PatchingError
from ._checkpoints import Checkpoints, load_prompts
from ._host import Host
from ._job import Job, Workload
from ._settings import engine_environment, engine_options
from ._shapes import SHAPES, write_configs

TINY = "tiny"
SIDES = ("stock", "patched")

_PROMPT_TOKENS = 128
_MAX_MODEL_LEN = 512


class NotOnThisHost(PatchingError):
    """The benchmark asked for cannot run here."""


@dataclass(frozen=True)
class Case:
    """What is compared: one target, one drafter, one number of drafted tokens."""

    shape: str
    method: str
    k: int

    @property
    def label(self) -> str:
        return f"{self.shape} {self.method} k={self.k}"


@dataclass(frozen=True)
class Settings:
    """What all engines of a benchmark share; goes into the results file."""

    batches: tuple[int, ...]
    rounds: int
    cudagraph_mode: str
    tokens: int
    tiny_prompts: int
    tiny_tokens: int
    acceptance_length: float | None
    profile_tokens: int
    vllm_environment: Mapping[str, str]
    patched_environment: Mapping[str, str]


def job_for(
    case: Case, side: str, settings: Settings, host: Host, checkpoints: Checkpoints | None, folder: Path
) -> Job:
    """The engine of one side of a case.

    Args:
        case: shape, method and k.
        side: ``stock`` or ``patched``.
        settings: shared by all engines.
        host: decides type and graphs.
        checkpoints: only needed for the tiny shape.
        folder: an existing folder for the config files of the dummy shapes.
    """
    options = engine_options(
        host.device,
        max_model_len=_MAX_MODEL_LEN,
        cudagraph_mode=settings.cudagraph_mode,
        max_num_seqs=max(settings.batches),
    )
    speculation: dict[str, Any] = {"method": case.method, "num_speculative_tokens": case.k}
    if case.shape == TINY:
        assert checkpoints is not None
        target, drafter = checkpoints.target, checkpoints.drafter(case.method)
    else:
        home = folder / f"{case.shape}-{case.method}-{case.k}-{side}"
        target, drafter = write_configs(SHAPES[case.shape], home, case.method, case.k + 1)
        options |= {"load_format": "dummy", "skip_tokenizer_init": True}
        # Random weights accept nothing, so vLLM's own synthetic acceptance decides by coin.
        speculation |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": synthetic_length(case, settings),
        }
    options |= {"model": str(target), "speculative_config": {**speculation, "model": str(drafter)}}
    extra = dict(settings.vllm_environment)
    if side == "patched":
        extra |= settings.patched_environment
    return Job(
        label=f"{case.label} {side}",
        patched=side == "patched",
        options=options,
        environment=engine_environment(host.device, patched=side == "patched", extra=extra),
        workloads=tuple(_workload(case, batch, settings, host, checkpoints) for batch in settings.batches),
        tokenize=case.shape == TINY,
    )


def check(planned: Sequence[Case], host: Host) -> None:
    """Refuse before any engine starts what cannot work on this host.

    Raises:
        NotOnThisHost: dummy weights on a CPU.
    """
    dummy = sorted({c.shape for c in planned if c.shape != TINY})
    if host.device == "cpu" and dummy:
        raise NotOnThisHost(
            f"--shape {' '.join(dummy)} needs a GPU: vLLM's CPU sampler has no synthetic acceptance; use --shape tiny"
        )


def synthetic_length(case: Case, settings: Settings) -> float | None:
    """Tokens a step that vLLM is told to accept on average; None for the tiny shape, whose acceptance is real."""
    if case.shape == TINY:
        return None
    return settings.acceptance_length if settings.acceptance_length is not None else 1 + case.k / 2


def _workload(case: Case, batch: int, settings: Settings, host: Host, checkpoints: Checkpoints | None) -> Workload:
    if case.shape == TINY:
        assert checkpoints is not None
        # The same prompts at every batch size, so that acceptance can be compared between them.
        prompts, tokens = load_prompts(checkpoints, max(settings.tiny_prompts, batch)), settings.tiny_tokens
    else:
        prompts, tokens = _random_prompts(batch, SHAPES[case.shape].vocabulary), settings.tokens
    return Workload(
        name=f"batch {batch}",
        prompts=prompts,
        max_tokens=tokens,
        batch=batch,
        rounds=settings.rounds,
        warmup_tokens=min(32, tokens),
        profile_tokens=settings.profile_tokens if host.device == "cuda" else 0,
    )


def _random_prompts(count: int, vocabulary: int) -> tuple[tuple[int, ...], ...]:
    dice = random.Random(0)
    return tuple(tuple(dice.randrange(1, vocabulary) for _ in range(_PROMPT_TOKENS)) for _ in range(count))


def cases(shapes: Sequence[str], methods: Sequence[str], ks: Sequence[int]) -> list[Case]:
    return [Case(shape, method, k) for shape in shapes for method in methods for k in ks]
