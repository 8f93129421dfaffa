# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin bench serve``: a user's target, drafter and prompts, as clients of a server see them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ..bench import METHODS, NO_DRAFTS, SHAPES, Case, Outcome, TimeLimit, detect_host, find_checkpoints, load_prompts
from ..bench import serve as serving
from ..bench.plan import TINY, check, check_sides, possible_sides, shapes_folder
from ..bench.results import new_results, put_case
from ._bench_running import compare_runs, measure_running
from ._options import JsonFile, arguments, console_for, given, grouped, known, pairs, settings_of, writable_file
from ._serve_report import show
from ._sides import (
    GRAPHS,
    GraphsOption,
    InTurn,
    MoreSidesOption,
    PatchedEnvOption,
    TimeLimitOption,
    UtilizationOption,
    VllmArgOption,
    VllmEnvOption,
    asked_sides,
    progress,
    show_host,
)

#: Prompts of the tiny shape.
_TINY_PROMPTS = 64
_RUNNING = ("url", "against")
_SERVED = ("method", "target", "draft", "shape", "model", "acceptance_length", "k")
_ENGINES = (
    *("side", "vllm_arg", "vllm_env", "patched_env", "cudagraph_mode", "max_model_len", "tensor_parallel_size"),
    *("gpu_memory_utilization", "kv_cache_gib", "api_server_count", "http", "lock"),
)
_LOAD = (
    *("concurrency", "request_rate", "temperature", "prompts", "chat", "input_len", "output_len", "range_ratio"),
    *("ignore_eos", "num_prompts", "per_slot", "rounds", "seed"),
)
#: The class of the command.
SERVE = grouped(
    {"A running server": _RUNNING, "What to serve": _SERVED, "Engines": _ENGINES, "Load": _LOAD},
    "vllm-hwplugin bench serve --method eagle3 --target MODEL --draft DRAFTER \\",
    "    --concurrency 1 --concurrency 16 --html report.html",
    "vllm-hwplugin bench serve --url http://127.0.0.1:8000 --json before.json",
    "vllm-hwplugin bench serve --url http://127.0.0.1:8000 --against before.json",
)


