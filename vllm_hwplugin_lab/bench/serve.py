# SPDX-License-Identifier: Apache-2.0
"""What ``bench serve`` measures: a user's own target, drafter and prompts, as clients of ``vllm serve`` see them.

vLLM's own client makes the requests and times them (``vllm bench serve``, see ``_server``). Here are the servers and
the loads of a case, and what is made of the times of a load's requests.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from vllm_hwplugin.errors import HwpluginError
from vllm_hwplugin.spec_decode.step_counts import SERVED

from ._checkpoints import Checkpoints
from ._host import Host
from ._job import Event, Job, Outcome
from ._settings import engine_options
from ._shapes import NO_DRAFTS, SHAPES, write_tokenizer
from ._step_kinds import GRAPHS, KINDS
from .plan import (
    STOCK_OF,
    Asked,
    Case,
    environment_of,
    is_patched,
    kv_cache_bytes,
    model_of,
    share_of_gpu,
    synthetic_length,
    with_arguments,
)
from .results import acceptance, processes_entry
from .table import NOT_MEASURED, SIDE_NAMES, case_name, speedup
from .turns import Measurement

FORMAT = "serve 2"
#: Of the servers' processes.
MODULE = "vllm_hwplugin_lab.bench._server"
#: The name in the command -> vLLM's speculative config. P-EAGLE is Eagle3 that drafts every token in one pass.
METHODS: Mapping[str, Mapping[str, Any]] = {
    "eagle": {"method": "eagle"},
    "eagle3": {"method": "eagle3"},
    "p-eagle": {"method": "eagle3", "parallel_drafting": True},
    "mtp": {"method": "mtp"},
    "dflash": {"method": "dflash"},
    "draft_model": {"method": "draft_model"},
    NO_DRAFTS: {},
}
#: Whose drafter is in the target's own checkpoint, or that have none.
BUILT_IN = frozenset({"mtp", NO_DRAFTS})
#: What the files of known sets hold: MT-Bench (its first turn), HumanEval, GSM8K, Alpaca.
KEYS = ("turns", "prompt", "question", "instruction")
#: Name -> what it is.
LATENCIES = {
    "ttft_ms": "time to the first token",
    "tpot_ms": "time per output token after the first",
    "itl_ms": "time between two parts of the stream",
    "e2e_ms": "time to the last token",
}
_LATENCY_NAMES = tuple(name[:-3].upper() for name in LATENCIES)
#: Share of a round's requests that only warm it up.
WARM = 1 / 3
#: Of a row of kinds of steps, what is added up.
_SUMS = ("steps", "seconds", "host_seconds")
#: Seconds of arrivals in a round.
_ARRIVALS = 10
#: Seconds that a round is to take at least.
LEAST_SECONDS = 5.0
#: Requests of a round are so many more than a trial says that it takes: the trial fills and empties the engine, too.
_MORE = 1.2
#: A random prompt may come out longer than asked for, because it is text on its way.
_ROOM = 64
#: Requests sent within less than this share of a round say nothing of a steady load.
_STEADY = 0.1

#: A text, or token ids.
Prompt = str | tuple[int, ...]
#: Of a results file.
_Load = Mapping[str, Any]
#: Concurrency and rate in words, a side, and its entry in a results file.
Measured = tuple[str, str, _Load]
#: Part of a GPU's memory that the KV caches of all sides may take.
_MOST_CACHE = 0.85
#: Side -> its baseline in the tables of loads, on the same model runner.
_BASELINE = {**STOCK_OF, "after": "before"}


class PromptsUnreadable(HwpluginError):
    """A prompts file is not there, or holds something else."""


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """What clients send.

    Attributes:
        prompts: the file; None: the tiny shape's own, or random tokens, ``input_len`` of them.
        num_prompts: requests of a load; None: at least ``per_slot`` for each that runs at the same time, or as many as
            take some seconds.
        range_ratio: lengths of random prompts and their answers are drawn from within this share of them.
        concurrency: concurrent requests; 0: no bound.
        request_rate: requests a second; 0: all at the start.
        client: more arguments of ``vllm bench serve``, which outweigh these.
    """

    prompts: str | None
    num_prompts: int | None
    per_slot: int
    input_len: int
    output_len: int
    range_ratio: float
    temperature: tuple[float, ...]
    concurrency: tuple[int, ...]
    request_rate: tuple[float, ...]
    rounds: int
    seed: int
    chat: bool
    ignore_eos: bool
    client: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ServeSettings(LoadSettings, Asked):
    """What all engines and loads of ``bench serve`` share.

    Attributes:
        target: a folder or a name; None where ``shape`` says what the target and the drafter are.
        shape: as ``bench --shape`` names them; None where they are the user's own.
        k: drafted tokens a step, one after the other.
        kv_cache_gib: of each engine; None: vLLM measures free memory, so engines start one after the other.
        api_server_count: API server processes of a side; 0: no HTTP, the client's process holds vLLM's `AsyncLLM`.
    """

    target: str | None
    draft: str | None
    shape: str | None
    method: str | None
    k: tuple[int, ...]
    max_model_len: int | None
    tensor_parallel_size: int
    kv_cache_gib: float | None
    api_server_count: int = 1

    def length(self, k: int) -> int:
        """A model length at whose end no request comes.

        There vLLM schedules fewer drafts, and steps under way count as if all of theirs were accepted.
        """
        longest = math.ceil((self.input_len + self.output_len) * (1 + self.range_ratio))
        return self.max_model_len or longest + 4 * (k + 1) + _ROOM


@dataclass(frozen=True)
class LoadCase:
    """One way to send the prompts."""

    concurrency: int
    request_rate: float
    temperature: float

    @property
    def name(self) -> str:
        bound = f"{self.concurrency} at once" if self.concurrency else "unbounded"  # as results files have it
        rate = f", {self.request_rate:g} a second" if self.request_rate else ""
        return f"{bound}{rate}, temperature {self.temperature:g}"

    def requests(self, settings: LoadSettings) -> int:
        """How many a round has, at least."""
        closed = self.concurrency * settings.per_slot
        return settings.num_prompts or max(closed, math.ceil(self.request_rate * _ARRIVALS)) or settings.per_slot


def load_cases(settings: LoadSettings) -> list[LoadCase]:
    """Every concurrency with every rate and every temperature."""
    return [
        LoadCase(concurrency, rate, temperature)
        for concurrency in settings.concurrency
        for rate in settings.request_rate
        for temperature in settings.temperature
    ]


def serve_job(
    k: int, side: str, settings: ServeSettings, host: Host, checkpoints: Checkpoints | None, folder: Path
) -> Job:
    """The server of one side.

    Args:
        k: drafted tokens a step; 0 without drafts.
        side: one of `ALL_SIDES` or `PLUGIN_SIDES`.
        settings: of the case.
        host: decides type and graphs.
        checkpoints: of the tiny shape.
        folder: an existing one for the config files of a dummy shape.
    """
    options = engine_options(
        host.device,
        max_model_len=settings.length(k),
        cudagraph_mode=settings.cudagraph_mode,
        max_num_seqs=max(settings.concurrency),
    )
    del options["disable_log_stats"]  # a server has no such option for what it does by default
    if 0 in settings.concurrency:
        del options["max_num_seqs"]  # as many as vLLM takes by default
    if settings.max_model_len is None and settings.prompts is not None:
        del options["max_model_len"]  # the model's own: nobody has counted the prompts' tokens
    options |= _models(k, side, settings, checkpoints, folder)
    if settings.api_server_count:
        options["api_server_count"] = settings.api_server_count
    if host.device != "cpu":
        # The checkpoint's own type; on a CPU float32 is what can be compared.
        options |= {
            "dtype": "auto",
            # A shape may be one for several GPUs.
            "tensor_parallel_size": max(settings.tensor_parallel_size, options.get("tensor_parallel_size", 1)),
            "gpu_memory_utilization": share_of_gpu(settings.gpu_memory_utilization, settings.sides),
        }
        if (size := kv_cache_size(k, settings, host)) is not None:
            options["kv_cache_memory_bytes"] = size
    environment = environment_of(side, host, settings, own_process=True)
    options = with_arguments(options, settings.vllm_arguments)
    return Job(f"{settings.method} k={k} {side}", is_patched(side), options, environment, workloads=())


def kv_cache_size(k: int, settings: ServeSettings, host: Host) -> int | None:
    """Return the bytes of each engine's KV cache; None where vLLM measures free memory, one engine at a time."""
    if settings.kv_cache_gib is not None:
        return int(settings.kv_cache_gib * (1 << 30))
    if settings.shape is None or 0 in settings.concurrency or settings.prompts is not None:
        return None
    assert settings.method is not None
    case = Case(settings.shape, settings.method, k)
    size = kv_cache_bytes(case, max(settings.concurrency), settings.length(k))
    # Weights and activations need the rest. On several GPUs each holds a part of the cache.
    room = int(host.memory * host.gpus * _MOST_CACHE / len(settings.sides))
    return size if size <= room or not host.memory else None


