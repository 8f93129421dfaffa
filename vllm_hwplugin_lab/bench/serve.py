# SPDX-License-Identifier: Apache-2.0
"""What ``bench serve`` measures: a user's target, drafter and prompts, as clients of ``vllm serve`` see them.

vLLM's client sends the requests and times them (``vllm bench serve``, see ``_server``). This module has the servers and
the loads of a case, and the statistics of a load's requests.
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

from vllm_hwplugin.base.errors import HwpluginError
from vllm_hwplugin.spec_decode.step_counts import SERVED

from ._checkpoints import Checkpoints
from ._gpu_samples import SAMPLED
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
#: The servers' processes run it.
MODULE = "vllm_hwplugin_lab.bench._server"
#: Value of ``--method`` -> vLLM's speculative config. P-EAGLE is Eagle3 that drafts all tokens in one pass.
METHODS: Mapping[str, Mapping[str, Any]] = {
    "eagle": {"method": "eagle"},
    "eagle3": {"method": "eagle3"},
    "p-eagle": {"method": "eagle3", "parallel_drafting": True},
    "mtp": {"method": "mtp"},
    "dflash": {"method": "dflash"},
    "dspark": {"method": "dspark"},
    "draft_model": {"method": "draft_model"},
    NO_DRAFTS: {},
}
#: Methods without a drafter, or with the drafter in the target's checkpoint.
BUILT_IN = frozenset({"mtp", NO_DRAFTS})
#: A prompt's key in the files of MT-Bench (its first turn), HumanEval, GSM8K and Alpaca.
KEYS = ("turns", "prompt", "question", "instruction")
#: Name -> definition.
LATENCIES = {
    "ttft_ms": "time to the first token",
    "tpot_ms": "time per output token after the first",
    "itl_ms": "time between two chunks of the stream",
    "e2e_ms": "time to the last token",
}
_LATENCY_NAMES = tuple(name[:-3].upper() for name in LATENCIES)
#: Share of a round's requests that are warm-up.
WARM = 1 / 3
#: Columns of a row of kinds of steps that are added up.
_SUMS = ("steps", "seconds", "host_seconds")
#: Seconds of arrivals in a round.
_ARRIVALS = 10
#: Minimum seconds of a round.
LEAST_SECONDS = 5.0
#: Factor on the requests that a trial predicts for a round: a trial also fills and empties the engine.
_MORE = 1.2
#: Spare tokens: a random prompt is sent as text and may have more tokens than asked for.
_ROOM = 64
#: Requests sent within less than this share of a round are no steady load.
_STEADY = 0.1

#: A text, or token ids.
Prompt = str | tuple[int, ...]
#: A load's entry in a results file.
_Load = Mapping[str, Any]
#: Concurrency and rate in words, a side, and its entry in a results file.
Measured = tuple[str, str, _Load]
#: Maximum share of GPU memory for the KV caches of all sides.
_MOST_CACHE = 0.85
#: Side -> its baseline in the tables of loads, on the same model runner.
_BASELINE = {**STOCK_OF, "after": "before"}


class PromptsUnreadable(HwpluginError):
    """A prompts file is missing, or its contents are no prompts."""


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """What clients send.

    Attributes:
        prompts: the file; None for the tiny shape's prompts, or for ``input_len`` random tokens.
        num_prompts: requests of a load; None for at least ``per_slot`` per concurrent request, or as many as take
            `LEAST_SECONDS`.
        range_ratio: lengths of random prompts and their answers differ by up to this share.
        concurrency: concurrent requests; 0 for no bound.
        request_rate: requests per second; 0 for all at the start.
        client: further arguments of ``vllm bench serve``; they override these.
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
        target: a folder or a name; None with ``shape``.
        shape: of target and drafter, as ``bench --shape`` names it; None for the user's checkpoints.
        k: drafted tokens per step, measured one after the other.
        kv_cache_gib: per engine; None: vLLM measures free memory, so engines start one after the other.
        api_server_count: API server processes of a side; 0: no HTTP, the client's process has vLLM's `AsyncLLM`.
        others_idle: Engines of other runs were on the machine, without requests.
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
    others_idle: bool = False

    def length(self, k: int) -> int:
        """Return a model length that no request reaches.

        At its end vLLM schedules fewer drafts, and pending steps count as if all drafts were accepted.
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
        """Return the minimum requests of a round."""
        closed = self.concurrency * settings.per_slot
        return settings.num_prompts or max(closed, math.ceil(self.request_rate * _ARRIVALS)) or settings.per_slot


def load_cases(settings: LoadSettings) -> list[LoadCase]:
    """Combine every concurrency, rate and temperature."""
    return [
        LoadCase(concurrency, rate, temperature)
        for concurrency in settings.concurrency
        for rate in settings.request_rate
        for temperature in settings.temperature
    ]


def serve_job(
    k: int, side: str, settings: ServeSettings, host: Host, checkpoints: Checkpoints | None, folder: Path
) -> Job:
    """Return the job of one side's server.

    Args:
        k: drafted tokens per step; 0 without drafts.
        side: one of `ALL_SIDES` or `PLUGIN_SIDES`.
        host: decides data type and graphs.
        folder: existing, for the config files of a dummy shape.
    """
    options = engine_options(
        host.device,
        max_model_len=settings.length(k),
        cudagraph_mode=settings.cudagraph_mode,
        max_num_seqs=max(settings.concurrency),
    )
    del options["disable_log_stats"]  # a server's default, without an option for it
    if 0 in settings.concurrency:
        del options["max_num_seqs"]  # vLLM's default
    if settings.max_model_len is None and settings.prompts is not None:
        del options["max_model_len"]  # the model's: the prompts' tokens are not counted
    options |= _models(k, side, settings, checkpoints, folder)
    if settings.api_server_count:
        options["api_server_count"] = settings.api_server_count
    if host.device != "cpu":
        # The checkpoint's data type; on a CPU only float32 gives comparable outputs.
        options |= {
            "dtype": "auto",
            # A shape may need several GPUs.
            "tensor_parallel_size": max(settings.tensor_parallel_size, options.get("tensor_parallel_size", 1)),
            "gpu_memory_utilization": share_of_gpu(settings.gpu_memory_utilization, settings.sides),
        }
        if (size := kv_cache_size(k, settings, host)) is not None:
            options["kv_cache_memory_bytes"] = size
    environment = environment_of(side, host, settings, own_process=True)
    options = with_arguments(options, settings.vllm_arguments)
    return Job(f"{settings.method} k={k} {side}", is_patched(side), options, environment, workloads=())


def kv_cache_size(k: int, settings: ServeSettings, host: Host) -> int | None:
    """Return bytes of each engine's KV cache.

    None: vLLM measures free memory, and engines run one at a time. So it is if the caches of all sides do not fit.
    """
    if settings.kv_cache_gib is not None:
        return int(settings.kv_cache_gib * (1 << 30))
    if settings.shape is None or 0 in settings.concurrency or settings.prompts is not None:
        return None
    assert settings.method is not None
    case = Case(settings.shape, settings.method, k)
    size = kv_cache_bytes(case, max(settings.concurrency), settings.length(k))
    # Weights and activations need the rest. Several GPUs share a cache.
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
    """Return the measurements of every side.

    Args:
        prompts: of the requests; None: vLLM's client makes them.
        requests: per round, by the load's name; a trial decides for loads that are not in it.
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

    # A rate fixes how long a round takes.
    half, fixed = math.ceil(count / 2), requests or settings.num_prompts is not None or case.request_rate
    warm_up, trial = asked("warm-up", min(case.concurrency or count, count)), None if fixed else asked("trial", half)
    return Measurement(case.name, asked("load", count), "loaded", warm_up, trial=trial, sized=sized)


