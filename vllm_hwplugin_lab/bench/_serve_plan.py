# SPDX-License-Identifier: Apache-2.0
"""A user's own case: his target, his drafter, his prompts, and the engines and loads that measure it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._checkpoints import Checkpoints
from ._host import Host
from ._job import Job
from ._plan import (
    TINY,
    Case,
    environment_of,
    is_patched,
    kv_cache_bytes,
    model_of,
    share_of_gpu,
    synthetic_length,
)
from ._prompts import Prompt, arrivals, requests_of
from ._settings import engine_options
from ._turns import Measurement

#: The name in the command -> vLLM's speculative config. P-EAGLE is Eagle3 that drafts every token in one pass.
METHODS: Mapping[str, Mapping[str, Any]] = {
    "eagle": {"method": "eagle"},
    "eagle3": {"method": "eagle3"},
    "p-eagle": {"method": "eagle3", "parallel_drafting": True},
    "mtp": {"method": "mtp"},
    "dflash": {"method": "dflash"},
    "draft_model": {"method": "draft_model"},
}
#: Whose drafter is in the target's own checkpoint.
BUILT_IN = frozenset({"mtp"})
#: Tokens that an engine is warmed up with.
_WARM_UP = 16


@dataclass(frozen=True)
class ServeSettings:
    """What all engines and loads of a case share; goes into the results file.

    Attributes:
        target: a folder or a name; None where ``shape`` says what the target and the drafter are.
        shape: as ``bench --shape`` names them; None where they are the user's own.
        acceptance_length: synthetic, of a dummy shape; None: 1 + k / 2.
        prompts: the file; None: the tiny shape's own, or random tokens, ``input_len`` of them.
        concurrencies: requests at once; 0: no bound.
        request_rates: requests a second; 0: all at the start.
        kv_cache_gib: of each engine; None: vLLM measures free memory, so engines start one after the other.
        per_slot: requests of a load for each that runs at once, at most; None: all prompts, however many run at once.
        all_k_at_once: the engines of all ``ks`` are alive together, too.
    """

    target: str | None
    draft: str | None
    shape: str | None
    acceptance_length: float | None
    method: str
    ks: tuple[int, ...]
    sides: tuple[str, ...]
    prompts: str | None
    num_prompts: int
    input_len: int
    output_len: int
    temperatures: tuple[float, ...]
    concurrencies: tuple[int, ...]
    request_rates: tuple[float, ...]
    rounds: int
    seed: int
    chat: bool
    ignore_eos: bool
    cudagraph_mode: str
    max_model_len: int | None
    tensor_parallel_size: int
    gpu_memory_utilization: float | None
    kv_cache_gib: float | None
    vllm_environment: Mapping[str, str]
    patched_environment: Mapping[str, str]
    per_slot: int | None = None
    all_k_at_once: bool = False

    @property
    def together(self) -> list[tuple[int, ...]]:
        """The numbers of drafted tokens whose engines are alive at the same time."""
        return [self.ks] if self.all_k_at_once else [(one,) for one in self.ks]


@dataclass(frozen=True)
class LoadCase:
    """One way to send the prompts."""

    concurrency: int
    request_rate: float
    temperature: float

    @property
    def name(self) -> str:
        bound = f"{self.concurrency} at once" if self.concurrency else "unbounded"
        rate = f", {self.request_rate:g} a second" if self.request_rate else ""
        return f"{bound}{rate}, temperature {self.temperature:g}"


def load_cases(settings: ServeSettings) -> list[LoadCase]:
    """Every concurrency with every rate and every temperature."""
    return [
        LoadCase(concurrency, rate, temperature)
        for concurrency in settings.concurrencies
        for rate in settings.request_rates
        for temperature in settings.temperatures
    ]


def serve_job(
    k: int, side: str, settings: ServeSettings, host: Host, checkpoints: Checkpoints | None, folder: Path
) -> Job:
    """The engine of one side.

    Args:
        k: drafted tokens a step.
        side: one of `ALL_SIDES` or `PLUGIN_SIDES`.
        settings: of the case.
        host: decides type and graphs.
        checkpoints: of the tiny shape.
        folder: an existing one for the config files of a dummy shape.
    """
    length = settings.max_model_len or settings.input_len + settings.output_len + k + 1
    most = max(settings.concurrencies)
    options = engine_options(
        host.device, max_model_len=length, cudagraph_mode=settings.cudagraph_mode, max_num_seqs=most
    )
    if 0 in settings.concurrencies:
        del options["max_num_seqs"]  # as many as vLLM takes by default
    if settings.max_model_len is None and settings.prompts is not None:
        del options["max_model_len"]  # the model's own: nobody has counted the prompts' tokens
    options |= _models(k, side, settings, checkpoints, folder)
    if host.device != "cpu":
        # The checkpoint's own type; on a CPU float32 is what can be compared.
        options |= {
            "dtype": "auto",
            # A shape may be one for several GPUs.
            "tensor_parallel_size": max(settings.tensor_parallel_size, options.get("tensor_parallel_size", 1)),
            "gpu_memory_utilization": share_of_gpu(
                settings.gpu_memory_utilization, settings.sides * len(settings.together[0])
            ),
        }
        if (size := kv_cache_size(k, settings)) is not None:
            options["kv_cache_memory_bytes"] = size
    return Job(
        label=f"{settings.method} k={k} {side}",
        patched=is_patched(side),
        options=options,
        environment=environment_of(side, host, settings, own_process=True),
        workloads=(),
    )


def kv_cache_size(k: int, settings: ServeSettings) -> int | None:
    """Bytes of each engine's KV cache; None where vLLM is to measure free memory, for which it has to be alone."""
    if settings.kv_cache_gib is not None:
        return int(settings.kv_cache_gib * (1 << 30))
    if settings.shape is None or 0 in settings.concurrencies or settings.prompts is not None:
        return None
    length = settings.max_model_len or settings.input_len + settings.output_len + k + 1
    return kv_cache_bytes(Case(settings.shape, settings.method, k), max(settings.concurrencies), length)