def _models(
    k: int, side: str, settings: ServeSettings, checkpoints: Checkpoints | None, folder: Path
) -> dict[str, Any]:
    assert settings.method is not None
    if settings.shape is None:
        speculation = {**METHODS[settings.method], "num_speculative_tokens": k}
        if settings.draft is not None:
            speculation["model"] = settings.draft
        return {"model": settings.target} | (
            {} if settings.method == NO_DRAFTS else {"speculative_config": speculation}
        )
    case = Case(settings.shape, settings.method, k)
    home = folder / f"{settings.shape}-{settings.method}-{k}-{side}"
    options = model_of(case, synthetic_length(case, settings.acceptance_length), checkpoints, home)
    if options.pop("skip_tokenizer_init", False):
        write_tokenizer(Path(options["model"]), SHAPES[settings.shape].vocabulary)
    return options


def serve_measurements(
    settings: LoadSettings, prompts: Sequence[Prompt] | None, requests: Mapping[str, int] | None = None
) -> list[Measurement]:
    """What every side is asked for.

    Args:
        settings: of the case.
        prompts: of the requests; None: those that vLLM's client makes.
        requests: of a round of each load, by name; a trial says how many a load has that is not named.
    """
    return [_measurement(case, settings, prompts, (requests or {}).get(case.name)) for case in load_cases(settings)]