def client_arguments(settings: LoadSettings, case: LoadCase, prompts: Sequence[Prompt] | None) -> list[str]:
    """Return the load's arguments of ``vllm bench serve``."""
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
        options["dataset-name"] = "custom"  # not read: the prompts come with the load
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*arguments, *(["--ignore-eos"] if settings.ignore_eos else []), "--disable-tqdm", *settings.client]


def read_prompts(file: Path) -> list[str]:
    """Read the prompts of a JSONL file.

    Each line is an object with one of `KEYS`; of a list of turns only the first is a prompt.

    Raises:
        PromptsUnreadable: the file cannot be read, is no JSON, or an object has none of `KEYS`.
    """
    prompts = []
    try:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                record = json.loads(line)
                texts = [record[key] for key in KEYS if key in record] if isinstance(record, dict) else []
                text = texts[0][0] if texts and isinstance(texts[0], list) and texts[0] else next(iter(texts), None)
                if not isinstance(text, str):
                    raise PromptsUnreadable(f"{file}, line {number}: no text under {', '.join(KEYS)}; found {line:.80}")
                prompts.append(text)
    except ValueError as error:
        raise PromptsUnreadable(f"{file}: no JSON ({error}); expected one object a line") from error
    except OSError as error:
        raise PromptsUnreadable(f"{file}: cannot be read ({error}); name a JSONL file") from error
    if not prompts:
        raise PromptsUnreadable(f"{file}: holds no prompt; expected an object a line with one of {', '.join(KEYS)}")
    return prompts


