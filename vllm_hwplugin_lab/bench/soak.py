# SPDX-License-Identifier: Apache-2.0
"""What a soak runs, and what it is held to.

A drafter that reads a stale tensor leaves the texts right and its drafts wrong; a fault of memory may show in either or
end the process. So the texts are held to the target's own choices, and the acceptance to that of stock vLLM on the same
model runner, which gets the same requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ._checkpoints import Checkpoints
from ._host import Host
from ._job import Event, Job, Workload
from ._launch import Ended, Session, ended_by_sigterm
from ._settings import engine_environment, engine_options
from .plan import STOCK_OF, TINY, Asked, Case, environment_of, is_patched, kv_cache_bytes, share_of_gpu
from .results import processes_entry, used_features
from .turns import ENGINE

FORMAT = "soak 2"
MAX_MODEL_LEN = 512
#: Who reads the texts.
JUDGE = "judge"
_LOAD = "load"
_END = {"do": "end"}

#: How far below the target's first choice, in nats, a greedy token may be: near-ties of bfloat16 go either way.
_WORST_GAP = {"cpu": 1e-3}
_WORST_GAP_BFLOAT16 = 0.5
#: How far a position's share of accepted drafts may be below stock's. It may be above: the target accepts nothing that
#: it would not have said, and dflash-context-norm is there to raise it.
_ACCEPTANCE_TOLERANCE = 0.01
#: With fewer draft phases of one request, chance alone moves a share by more than the tolerance.
_ENOUGH_DRAFTS = 10_000


class Text(NamedTuple):
    """A finished request: its prompt and what it got, as token ids."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SoakSettings(Asked):
    """Of ``bench soak``; ``under`` is a command that runs the engines, ``time_limit`` in seconds."""

    method: str
    k: int
    steps: int
    max_num_seqs: int
    seed: int
    under: tuple[str, ...] = ()
    time_limit: float | None = None

    def load(self, until: float | None = None) -> dict[str, Any]:
        """The command to a side's engine, which ends the load when ``time.time`` is past ``until``."""
        return {"do": "soak", "workload": _LOAD, "steps": self.steps, "seed": self.seed, "until": until}


def load_job(
    side: str, settings: SoakSettings, host: Host, checkpoints: Checkpoints, pool: tuple[tuple[int, ...], ...]
) -> Job:
    """The engine of one of ``ALL_SIDES`` under load, whose prompts are made of those of ``pool``."""
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
    load = Workload(_LOAD, pool, max_tokens=0, batch=settings.max_num_seqs)
    return Job(side, is_patched(side), options, environment, (load,))


def judging_job(settings: SoakSettings, host: Host, checkpoints: Checkpoints) -> Job:
    """Stock vLLM without speculation, to read texts."""
    # One token more than the longest text: vLLM generates at least one.
    options = _options(settings, host, checkpoints) | {"max_model_len": MAX_MODEL_LEN + 1}
    environment = engine_environment(host.device, patched=False, extra=settings.vllm_environment)
    return Job(JUDGE, False, options, environment, ())


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
            "gpu_memory_utilization": share_of_gpu(None, [*settings.sides, JUDGE]),
            "kv_cache_memory_bytes": kv_cache_bytes(case, settings.max_num_seqs, MAX_MODEL_LEN),
        }
    return {**options, "model": str(checkpoints.target)}


@dataclass
class Soaked:
    """What came of a soak.

    Attributes:
        ended: side -> its engine, and the judge's, where there were texts to read.
        texts: side -> what it answered, of engines that have not failed.
        gaps: text -> what the judge found, see ``_soak_engine``.
    """

    ended: dict[str, Ended] = field(default_factory=dict)
    texts: dict[str, list[Text]] = field(default_factory=dict)
    gaps: dict[Text, list[float]] = field(default_factory=dict)