def _measurement(
    case: LoadCase, settings: LoadSettings, prompts: Sequence[Prompt] | None, requests: int | None
) -> Measurement:
    count = requests or case.requests(settings)
    load: dict[str, Any] = {"name": case.name, "prompts": prompts, "chat": settings.chat}
    load |= {"output_len": settings.output_len, "client": client_arguments(settings, case, prompts)}

    def asked(do: str, requests: int) -> dict[str, Any]:
        return {"do": do, "load": load, "requests": requests}

    def sized(seconds: float) -> dict[str, Any]:
        return {"requests": max(count, math.ceil(_MORE * LEAST_SECONDS * half / seconds))}

    # Arrivals at a rate take their time in any case.
    half, fixed = math.ceil(count / 2), requests or settings.num_prompts is not None or case.request_rate
    warm_up, trial = asked("warm-up", min(case.concurrency or count, count)), None if fixed else asked("trial", half)
    return Measurement(case.name, asked("load", count), "loaded", warm_up, trial=trial, sized=sized)


def client_arguments(settings: LoadSettings, case: LoadCase, prompts: Sequence[Prompt] | None) -> list[str]:
    """Of ``vllm bench serve``, without the server's and the number of requests."""
    options = {
        "backend": "openai",
        "endpoint": "/v1/completions",
        "request-rate": case.request_rate or "inf",
        "temperature": case.temperature,
        "seed": settings.seed,
    }
    if case.concurrency:
        options["max-concurrency"] = case.concurrency
    if prompts is None:
        random = {
            name: getattr(settings, name.replace("-", "_")) for name in ("input-len", "output-len", "range-ratio")
        }
        options |= {"dataset-name": "random", **{f"random-{name}": value for name, value in random.items()}}
    else:
        options["dataset-name"] = "custom"  # which is not asked: the prompts come with the load
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*arguments, *(["--ignore-eos"] if settings.ignore_eos else []), "--disable-tqdm", *settings.client]