def loads_entry(outcome: Outcome, settings: LoadSettings) -> dict[str, Any]:
    """Return each load's results entry by name; None if not measured."""
    loads: dict[str, Any] = {}
    for case in load_cases(settings):
        entry = load_entry(outcome.of("loaded", case.name))
        loads[case.name] = None if entry is None else {**dataclasses.asdict(case), **entry}
    return loads


def side_entry(outcome: Outcome, settings: ServeSettings) -> dict[str, Any]:
    """Return the entry of a case's side in a results file."""
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
    """Merge a load's rounds into one results entry; None without rounds.

    Latencies are of all requests sent in the steady part of a round (:func:`steady`).
    """
    if not rounds:
        return None
    everyone = [request for measured in rounds for request in measured["requests"]]
    counted = [request for measured in rounds for request in _counted(measured)]
    # A failed request has no latency; its zeros would count as the fastest.
    answered = [request for request in counted if request["tokens"]]
    # TPOT needs a second token.
    several = [request for request in answered if request["tokens"] > 1]
    speeds = [speed(measured) for measured in rounds]
    ends = [[_end_to_end(request) for request in _counted(measured) if request["tokens"]] for measured in rounds]
    sampled = {name: [sample for measured in rounds for sample in measured[name]] for name in SAMPLED}
    waited = [request["ttft"] for request in everyone if request["tokens"]]
    until_first = sum(measured["until_first"] for measured in rounds)
    ended, whole = sum(measured["ended"] for measured in rounds), sum(measured["seconds"] for measured in rounds)
    kinds: dict[str, dict[str, Any]] = {}
    for row in (row for measured in rounds for row in measured["kinds"]):
        names = {name: value for name, value in row.items() if name not in _SUMS}
        total = kinds.setdefault(json.dumps(names), {**names, **dict.fromkeys(_SUMS, 0)})
        total.update({name: total[name] + row[name] for name in _SUMS})
    return {
        "rounds": len(rounds),
        "requests": len(everyone),
        "counted": len(counted),
        "unanswered": sum(not request["tokens"] for request in everyone),
        "seconds": [measured["seconds"] for measured in rounds],
        "host_us": [measured["host_us"] for measured in rounds],
        "prompt_tokens": sum(request["prompt_tokens"] for request in everyone),
        "tokens": sum(request["tokens"] for request in everyone),
        "steps": sum(measured["steps"] for measured in rounds),
        "tokens_per_second": {"best": max(speeds), "all": speeds},
        "ttft_ms": spread([request["ttft"] for request in answered]),
        "ttft_tail": ttft_tail(rounds),
        "tpot_ms": spread([sum(request["gaps"]) / (request["tokens"] - 1) for request in several]),
        "itl_ms": spread([gap for request in answered for gap in request["gaps"]]),
        "e2e_ms": spread([_end_to_end(request) for request in answered]),
        "round_e2e_ms": [1e3 * sum(latencies) / len(latencies) for latencies in ends if latencies],
        # Mean TTFT beyond the engine core's time, over all requests.
        "outside_ms": 1e3 * (sum(waited) / len(waited) - until_first / ended) if waited and ended else None,
        # Share of one core: both are mostly single-threaded.
        "cpu": {name: sum(measured["cpu"][name] for measured in rounds) / whole for name in rounds[0]["cpu"]},
        **acceptance(rounds),
        "kinds": list(kinds.values()),
        **{name: sum(values) / len(values) if values else None for name, values in sampled.items()},
    }


