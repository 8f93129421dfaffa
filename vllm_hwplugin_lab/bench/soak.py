# SPDX-License-Identifier: Apache-2.0
"""The engines of a soak, and its conditions.

A drafter that reads a stale tensor leaves the texts correct and its drafts wrong; a memory error may show in either, or
end the process. So the texts must be the target's own choices, and the acceptance must reach unpatched vLLM's on the
same model runner with the same requests.
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
#: The label of the engine that reads the texts.
JUDGE = "judge"
_LOAD = "load"
_END = {"do": "end"}

#: Largest distance of a greedy token below the target's first choice, in nats; bfloat16 has near-ties.
_WORST_GAP = {"cpu": 1e-3}
_WORST_GAP_BFLOAT16 = 0.5
#: Allowed deficit of a position's acceptance. A higher acceptance is correct: the target accepts only its own tokens,
#: and dflash-context-norm raises the acceptance.
_ACCEPTANCE_TOLERANCE = 0.01
#: With fewer draft phases of one request, chance moves an acceptance by more than the tolerance.
_ENOUGH_DRAFTS = 10_000


class Text(NamedTuple):
    """A finished request: token ids of its prompt and its answer."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SoakSettings(Asked):
    """The settings of ``bench soak``; ``time_limit`` in seconds."""

    method: str
    k: int
    steps: int
    max_num_seqs: int
    seed: int
    under: tuple[str, ...] = ()
    time_limit: float | None = None

    def load(self, until: float | None = None) -> dict[str, Any]:
        """Return the load's command; the load ends at ``until``."""
        return {"do": "soak", "workload": _LOAD, "steps": self.steps, "seed": self.seed, "until": until}


def load_job(
    side: str, settings: SoakSettings, host: Host, checkpoints: Checkpoints, pool: tuple[tuple[int, ...], ...]
) -> Job:
    """Return the job of a side's engine under load."""
    options = _options(settings, host, checkpoints) | {
        "speculative_config": {
            "method": settings.method,
            "model": str(checkpoints.drafter(settings.method)),
            "num_speculative_tokens": settings.k,
        },
        # Enough for every request's drafts and a part of a prompt: chunked prefill, mixed with decode.
        # vLLM takes the drafts' slots out of the budget, so a full batch needs them twice.
        "max_num_batched_tokens": max(256, 2 * settings.max_num_seqs * (1 + settings.k) + 128),
    }
    # One process, for memory checkers.
    environment = environment_of(side, host, settings, own_process=False)
    load = Workload(_LOAD, pool, max_tokens=0, batch=settings.max_num_seqs)
    return Job(side, is_patched(side), options, environment, (load,))


def judging_job(settings: SoakSettings, host: Host, checkpoints: Checkpoints) -> Job:
    """Return the job of the judge, unpatched vLLM without speculation."""
    # One token more than the longest text, because vLLM generates at least one.
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
        # The sides' engines and the judge run at the same time.
        case = Case(TINY, settings.method, settings.k)
        options |= {
            "gpu_memory_utilization": share_of_gpu(None, [*settings.sides, JUDGE]),
            "kv_cache_memory_bytes": kv_cache_bytes(case, settings.max_num_seqs, MAX_MODEL_LEN),
        }
    return {**options, "model": str(checkpoints.target)}


@dataclass
class Soaked:
    """The result of a soak.

    Attributes:
        ended: Side -> its engine, with the judge's if there were texts to read.
        texts: Side -> its answers, if its engine has not failed.
        gaps: Text -> the judge's distances, see ``_soak_engine``.
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
    """Run the loads, and let the judge read their texts.

    Args:
        load: The command of :meth:`SoakSettings.load`.
        at_once: Run all engines at the same time, with the judge; else one after the other.
        timeout: Seconds per engine, with its start.
        under: A command that runs Python, only for the loads.
        on_event: Called with the label of an engine's job and its event.
    """
    result = Soaked()
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
            result.ended[name] = session.ended()
            return next((event for event in session.events if event["event"] == answer), {})

        reader = begun(judge) if at_once else None
        running: dict[str, Session] = {}
        soaked: dict[str, Event] = {}
        for side, job in jobs.items():
            running[side] = begun(job, load, _END, under=under)
            if not at_once:
                soaked[side] = finish(running[side], side, "soaked")
        for side, session in running.items():
            event = soaked.get(side) or finish(session, side, "soaked")
            if result.ended[side].error is None:
                result.texts[side] = [Text(tuple(prompt), tuple(tokens)) for _, prompt, tokens in event["texts"]]
        # The sides mostly agree, so each text is read once.
        different = list(dict.fromkeys(text for texts in result.texts.values() for text in texts))
        if different:
            reader = reader or begun(judge)
            # The judge reads commands only when it is ready, and these exceed the pipe's buffer.
            wait_for(reader, JUDGE, "ready")
            reader.tell({"do": "judge", "workload": "", "texts": different})
            reader.tell(_END)
            gaps = finish(reader, JUDGE, "judged").get("gaps", ())
            result.gaps = dict(zip(different, gaps, strict=False))
    return result


def side_entry(name: str, result: Soaked) -> dict[str, Any]:
    """Return a side's entry of the results file, without its texts."""
    ended = result.ended[name]
    entry: dict[str, Any] = {"error": ended.error, "log_tail": ended.log_tail}
    for event in ended.events:
        if event["event"] in ("ready", "soaked"):
            entry |= {key: value for key, value in event.items() if key not in ("event", "pid", "texts")}
    if ended.error is None:
        entry |= {"acceptance_per_position": _acceptance(entry), "texts": judged(result.texts[name], result.gaps)}
    return {**entry, "features": used_features(ended.records), "processes": processes_entry(ended.records)}