def read_prompts(file: Path) -> list[str]:
    """The prompts of a file: of each line, a JSON object, what stands under one of `KEYS`; the first of several turns.

    Raises:
        PromptsUnreadable: the file cannot be read, is no JSON, or an object has none of `KEYS`; says where.
    """
    found = []
    try:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                record = json.loads(line)
                texts = [record[key] for key in KEYS if key in record] if isinstance(record, dict) else []
                text = texts[0][0] if texts and isinstance(texts[0], list) and texts[0] else next(iter(texts), None)
                if not isinstance(text, str):
                    raise PromptsUnreadable(f"{file}, line {number}: no text under {', '.join(KEYS)}; found {line:.80}")
                found.append(text)
    except ValueError as error:
        raise PromptsUnreadable(f"{file}: no JSON ({error}); expected one object a line") from error
    except OSError as error:
        raise PromptsUnreadable(f"{file}: cannot be read ({error}); name a JSONL file") from error
    if not found:
        raise PromptsUnreadable(f"{file}: holds no prompt; expected an object a line with one of {', '.join(KEYS)}")
    return found


def loads_entry(outcome: Outcome, settings: LoadSettings) -> dict[str, Any]:
    """Name of each load -> its entry in a results file; None where it was not measured."""
    loads: dict[str, Any] = {}
    for case in load_cases(settings):
        found = load_entry(outcome.of("loaded", case.name))
        loads[case.name] = None if found is None else {**dataclasses.asdict(case), **found}
    return loads


def side_entry(outcome: Outcome, settings: ServeSettings) -> dict[str, Any]:
    """What a results file has of one side of a case."""
    ready = outcome.ready()
    return {
        "error": outcome.error,
        "log_tail": outcome.log_tail,
        "start_seconds": ready.get("seconds"),
        "graph_modes": ready.get("graph_modes", {}),
        "model_runner": ready.get("model_runner"),
        "environment": outcome.job.environment,
        "loads": loads_entry(outcome, settings),
        "processes": processes_entry(outcome.records),
    }


