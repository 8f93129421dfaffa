# SPDX-License-Identifier: Apache-2.0
"""What a soak runs, and what it is held to.

A drafter that reads a stale tensor leaves the texts right and its drafts wrong; a fault of memory may show in either or
end the process. So the texts are held to the target's own choices, and the acceptance to that of stock vLLM on the same
model runner, which gets the same requests.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ._checkpoints import Checkpoints
from ._host import Host
from ._job import Event
from ._launch import Ended, ended_by_sigterm
from ._plan import STOCK_OF, TINY, Case, environment_of, is_patched, kv_cache_bytes, share_of_gpu
from ._session import Session
from ._settings import engine_environment, engine_options

MODULE = "vllm_hwplugin_lab.bench._soak_engine"
FORMAT = "soak 2"
MAX_MODEL_LEN = 512

#: How far below the target's first choice, in nats, a greedy token may be: near-ties of bfloat16 go either way.
_WORST_GAP = {"cpu": 1e-3}
_WORST_GAP_BFLOAT16 = 0.5
#: How far a position's share of accepted drafts may be below stock's. It may be above: the target accepts nothing that
#: it would not have said, and dflash-context-norm is there to raise it.
_ACCEPTANCE_TOLERANCE = 0.01
#: With fewer draft phases of one request, chance alone moves a share by more than the tolerance.
_ENOUGH_DRAFTS = 10_000


@dataclass(frozen=True)
class Text:
    """A finished request: its prompt and what it got, as token ids."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class SoakJob:
    """One process: ``steps`` of load with prompts of ``pool``, or, with ``steps`` 0, the judge, who is sent texts.

    The load ends before its steps are made at ``until``, seconds as of ``time.time``.
    """

    label: str
    options: dict[str, Any]
    environment: dict[str, str]
    max_num_seqs: int
    steps: int = 0
    seed: int = 0
    pool: tuple[tuple[int, ...], ...] = ()
    until: float | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SoakJob:
        raw = json.loads(text)
        return cls(**{**raw, "pool": tuple(tuple(p) for p in raw["pool"])})


@dataclass(frozen=True)
class SoakSettings:
    """What all engines of a soak share; goes into the results file."""

    method: str
    k: int
    steps: int
    max_num_seqs: int
    seed: int
    cudagraph_mode: str
    under: tuple[str, ...]
    vllm_environment: Mapping[str, str]
    patched_environment: Mapping[str, str]
    sides: tuple[str, ...]
    time_limit: float | None = None


def load_job(
    side: str,
    settings: SoakSettings,
    host: Host,
    checkpoints: Checkpoints,
    pool: tuple[tuple[int, ...], ...],
    until: float | None = None,
) -> SoakJob:
    """The engine of one of ``ALL_SIDES`` under load; for ``until`` see :class:`SoakJob`."""
    options = _options(settings, host, checkpoints) | {
        "speculative_config": {
            "method": settings.method,
            "model": str(checkpoints.drafter(settings.method)),
            "num_speculative_tokens": settings.k,
        },
        # Room for every request's drafts and for a part of a prompt: prefill in pieces, mixed with decode.
        # vLLM keeps the draft's slots out of the budget, so a full batch needs it twice.
        "max_num_batched_tokens": max(256, 2 * settings.max_num_seqs * (1 + settings.k) + 128),
    }
    # One process, which a memory checker can follow.
    environment = environment_of(side, host, settings, own_process=False)
    return SoakJob(side, options, environment, settings.max_num_seqs, settings.steps, settings.seed, pool, until)


def judging_job(settings: SoakSettings, host: Host, checkpoints: Checkpoints) -> SoakJob:
    """Stock vLLM without speculation, to read texts."""
    # One token more than the longest text: vLLM generates at least one.
    options = _options(settings, host, checkpoints) | {"max_model_len": MAX_MODEL_LEN + 1}
    environment = engine_environment(host.device, patched=False, extra=settings.vllm_environment)
    return SoakJob("judge", options, environment, settings.max_num_seqs)


def _options(settings: SoakSettings, host: Host, checkpoints: Checkpoints) -> dict[str, Any]:
    options = engine_options(
        host.device,
        max_model_len=MAX_MODEL_LEN,
        cudagraph_mode=settings.cudagraph_mode,
        max_num_seqs=settings.max_num_seqs,
    )
    if host.device != "cpu":
        # The sides' engines and the judge are alive together.
        case = Case(TINY, settings.method, settings.k)
        options |= {
            "gpu_memory_utilization": share_of_gpu(None, [*settings.sides, "judge"]),
            "kv_cache_memory_bytes": kv_cache_bytes(case, settings.max_num_seqs, MAX_MODEL_LEN),
        }
    return {**options, "model": str(checkpoints.target)}


def texts_of(soaked: Mapping[str, Any]) -> list[Text]:
    """The texts in the event of an engine that has soaked."""
    return [Text(tuple(prompt), tuple(tokens)) for _, prompt, tokens in soaked["texts"]]


def acceptance(side: Mapping[str, Any]) -> list[float]:
    """Share of accepted drafts by position."""
    return [accepted / side["drafts"] for accepted in side["accepted_per_position"]] if side["drafts"] else []


def failures(sides: Mapping[str, Mapping[str, Any]], settings: SoakSettings, device: str) -> list[str]:
    """Everything that does not hold, one line each; empty for a soak that was passed.

    Args:
        sides: side -> its entry of the results file; entries with an ``error`` have no counts.
        settings: what was asked for.
        device: vLLM's device type.
    """
    found = []
    for name, side in sides.items():
        if side["error"] is not None:
            found.append(f"{name}: {side['error']}")
        else:
            found += [f"{name}: {fault}" for fault in _faults(name, side, settings, device)]
    for name, stock in STOCK_OF.items():
        if {name, stock} <= sides.keys() and sides[name]["error"] is None and sides[stock]["error"] is None:
            found += [f"{name}: {fault}" for fault in _acceptance_faults(sides[stock], sides[name])]
    return found