def serve(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(
            help="Measure the running server at this URL (no kinds of steps). Start it with "
            "--no-enable-prefix-caching: rounds repeat the prompts."
        ),
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="Compare with a run of --url (its --json file) by the same load; its options are the defaults. Twice, "
            "without --url: compare the two files, before and after.",
        ),
    ] = None,
    method: Annotated[str | None, typer.Option(help=", ".join(serving.METHODS))] = None,
    target: Annotated[
        str | None, typer.Option(help="Target: a folder, or a name that vLLM finds on this host.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Drafter; mtp has it in the target.")] = None,
    shape: Annotated[
        str | None, typer.Option(help=f"Instead of --target and --draft: {', '.join((TINY, *SHAPES))}.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoints of the tiny shape.")] = None,
    acceptance_length: Annotated[
        float | None, typer.Option(min=1, help="Synthetic acceptance of a dummy shape; default 1 + k / 2.")
    ] = None,
    k: Annotated[
        list[int] | None, typer.Option("--k", min=1, help="Drafted tokens per step; repeat. Default 3.")
    ] = None,
    side: MoreSidesOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help=f"JSONL with {', '.join(serving.KEYS)} (MT-Bench, HumanEval, GSM8K, Alpaca); default: random tokens.",
        ),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests per round; default: enough for 5 s, or 10 s of --request-rate.")
    ] = None,
    per_slot: Annotated[int, typer.Option(min=1, help="Minimum requests per round per concurrent request.")] = 8,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a random prompt.")] = 1024,
    range_ratio: Annotated[
        float, typer.Option(min=0, max=0.99, help="Vary --input-len and --output-len by up to this share.")
    ] = 0.0,
    output_len: Annotated[int, typer.Option(min=2, help="Maximum new tokens of a request.")] = 256,
    temperature: Annotated[list[float] | None, typer.Option(min=0, help="Repeat for several. Default 0.")] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=0, help="Maximum concurrent requests; 0: no bound. Repeat. Default 16.")
    ] = None,
    request_rate: Annotated[
        list[float] | None, typer.Option(min=0, help="Requests per second (Poisson); 0: all at the start. Repeat.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each load and side; sides take turns.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of random prompts and arrival times.")] = 0,
    chat: Annotated[bool, typer.Option(help="Send a file's prompts through the target's chat template.")] = True,
    ignore_eos: Annotated[
        bool | None, typer.Option(help="Answers of --output-len tokens; default: with random prompts.")
    ] = None,
    cudagraph_mode: GraphsOption = GRAPHS,
    max_model_len: Annotated[
        int | None, typer.Option(min=16, help="Default: as the lengths need, or the model's with --prompts.")
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs per engine.")] = 1,
    gpu_memory_utilization: UtilizationOption = None,
    kv_cache_gib: Annotated[
        float | None, typer.Option(min=0.1, help="KV cache per engine; on a GPU, engines then start concurrently.")
    ] = None,
    api_server_count: Annotated[int, typer.Option(min=1, help="API server processes per side.")] = 1,
    http: Annotated[
        bool,
        typer.Option(help="Send requests over HTTP, or to vLLM's AsyncLLM in the client's process."),
    ] = True,
    vllm_arg: VllmArgOption = None,
    vllm_env: VllmEnvOption = None,
    patched_env: PatchedEnvOption = None,
    json_file: JsonFile = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=writable_file, help="Write a page of tables and plots.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Maximum seconds of a start and of each load.")] = 3600,
    time_limit: TimeLimitOption = None,
    lock: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            metavar="FILE",
            help="Runs that name the same FILE start together and send their loads one after the other: several "
            "targets, each on its own GPUs of one machine.",
        ),
    ] = None,
) -> None:
    """Measure latencies, tokens/s and acceptance of your target and drafter.

    Each side has its own `vllm serve`; all sides' servers run together and take turns. --url measures one running
    server instead: results have the load and what that server states about itself, and --against compares two such
    runs. The requests come from the client of `vllm bench serve`; arguments after `--` go to it, for example
    `-- --burstiness 0.5`. Every concurrency is measured with every rate and every temperature; each k has its own
    servers. A shape has dummy weights and synthetic acceptance; the shape tiny has trained weights and its own prompts.
    Prefix caching is off, because rounds repeat the prompts.

    A round lasts at least 5 seconds on the fastest side (sized by a trial run). Its first third is warm-up; responses
    after the last request was sent are not counted. Latencies are in milliseconds, over all rounds; tokens/s are given
    for the best and the slowest round. Steps of all rounds are split by kind, by the target's CUDA graphs, and by the
    outcome of the plugin's fast paths.

    Exit code 1: a patched side failed and its baseline did not, or --against found a slower load. Exit code 2: another
    side failed; Ctrl-C or the time limit stopped the run (results have what all sides measured); --against was given
    another load, or rounds differ more than the two runs.
    """
    limit, console = TimeLimit(time_limit), console_for(json_file)
    if html is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("needs matplotlib: pip install 'vllm-hwplugin[lab]'", param_hint="--html")
    if url is not None or against:
        for name in (*_SERVED, *_ENGINES):
            if given(context, name):
                option = f"--{name.replace('_', '-')}"
                raise typer.BadParameter("the running server decides it; remove the option", param_hint=option)
        files = against or []
        if url is not None and len(files) < 2:
            measure_running(context, url, files, json_file, html, timeout, limit, console)
        elif url is None and json_file is None and len(files) == 2:
            compare_runs(files[0], files[1], console, html)
        else:
            raise typer.BadParameter(
                "expected one file with --url, or two without --url and --json", param_hint="--against"
            )
        return
    if not http and given(context, "api_server_count"):
        raise typer.BadParameter("--no-http starts no API server; remove one of them", param_hint="--api-server-count")
    _check_served(method, target, draft, shape, model, acceptance_length, k)
    assert method is not None
    wanted = asked_sides(side)
    checkpoints = find_checkpoints(model) if shape == TINY else None
    asked: list[serving.Prompt] = []
    if prompts is not None:
        asked += serving.read_prompts(prompts)
    elif checkpoints is not None:
        # Its drafters were not trained on random tokens.
        asked += load_prompts(checkpoints, _TINY_PROMPTS)
    host, drafts = detect_host(), (0,) if method == NO_DRAFTS else tuple(dict.fromkeys(k or [3]))
    sides = wanted or possible_sides([method], host)
    if shape is not None:
        check([Case(shape, method, drafted) for drafted in drafts], host, sides)
    check_sides(sides, [method], host)
    settings = settings_of(
        serving.ServeSettings,
        context,
        target=target if shape is None else None,
        prompts=None if prompts is None else str(prompts),
        k=drafts,
        sides=sides,
        temperature=tuple(dict.fromkeys(temperature or [0.0])),
        concurrency=tuple(dict.fromkeys(concurrency or [16])),
        request_rate=tuple(dict.fromkeys(request_rate or [0.0])),
        ignore_eos=prompts is None if ignore_eos is None else ignore_eos,
        vllm_arguments=arguments(vllm_arg or (), "--vllm-arg"),
        vllm_environment=pairs(vllm_env or (), "--vllm-env"),
        patched_environment=pairs(patched_env or (), "--patched-env"),
        client=tuple(context.args),
        api_server_count=api_server_count if http else 0,
        others_idle=lock is not None,
    )
    show_host(host, console)
    results = new_results(serving.FORMAT, host, settings)
    measurements = serving.serve_measurements(settings, asked or None)
    folder = shapes_folder()
    with progress(console) as bar:
        turns = InTurn(bar, results, json_file, rounds, timeout, limit, serving.MODULE, lock)
        for drafted in settings.k:

            def add(outcomes: Mapping[str, Outcome], drafted: int = drafted) -> None:
                put_case(results, {"k": drafted}, outcomes, lambda outcome: serving.side_entry(outcome, settings))

            if not turns.measure(
                {s: serving.serve_job(drafted, s, settings, host, checkpoints, folder) for s in sides},
                measurements,
                label=f"{method} k={drafted}",
                total=len(sides) * (1 + rounds * len(measurements)),
                at_once=host.device != "cpu" and serving.kv_cache_size(drafted, settings, host) is not None,
                add=add,
            ):
                break
    turns.end(console, partial(show, html=html))