def ttft_tail(rounds: Sequence[Event]) -> dict[str, Any] | None:
    """Return when the requests with the slowest 5% of TTFTs were sent.

    Returns:
        ``p95_ms`` of all answered requests, and for ``burst`` (sent before any request of their round had ended, while
        the concurrency only rises) and ``steady`` (sent later): ``requests``; ``above_p95``, the number above P95; and
        ``ttft_ms``. None if no request was answered.
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
                "requests": len(ttfts),
                "above_p95": sum(1e3 * ttft > everyone["p95"] for ttft in ttfts),
                "ttft_ms": spread(ttfts, (50, 90, 99)),
            }
            for name, ttfts in parts.items()
        },
    }


def _shares(load: _Load, name: str) -> dict[str, tuple[str, str]]:
    """Return shares and ms per step, by column or path ``name``."""
    rows = load.get("kinds", ())
    by_value: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_value.setdefault(row.get(name, row["paths"].get(name)), []).append(row)

    def sums(group: Iterable[Mapping[str, Any]]) -> Iterator[float]:
        return (sum(row[part] for row in group) for part in _SUMS)

    (all_steps, all_seconds, _), shares = sums(rows), {}
    for value, group in by_value.items():
        steps, seconds, host = sums(group)
        ms = f"{1e3 * seconds / steps:.2f} ({1e3 * host / steps:.2f})"
        shares[value] = f"{steps / all_steps:.0%} / {seconds / all_seconds:.0%}", ms
    return shares


def _load_row(load: _Load, baseline: _Load | None) -> Iterator[list[str]]:
    speeds, length = load["tokens_per_second"], load["acceptance_length"]
    busy, power = load.get("gpu_busy"), load.get("gpu_power_w")
    ratio = baseline and speedup(load, baseline)
    yield [
        f"{speeds['best']:.0f}",
        f"{min(speeds['all']):.0f}",
        f"{ratio:.2f}×" if ratio else NOT_MEASURED,
        *(
            _digits(latency[percentile]) if (latency := load[name]) else NOT_MEASURED
            for name in LATENCIES
            for percentile in ("p50", "p99")
        ),
        f"{length:.3f}" if length else NOT_MEASURED,
        NOT_MEASURED if busy is None else f"{busy:.0%}",
        NOT_MEASURED if power is None else f"{power:.0f}",
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
    """Format with three significant digits, or all before the point."""
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
        yield [*(", ".join(kinds.get(kind, ())) for kind in KINDS), *(graphs.get(kind, ("",))[0] for kind in GRAPHS)]


def _path_rows(load: _Load, _: _Load | None) -> Iterator[list[str]]:
    for path in dict.fromkeys(path for row in load.get("kinds", ()) for path in row["paths"]):
        outcomes = {outcome: shares for outcome, (shares, _) in _shares(load, path).items() if outcome is not None}
        served = outcomes.pop(SERVED, "0% / 0%")
        yield [path, served, ", ".join(f"{reason} {shares}" for reason, shares in outcomes.items())]


#: A table's text, its columns after the side's, and the function that makes its rows of a side and its baseline.
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
            "GPU power, W",
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
        "Share of the steps / share of the time (until the next step began). By what is in a step, with the "
        "milliseconds per step (in brackets the host's, in the model runner), and by the target's CUDA graphs.",
        (*KINDS.values(), *GRAPHS),
        _kind_row,
    ),
    (
        "Steps by the plugin's fast path: served, or run by vLLM and the reason; shares as above.",
        ("fast path", "served", "run by vLLM, because"),
        _path_rows,
    ),
)


def frontend(settings: Mapping[str, Any]) -> str:
    """Return in words where the requests of a results file went."""
    count = settings.get("api_server_count", 1)
    if not count:
        return "no HTTP"
    return "one API server" if count == 1 else f"{count} API servers"


def groups(results: Mapping[str, Any]) -> Iterator[tuple[str, list[Measured]]]:
    """Yield each case and temperature with its loads, sorted by concurrency."""
    for case in results["cases"]:
        entries = [(side, load) for side, entry in case["sides"].items() for load in entry["loads"].values() if load]
        for temperature in sorted({load["temperature"] for _, load in entries}):
            measurements = [(side, load) for side, load in entries if load["temperature"] == temperature]
            measurements.sort(key=lambda pair: (pair[1]["concurrency"] or math.inf, pair[1]["request_rate"]))
            name = f"{case_name(results, case)}, temperature {temperature:g}"
            yield name, [(_where(load), side, load) for side, load in measurements]


def _where(load: _Load) -> str:
    rate = f", {load['request_rate']:g}/s" if load["request_rate"] else ""
    return f"{load['concurrency'] or 'any'}{rate}"


def tables(loads: Sequence[Measured]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield text, columns and lines of each table of a group."""
    of_load = {at: {side: load for other, side, load in loads if other == at} for at, *_ in loads}
    for text, columns, rows in TABLES:
        if lines := [
            [at, SIDE_NAMES[side], *row]
            for at, side, load in loads
            for row in rows(load, of_load[at].get(_BASELINE.get(side, "")))
        ]:
            yield text, ["concurrency", "side", *columns], lines