def run_soak(
    jobs: Mapping[str, Job],
    judge: Job,
    load: Mapping[str, Any],
    *,
    at_once: bool,
    timeout: float,
    under: Sequence[str] = (),
    on_event: Callable[[str, Event], None] = lambda name, event: None,
) -> Soaked:
    """Run the loads, and have their texts read.

    Args:
        jobs: side -> its engine.
        judge: the engine that reads the texts.
        load: the command of :meth:`SoakSettings.load`.
        at_once: all engines at the same time, the judge's too; else one after the other.
        timeout: seconds for one engine, its start included.
        under: a command that runs Python, for the loads alone.
        on_event: called with the name of an engine's job and what it says.
    """
    found = Soaked()
    with ended_by_sigterm(), ExitStack() as stack:
        deadlines: dict[str, float] = {}

        def begun(job: Job, *commands: Mapping[str, Any], under: Sequence[str] = ()) -> Session:
            deadlines[job.label] = time.monotonic() + timeout
            session = Session(ENGINE, job, lambda event: on_event(job.label, event), under=under)
            for command in commands:
                session.tell(command)
            return stack.enter_context(session)

        def wait_for(session: Session, name: str, event: str) -> None:
            session.wait_for(event, max(0.0, deadlines[name] - time.monotonic()))

        def finish(session: Session, name: str, answer: str) -> Event:
            wait_for(session, name, answer)
            session.wait_for_end(max(0.0, deadlines[name] - time.monotonic()))
            found.ended[name] = session.ended()
            return next((event for event in session.events if event["event"] == answer), {})

        reader = begun(judge) if at_once else None
        running: dict[str, Session] = {}
        soaked: dict[str, Event] = {}
        for side, job in jobs.items():
            running[side] = begun(job, load, _END, under=under)
            if not at_once:
                soaked[side] = finish(running[side], side, "soaked")
        for side, session in running.items():
            said = soaked.get(side) or finish(session, side, "soaked")
            if found.ended[side].error is None:
                found.texts[side] = [Text(tuple(prompt), tuple(tokens)) for _, prompt, tokens in said["texts"]]
        # The sides mostly agree: each text is read once.
        different = list(dict.fromkeys(text for several in found.texts.values() for text in several))
        if different:
            reader = reader or begun(judge)
            # It reads no command before, and these are longer than a pipe holds.
            wait_for(reader, JUDGE, "ready")
            reader.tell({"do": "judge", "workload": "", "texts": different})
            reader.tell(_END)
            gaps = finish(reader, JUDGE, "judged").get("gaps", ())
            found.gaps = dict(zip(different, gaps, strict=False))
    return found


def side_entry(name: str, found: Soaked) -> dict[str, Any]:
    """One side for the results file: the texts themselves stay out of it."""
    ended = found.ended[name]
    entry: dict[str, Any] = {"error": ended.error, "log_tail": ended.log_tail}
    for event in ended.events:
        if event["event"] in ("ready", "soaked"):
            entry |= {key: value for key, value in event.items() if key not in ("event", "pid", "texts")}
    if ended.error is None:
        entry |= {"acceptance_per_position": _acceptance(entry), "texts": judged(found.texts[name], found.gaps)}
    return {**entry, "features": used_features(ended.records), "processes": processes_entry(ended.records)}


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


def failures(sides: Mapping[str, Mapping[str, Any]], settings: SoakSettings, device: str) -> list[str]:
    """Everything that does not hold, one line each; empty for a soak that was passed.

    Args:
        sides: side -> its entry of the results file; entries with an ``error`` have no counts.
        settings: what was asked for.
        device: vLLM's device type.
    """
    ran = {name: side for name, side in sides.items() if side["error"] is None}
    found = [f"{name}: {side['error']}" for name, side in sides.items() if name not in ran]
    found += [f"{name}: {fault}" for name, side in ran.items() for fault in _faults(name, side, settings, device)]
    return found + [
        f"{name}: {fault}"
        for name, stock in STOCK_OF.items()
        if {name, stock} <= ran.keys()
        for fault in _acceptance_faults(ran[stock], ran[name])
    ]


def _faults(name: str, side: Mapping[str, Any], settings: SoakSettings, device: str) -> Iterator[str]:
    if side["steps"] < settings.steps:
        yield f"{side['steps']} steps of {settings.steps}"
    sizes = set(map(int, side["batch_sizes"]))
    if missing := sorted({1, settings.max_num_seqs} - sizes):
        yield f"no step had {' or '.join(map(str, missing))} requests; seen: {sorted(sizes)}"
    if not side["drafts"]:
        yield "nothing was drafted"
    if is_patched(name) and device != "cpu" and not side["draft_phases_in_graphs"]:
        yield "no draft phase replayed a CUDA graph, so this says nothing about drafter graphs"
    texts, allowed = side["texts"], _WORST_GAP.get(device, _WORST_GAP_BFLOAT16)
    if texts["count"] != side["requests"]:
        yield f"{texts['count']} texts of {side['requests']} requests"
    if texts["worst_gap"] is None:
        yield "its texts were not judged"
    elif texts["worst_gap"] > allowed:
        yield f"a token is {texts['worst_gap']:.4f} nats below the target's first choice, {allowed} allowed: not greedy"


def _acceptance_faults(stock: Mapping[str, Any], patched: Mapping[str, Any]) -> list[str]:
    if min(stock["drafts"], patched["drafts"]) < _ENOUGH_DRAFTS:
        return []
    pairs = zip(_acceptance(stock), _acceptance(patched), strict=True)
    return [
        f"acceptance at position {position}: stock {one:.4f}, patched {other:.4f}; {_ACCEPTANCE_TOLERANCE} less allowed"
        for position, (one, other) in enumerate(pairs)
        if one - other > _ACCEPTANCE_TOLERANCE
    ]


def _acceptance(side: Mapping[str, Any]) -> list[float]:
    """Share of accepted drafts by position."""
    return [accepted / side["drafts"] for accepted in side["accepted_per_position"]] if side["drafts"] else []