def _check_served(
    method: str | None,
    target: str | None,
    draft: str | None,
    shape: str | None,
    model: Path | None,
    acceptance_length: float | None,
    k: list[int] | None,
) -> None:
    """Check that the options define what the servers serve."""
    if method is None:
        raise typer.BadParameter("missing; name a method, or a running server with --url", param_hint="--method")
    known([method], tuple(serving.METHODS), "--method")
    if shape != TINY and model is not None:
        raise typer.BadParameter("only for --shape tiny; name your target with --target", param_hint="--model")
    if method == NO_DRAFTS and (k or draft is not None):
        option = "--k" if k else "--draft"
        raise typer.BadParameter("--method none drafts no tokens; remove the option", param_hint=option)
    if shape in (None, TINY) and acceptance_length is not None:
        raise typer.BadParameter("trained weights decide it; remove the option", param_hint="--acceptance-length")
    if shape is not None and (target is not None or draft is not None):
        raise typer.BadParameter("excludes --target and --draft; remove it or them", param_hint="--shape")
    if shape is not None:
        known([shape], (TINY, *SHAPES), "--shape")
        known([method], METHODS, "--method")
    elif target is None:
        raise typer.BadParameter("missing; name a target, or --shape", param_hint="--target")
    elif draft is None and method not in serving.BUILT_IN:
        raise typer.BadParameter(f"{method} needs a drafter: a folder, or a name", param_hint="--draft")
    for option, named in (("--target", target), ("--draft", draft)):
        if named is not None and named.startswith(("/", ".")) and not Path(named).exists():
            raise typer.BadParameter(f"{named}: no such folder; name an existing one, or a model", param_hint=option)