def judged(texts: Sequence[Text], gaps: Mapping[Text, Sequence[float]]) -> dict[str, Any]:
    """Return the judge's findings on a side's texts.

    If a text was not judged, ``worst_gap`` is None.
    """
    if any(text not in gaps for text in texts):
        return {"count": len(texts), "worst_gap": None, "not_first_choice": None}
    all_gaps = [gap for text in texts for gap in gaps[text]]
    return {
        "count": len(texts),
        "worst_gap": max(all_gaps, default=0.0),
        "not_first_choice": sum(gap > 0 for gap in all_gaps) / max(len(all_gaps), 1),
    }


def failures(sides: Mapping[str, Mapping[str, Any]], settings: SoakSettings, device: str) -> list[str]:
    """Return all failed conditions, one line each.

    Args:
        sides: Side -> its entry of the results file; an entry with an ``error`` has no counts.
    """
    ran = {name: side for name, side in sides.items() if side["error"] is None}
    lines = [f"{name}: {side['error']}" for name, side in sides.items() if name not in ran]
    lines += [f"{name}: {line}" for name, side in ran.items() for line in _failures(name, side, settings, device)]
    return lines + [
        f"{name}: {line}"
        for name, baseline in STOCK_OF.items()
        if {name, baseline} <= ran.keys()
        for line in _acceptance_failures(ran[baseline], ran[name])
    ]


def _failures(name: str, side: Mapping[str, Any], settings: SoakSettings, device: str) -> Iterator[str]:
    if side["steps"] < settings.steps:
        yield f"{side['steps']} steps, expected {settings.steps}"
    sizes = set(map(int, side["batch_sizes"]))
    if missing := sorted({1, settings.max_num_seqs} - sizes):
        yield f"no step had {' or '.join(map(str, missing))} requests; found {sorted(sizes)}"
    if not side["drafts"]:
        yield "nothing was drafted"
    if is_patched(name) and device != "cpu" and not side["draft_phases_in_graphs"]:
        yield "no draft phase replayed a CUDA graph, so drafter graphs were not tested"
    texts, allowed = side["texts"], _WORST_GAP.get(device, _WORST_GAP_BFLOAT16)
    if texts["count"] != side["requests"]:
        yield f"{texts['count']} texts, expected {side['requests']}, one per request"
    if texts["worst_gap"] is None:
        yield "its texts were not judged"
    elif texts["worst_gap"] > allowed:
        yield (
            f"a token is {texts['worst_gap']:.4f} nats below the target's first choice, expected at most {allowed}: "
            "the text is not greedy"
        )


def _acceptance_failures(baseline: Mapping[str, Any], patched: Mapping[str, Any]) -> list[str]:
    if min(baseline["drafts"], patched["drafts"]) < _ENOUGH_DRAFTS:
        return []
    pairs = zip(_acceptance(baseline), _acceptance(patched), strict=True)
    return [
        f"acceptance at position {position}: unpatched {before:.4f}, patched {after:.4f}; expected at most "
        f"{_ACCEPTANCE_TOLERANCE} less"
        for position, (before, after) in enumerate(pairs)
        if before - after > _ACCEPTANCE_TOLERANCE
    ]


def _acceptance(side: Mapping[str, Any]) -> list[float]:
    """Return the share of accepted drafts by position."""
    return [accepted / side["drafts"] for accepted in side["accepted_per_position"]] if side["drafts"] else []