def _models(
    k: int, side: str, settings: ServeSettings, checkpoints: Checkpoints | None, folder: Path
) -> dict[str, Any]:
    if settings.shape is not None:
        case = Case(settings.shape, settings.method, k)
        return model_of(
            case,
            synthetic_length(case, settings),
            checkpoints,
            folder / f"{settings.shape}-{settings.method}-{k}-{side}",
        )
    speculation = {**METHODS[settings.method], "num_speculative_tokens": k}
    if settings.draft is not None:
        speculation["model"] = settings.draft
    return {"model": settings.target, "speculative_config": speculation}


def serve_measurements(settings: ServeSettings, prompts: Sequence[Prompt]) -> list[Measurement]:
    """What every side is asked for.

    Args:
        settings: of the case.
        prompts: of the requests.
    """
    found = []
    for case in load_cases(settings):
        own = prompts
        if settings.per_slot is not None and case.concurrency:
            own = prompts[: case.concurrency * settings.per_slot]
        times = arrivals(len(own), case.request_rate or None, settings.seed)
        load = {
            **dataclasses.asdict(case),
            "name": case.name,
            "requests": requests_of(own, settings.output_len, times),
            "seed": settings.seed,
            "chat": settings.chat,
            "ignore_eos": settings.ignore_eos,
            # A dummy shape has no tokenizer.
            "detokenize": settings.shape in (None, TINY),
        }
        first = own[: case.concurrency or None]
        few = requests_of(first, _WARM_UP, [0.0] * len(first))
        warm_up = {"do": "warm-up", "load": {**load, "requests": few}}
        found.append(Measurement(case.name, {"do": "load", "load": load}, "loaded", warm_up, None))
    return found
