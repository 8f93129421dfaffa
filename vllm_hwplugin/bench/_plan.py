# SPDX-License-Identifier: Apache-2.0
"""Which engines a benchmark starts, and what each measures."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from ..errors import HwpluginError
from ._checkpoints import Checkpoints, load_prompts
from ._host import Host
from ._job import Job, Workload
from ._settings import engine_environment, engine_options
from ._shapes import SHAPES, write_configs

TINY = "tiny"
SIDES = ("stock", "patched")
#: Stock vLLM on Model Runner V2, which has drafter graphs of its own; the other sides run V1.
MRV2 = "mrv2"

#: The first vLLM whose Model Runner V2 runs a method (`_validate_v2_model_runner` of vllm/config/vllm.py up to 0.21,
#: `_get_v2_model_runner_unsupported_features` since).
_MRV2_SINCE = {"eagle3": Version("0.20.0"), "dflash": Version("0.24.0")}

_PROMPT_TOKENS = 128
_MAX_MODEL_LEN = 512


class NotOnThisHost(HwpluginError):
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
        side: ``stock``, ``patched`` or ``mrv2``.
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
    if side == MRV2:
        # A runner that the user set for all sides would make this one a second measurement of stock.
        extra.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    environment = engine_environment(host.device, patched=side == "patched", extra=extra, v2_runner=side == MRV2)
    return Job(
        label=f"{case.label} {side}",
        patched=side == "patched",
        options=options,
        environment=environment,
        workloads=tuple(_workload(case, batch, settings, host, checkpoints) for batch in settings.batches),
        tokenize=case.shape == TINY,
    )


def check(planned: Sequence[Case], host: Host, sides: Sequence[str] = SIDES) -> None:
    """Refuse before any engine starts what cannot work on this host.

    Raises:
        NotOnThisHost: dummy weights or Model Runner V2 on a CPU, or a method that this vLLM's Model Runner V2 refuses.
    """
    dummy = sorted({c.shape for c in planned if c.shape != TINY})
    if host.device == "cpu" and dummy:
        raise NotOnThisHost(
            f"--shape {' '.join(dummy)} needs a GPU: vLLM's CPU sampler has no synthetic acceptance; use --shape tiny"
        )
    if MRV2 in sides:
        _check_mrv2(planned, host)


def _check_mrv2(planned: Sequence[Case], host: Host) -> None:
    if host.device == "cpu":
        raise NotOnThisHost("--mrv2 needs a GPU: Model Runner V2 is written in Triton, which has no CPU backend")
    for method in sorted({c.method for c in planned}):
        since = _MRV2_SINCE[method]
        if Version(host.vllm).release < since.release:
            raise NotOnThisHost(
                f"--mrv2 cannot measure {method} on vLLM {host.vllm}: its Model Runner V2 refuses the method, which it "
                f"runs since {since}; leave --mrv2 out, or take a newer vLLM"
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