def load_entry(rounds: Sequence[Event]) -> dict[str, Any] | None:
    """Some rounds of one load as one entry of a results file; None without a round.

    Latencies are those of all requests together that were sent in the steady part of a round (:func:`steady`).

    Args:
        rounds: events ``loaded`` of one side.
    """
    if not rounds:
        return None
    everyone = [request for one in rounds for request in one["requests"]]
    counted = [request for one in rounds for request in _counted(one)]
    # One that was given up has waited for nothing, which is not the quickest answer.
    answered = [request for request in counted if request["tokens"]]
    # One token has no time per token after the first.
    several = [request for request in answered if request["tokens"] > 1]
    speeds = [speed(one) for one in rounds]
    ends = [[_end_to_end(request) for request in _counted(one) if request["tokens"]] for one in rounds]
    busy = [share for one in rounds for share in one["gpu_busy"]]
    waited = [request["ttft"] for request in everyone if request["tokens"]]
    until_first = sum(one["until_first"] for one in rounds)
    ended, whole = sum(one["ended"] for one in rounds), sum(one["seconds"] for one in rounds)
    kinds: dict[str, dict[str, Any]] = {}
    for row in (row for one in rounds for row in one["kinds"]):
        names = {name: value for name, value in row.items() if name not in _SUMS}
        kept = kinds.setdefault(json.dumps(names), {**names, **dict.fromkeys(_SUMS, 0)})
        kept.update({name: kept[name] + row[name] for name in _SUMS})
    return {
        "rounds": len(rounds),
        "requests": len(everyone),
        "counted": len(counted),
        "unanswered": sum(not request["tokens"] for request in everyone),
        "seconds": [one["seconds"] for one in rounds],
        "host_us": [one["host_us"] for one in rounds],
        "prompt_tokens": sum(request["prompt_tokens"] for request in everyone),
        "tokens": sum(request["tokens"] for request in everyone),
        "steps": sum(one["steps"] for one in rounds),
        "tokens_per_second": {"best": max(speeds), "all": speeds},
        "ttft_ms": spread([request["ttft"] for request in answered]),
        "ttft_tail": ttft_tail(rounds),
        "tpot_ms": spread([sum(one["gaps"]) / (one["tokens"] - 1) for one in several]),
        "itl_ms": spread([gap for request in answered for gap in request["gaps"]]),
        "e2e_ms": spread([_end_to_end(request) for request in answered]),
        "round_e2e_ms": [1e3 * sum(one) / len(one) for one in ends if one],
        # What the client waits for a first token beyond what the engine's core takes, of all requests.
        "outside_ms": 1e3 * (sum(waited) / len(waited) - until_first / ended) if waited and ended else None,
        # Of one core. Both are single threads for the most part.
        "cpu": {name: sum(one["cpu"][name] for one in rounds) / whole for name in rounds[0]["cpu"]},
        **acceptance(rounds),
        "kinds": list(kinds.values()),
        "gpu_busy": sum(busy) / len(busy) if busy else None,
    }


def ttft_tail(rounds: Sequence[Event]) -> dict[str, Any] | None:
    """Return when the requests with the slowest 5% of TTFTs were sent.

    Returns:
        ``p95_ms`` of all answered requests, and for ``burst`` (sent before any request of their round had ended, so
        while the concurrency only rises) and ``steady`` (sent later): ``requests``; ``above_p95``, how many of them
        took longer; and ``ttft_ms``. None if nothing was answered.
    """
    parts: dict[str, list[float]] = {"burst": [], "steady": []}
    for measured in rounds:
        answered = [request for request in measured["requests"] if request["tokens"]]
        ended = min((request["start"] + _end_to_end(request) for request in answered), default=0.0)
        for request in answered:
            parts["burst" if request["start"] < ended else "steady"].append(request["ttft"])
    everyone = spread([*parts["burst"], *parts["steady"]], (95,))
    return everyone and {
        "p95_ms": everyone["p95"],
        **{
            name: {
                "requests": len(some),
                "above_p95": sum(1e3 * ttft > everyone["p95"] for ttft in some),
                "ttft_ms": spread(some, (50, 90, 99)),
            }
            for name, some in parts.items()
        },
    }


def _shares(load: _Load, name: str) -> dict[str, tuple[str, str]]:
    """What steps have under ``name``, or made of them by that path -> their shares of all, and milliseconds of one."""
    rows = load.get("kinds", ())
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row.get(name, row["paths"].get(name)), []).append(row)

    def sums(some: Iterable[Mapping[str, Any]]) -> Iterator[float]:
        return (sum(row[part] for row in some) for part in _SUMS)

    (all_steps, all_seconds, _), told = sums(rows), {}
    for value, some in found.items():
        steps, seconds, host = sums(some)
        ms = f"{1e3 * seconds / steps:.2f} ({1e3 * host / steps:.2f})"
        told[value] = f"{steps / all_steps:.0%} / {seconds / all_seconds:.0%}", ms
    return told