def _faults(name: str, side: Mapping[str, Any], settings: SoakSettings, device: str) -> list[str]:
    faults = []
    if side["steps"] < settings.steps:
        faults.append(f"{side['steps']} steps of {settings.steps}")
    sizes = set(map(int, side["batch_sizes"]))
    missing = sorted({1, settings.max_num_seqs} - sizes)
    if missing:
        faults.append(f"no step had {' or '.join(map(str, missing))} requests; seen: {sorted(sizes)}")
    if not side["drafts"]:
        faults.append("nothing was drafted")
    if is_patched(name) and device != "cpu" and not side["draft_phases_in_graphs"]:
        faults.append("no draft phase replayed a CUDA graph, so this says nothing about drafter graphs")
    texts = side["texts"]
    if texts["count"] != side["requests"]:
        faults.append(f"{texts['count']} texts of {side['requests']} requests")
    allowed = _WORST_GAP.get(device, _WORST_GAP_BFLOAT16)
    if texts["worst_gap"] is None:
        faults.append("its texts were not judged")
    elif texts["worst_gap"] > allowed:
        faults.append(
            f"a token is {texts['worst_gap']:.4f} nats below the target's first choice, {allowed} allowed: not greedy"
        )
    return faults


def _acceptance_faults(stock: Mapping[str, Any], patched: Mapping[str, Any]) -> list[str]:
    if min(stock["drafts"], patched["drafts"]) < _ENOUGH_DRAFTS:
        return []
    pairs = zip(acceptance(stock), acceptance(patched), strict=True)
    return [
        f"acceptance at position {position}: stock {one:.4f}, patched {other:.4f}; {_ACCEPTANCE_TOLERANCE} less allowed"
        for position, (one, other) in enumerate(pairs)
        if one - other > _ACCEPTANCE_TOLERANCE
    ]


def judged(texts: Sequence[Text], gaps: Mapping[Text, Sequence[float]]) -> dict[str, Any]:
    """What the judge found of one side's texts; a text that it did not come to leaves ``worst_gap`` None."""
    if any(text not in gaps for text in texts):
        return {"count": len(texts), "worst_gap": None, "not_first_choice": None}
    all_gaps = [gap for text in texts for gap in gaps[text]]
    return {
        "count": len(texts),
        "worst_gap": max(all_gaps, default=0.0),
        "not_first_choice": sum(gap > 0 for gap in all_gaps) / max(len(all_gaps), 1),
    }


@dataclass
class Soaked:
    """What came of a soak.

    Attributes:
        ended: side -> its engine.
        texts: side -> what it answered, of engines that have not failed.
        judge: the engine that read the texts; None where there were none.
        gaps: text -> what the judge found, see ``_soak_engine``.
    """

    ended: dict[str, Ended] = field(default_factory=dict)
    texts: dict[str, list[Text]] = field(default_factory=dict)
    judge: Ended | None = None
    gaps: dict[Text, list[float]] = field(default_factory=dict)


def run_soak(
    jobs: Mapping[str, SoakJob],
    judge: SoakJob,
    *,
    at_once: bool,
    timeout: float,
    under: tuple[str, ...] = (),
    on_event: Callable[[str, Event], None] = lambda name, event: None,
) -> Soaked:
    """Run the loads, and have their texts read.

    Args:
        jobs: side -> its load.
        judge: who reads the texts.
        at_once: all engines at the same time, the judge's too; else one after the other.
        timeout: seconds for one engine, its start included.
        under: a command that runs Python, for the loads alone.
        on_event: called with the name of an engine's job and what it says.
    """
    found = Soaked()
    with ended_by_sigterm(), ExitStack() as stack:
        deadlines: dict[str, float] = {}

        def begun(job: SoakJob, under: tuple[str, ...] = ()) -> Session:
            deadlines[job.label] = time.monotonic() + timeout
            return stack.enter_context(Session(MODULE, job, lambda event: on_event(job.label, event), under=under))

        def left(label: str) -> float:
            return max(0.0, deadlines[label] - time.monotonic())

        def finish(side: str, session: Session) -> None:
            session.wait_for("soaked", left(side))
            session.wait_for_end(left(side))
            found.ended[side] = session.ended()

        reader = begun(judge) if at_once else None
        running: dict[str, Session] = {}
        for side, job in jobs.items():
            running[side] = begun(job, under)
            if not at_once:
                finish(side, running[side])
        if at_once:
            for side, session in running.items():
                finish(side, session)
        for side, ended in found.ended.items():
            if ended.error is None:
                (soaked,) = [event for event in ended.events if event["event"] == "soaked"]
                found.texts[side] = texts_of(soaked)
        # The sides mostly agree: each text is read once.
        different = list(dict.fromkeys(text for several in found.texts.values() for text in several))
        if different:
            reader = reader or begun(judge)
            reader.wait_for("ready", left(judge.label))
            asked = {"texts": [[text.prompt, text.tokens] for text in different]}
            reader.ask(asked, "judged", left(judge.label))
            reader.wait_for_end()
            found.judge = reader.ended()
            for event in found.judge.events:
                if event["event"] == "judged":
                    found.gaps = dict(zip(different, event["gaps"], strict=True))
    return found