def steady(requests: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Return begin and end of a round's steady part; None without one.

    It begins once the share `WARM` of the requests is sent and ends with the last request sent: before it the engine
    fills, after it the engine empties.
    """
    starts = sorted(request["start"] for request in requests)
    begin, end = starts[int(len(starts) * WARM)], starts[-1]
    whole = max((time for request in requests for time in _times(request)), default=0.0)
    return (begin, end) if end - begin > _STEADY * whole else None


def speed(measured: Event) -> float:
    """Return tokens/s of a round's steady part, else of the round."""
    part = steady(measured["requests"])
    if part is None:
        return float(sum(request["tokens"] for request in measured["requests"]) / measured["seconds"])
    begin, end = part
    tokens = 0.0
    for request in measured["requests"]:
        times = _times(request)
        # A chunk of the stream has a step's tokens; the client knows only their total.
        tokens += sum(begin < time <= end for time in times) * request["tokens"] / max(len(times), 1)
    return tokens / (end - begin)


def _counted(measured: Event) -> list[Mapping[str, Any]]:
    part = steady(measured["requests"])
    return [request for request in measured["requests"] if part is None or request["start"] >= part[0]]


def _end_to_end(request: Mapping[str, Any]) -> float:
    return float(request["ttft"] + sum(request["gaps"]))


def _times(request: Mapping[str, Any]) -> list[float]:
    """Return when each chunk of the stream came."""
    return [] if request["ttft"] is None else list(accumulate((request["start"] + request["ttft"], *request["gaps"])))


def spread(seconds: Sequence[float], percentiles: Sequence[int] = (50, 99)) -> dict[str, float] | None:
    """Return mean and percentiles in milliseconds; None without values."""
    if not seconds:
        return None
    import numpy

    shares = {f"p{percent}": float(numpy.percentile(seconds, percent)) * 1e3 for percent in percentiles}
    return {"mean": float(numpy.mean(seconds)) * 1e3, **shares}