def _load_row(load: _Load, baseline: _Load | None) -> Iterator[list[str]]:
    speeds, length, busy = load["tokens_per_second"], load["acceptance_length"], load.get("gpu_busy")
    ratio = baseline and speedup(load, baseline)
    yield [
        f"{speeds['best']:.0f}",
        f"{min(speeds['all']):.0f}",
        f"{ratio:.2f}×" if ratio else NOT_MEASURED,
        *(
            _digits(one[percentile]) if (one := load[name]) else NOT_MEASURED
            for name in LATENCIES
            for percentile in ("p50", "p99")
        ),
        f"{length:.3f}" if length else NOT_MEASURED,
        NOT_MEASURED if busy is None else f"{busy:.0%}",
    ]


def _condition_row(load: _Load, _: _Load | None) -> Iterator[list[str]]:
    cpu = load.get("cpu") or {}
    yield [
        f"{load['requests']} ({load['unanswered']})",
        f"{min(load['seconds']):.1f}",
        *(f"{cpu[name]:.0%}" if name in cpu else NOT_MEASURED for name in ("client", "server")),
        _digits(first) if (first := load.get("outside_ms")) else NOT_MEASURED,
        " ".join(f"{share:.2f}" for share in load["acceptance_per_position"]) or NOT_MEASURED,
    ]


def _digits(milliseconds: float) -> str:
    """Three of them, more before the point."""
    return f"{milliseconds:.{2 if milliseconds < 10 else 1 if milliseconds < 100 else 0}f}"


def _tail_row(load: _Load, _: _Load | None) -> Iterator[list[str]]:
    if tail := load.get("ttft_tail"):
        burst, steady = tail["burst"], tail["steady"]
        yield [
            *(f"{part['above_p95']} of {part['requests']}" for part in (burst, steady)),
            *(
                _digits(steady["ttft_ms"][percentile]) if steady["ttft_ms"] else NOT_MEASURED
                for percentile in ("p50", "p90", "p99")
            ),
        ]


def _kind_row(load: _Load, _: _Load | None) -> Iterator[list[str]]:
    if load.get("kinds"):
        kinds, graphs = _shares(load, "kind"), _shares(load, "graph")
        yield [*(", ".join(kinds.get(one, ())) for one in KINDS), *(graphs.get(one, ("",))[0] for one in GRAPHS)]


def _path_rows(load: _Load, _: _Load | None) -> Iterator[list[str]]:
    for path in dict.fromkeys(path for row in load.get("kinds", ()) for path in row["paths"]):
        found = {outcome: shares for outcome, (shares, _) in _shares(load, path).items() if outcome is not None}
        served = found.pop(SERVED, "0% / 0%")
        yield [path, served, ", ".join(f"{reason} {shares}" for reason, shares in found.items())]


#: What a table of a load says, its columns after the side's, and its rows of a side and its baseline.
TABLES: tuple[tuple[str, tuple[str, ...], Callable[[_Load, _Load | None], Iterator[list[str]]]], ...] = (
    (
        "Speedup is over the baseline: of the best round's tokens/s, or of its mean E2E where requests come at a rate. "
        "Acceptance length is tokens a step.",
        (
            "tokens/s, best round",
            "tokens/s, slowest",
            "speedup",
            *(f"{name} {percentile}, ms" for name in _LATENCY_NAMES for percentile in ("P50", "P99")),
            "acceptance length",
            "GPU busy",
        ),
        _load_row,
    ),
    (
        "CPU: utilization of one core by client / busiest API server. `outside`: part of the mean TTFT spent in client "
        "and API server rather than in the engine core.",
        (
            "requests (unanswered)",
            "shortest round, s",
            "client CPU",
            "server CPU",
            "outside, ms",
            "accepted by position",
        ),
        _condition_row,
    ),
    (
        "Where the slowest 5% of the TTFTs come from: requests above P95 that were sent in the burst at the start of a "
        "round, before any request had ended, and those sent later; and TTFT of the latter.",
        (
            "above P95, burst",
            "above P95, later",
            *(f"TTFT {percentile} later, ms" for percentile in ("P50", "P90", "P99")),
        ),
        _tail_row,
    ),
    (
        "Shares of the steps / of the time that they took, until the next one began. By what is in a step, with the "
        "milliseconds of one (of these the host's in the model runner), and by the CUDA graphs that the target ran in.",
        (*KINDS.values(), *GRAPHS),
        _kind_row,
    ),
    (
        "Steps by the plugin's fast path: served, or left to vLLM and why; shares as above.",
        ("fast path", "served", "left to vLLM, because"),
        _path_rows,
    ),
)


def frontend(settings: Mapping[str, Any]) -> str:
    """Return in words what the requests of a results file went to."""
    count = settings.get("api_server_count", 1)
    if not count:
        return "no HTTP"
    return "one API server" if count == 1 else f"{count} API servers"


def groups(results: Mapping[str, Any]) -> Iterator[tuple[str, list[Measured]]]:
    """Name of each case and temperature -> what was measured; the sides of a load stand next to each other."""
    for case in results["cases"]:
        entries = [(side, load) for side, entry in case["sides"].items() for load in entry["loads"].values() if load]
        for temperature in sorted({load["temperature"] for _, load in entries}):
            some = [(side, load) for side, load in entries if load["temperature"] == temperature]
            some.sort(key=lambda one: (one[1]["concurrency"] or math.inf, one[1]["request_rate"]))
            name = f"{case_name(results, case)}, temperature {temperature:g}"
            yield name, [(_where(load), side, load) for side, load in some]


def _where(load: _Load) -> str:
    rate = f", {load['request_rate']:g}/s" if load["request_rate"] else ""
    return f"{load['concurrency'] or 'any'}{rate}"


def tables(loads: Sequence[Measured]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Of one of :func:`groups`: what each table says, its columns, and its lines."""
    of_load = {at: {side: load for other, side, load in loads if other == at} for at, *_ in loads}
    for told, columns, rows in TABLES:
        if lines := [
            [at, SIDE_NAMES[side], *row]
            for at, side, load in loads
            for row in rows(load, of_load[at].get(_BASELINE.get(side, "")))
        ]:
            yield told, ["concurrency", "side", *columns], lines


def steady(requests: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """From when the first `WARM` of a round's requests were sent until the last one was; None if that is no part of it.

    Before that the engine fills, after that it empties.
    """
    starts = sorted(request["start"] for request in requests)
    begin, end = starts[int(len(starts) * WARM)], starts[-1]
    whole = max((time for request in requests for time in _times(request)), default=0.0)
    return (begin, end) if end - begin > _STEADY * whole else None


def speed(one: Event) -> float:
    """Tokens a second of the steady part of a round, or of all of it where it has none."""
    part = steady(one["requests"])
    if part is None:
        return float(sum(request["tokens"] for request in one["requests"]) / one["seconds"])
    begin, end = part
    tokens = 0.0
    for request in one["requests"]:
        times = _times(request)
        # A part of the stream is a step's tokens, of which the client sees the sum alone.
        tokens += sum(begin < time <= end for time in times) * request["tokens"] / max(len(times), 1)
    return tokens / (end - begin)


def _counted(one: Event) -> list[Mapping[str, Any]]:
    part = steady(one["requests"])
    return [request for request in one["requests"] if part is None or request["start"] >= part[0]]


def _end_to_end(request: Mapping[str, Any]) -> float:
    return float(request["ttft"] + sum(request["gaps"]))


def _times(request: Mapping[str, Any]) -> list[float]:
    """When each part of the stream came."""
    return [] if request["ttft"] is None else list(accumulate((request["start"] + request["ttft"], *request["gaps"])))


def spread(seconds: Sequence[float], percentiles: Sequence[int] = (50, 99)) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None of nothing."""
    if not seconds:
        return None
    import numpy

    shares = {f"p{percent}": float(numpy.percentile(seconds, percent)) * 1e3 for percent in percentiles}
    return {"mean": float(numpy.mean(seconds)) * 1e3, **shares}
