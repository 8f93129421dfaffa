# SPDX-License-Identifier: Apache-2.0
"""``vllm-hwplugin bench serve``: a user's own target, drafter and prompts, as clients of a server see them."""

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
    *("gpu_memory_utilization", "kv_cache_gib", "api_server_count", "http"),
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
            help="Measure the server that runs there, without kinds of steps. Start it with "
            "--no-enable-prefix-caching: rounds repeat the prompts."
        ),
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="Compare with a run that --url wrote there, by the same load: options that you leave out are that "
            "run's. Twice, without --url: compare these two, before and after.",
        ),
    ] = None,
    method: Annotated[str | None, typer.Option(help=", ".join(serving.METHODS))] = None,
    target: Annotated[
        str | None, typer.Option(help="The target: a folder, or a name that vLLM finds on this host.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="The drafter; mtp has it in the target.")] = None,
    shape: Annotated[
        str | None, typer.Option(help=f"Instead of both, as `bench` has them: {', '.join((TINY, *SHAPES))}.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoints of the tiny shape.")] = None,
    acceptance_length: Annotated[
        float | None, typer.Option(min=1, help="Synthetic acceptance of a dummy shape; default 1 + k / 2.")
    ] = None,
    k: Annotated[list[int] | None, typer.Option("--k", min=1, help="Drafted tokens a step; repeat. Default 3.")] = None,
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
        int | None, typer.Option(min=1, help="Requests of a round; default: those of 5 s, or 10 s of --request-rate.")
    ] = None,
    per_slot: Annotated[int, typer.Option(min=1, help="Requests of a round for each that runs at once, at least.")] = 8,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a random prompt.")] = 1024,
    range_ratio: Annotated[
        float, typer.Option(min=0, max=0.99, help="Draw lengths from within this share of --input-len, --output-len.")
    ] = 0.0,
    output_len: Annotated[int, typer.Option(min=2, help="New tokens of a request, at most.")] = 256,
    temperature: Annotated[list[float] | None, typer.Option(min=0, help="Repeat for several. Default 0.")] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=0, help="Requests at once, at most; 0: no bound. Repeat. Default 16.")
    ] = None,
    request_rate: Annotated[
        list[float] | None, typer.Option(min=0, help="Requests a second (Poisson); 0: all at the start. Repeat.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Of each load and side, in turn.")] = 2,
    seed: Annotated[int, typer.Option(help="Same seed, same random prompts and times.")] = 0,
    chat: Annotated[bool, typer.Option(help="Send a file's prompts through the target's chat template.")] = True,
    ignore_eos: Annotated[
        bool | None, typer.Option(help="Every answer as long as it may be; default: with random prompts.")
    ] = None,
    cudagraph_mode: GraphsOption = GRAPHS,
    max_model_len: Annotated[int | None, typer.Option(min=16, help="Default: what is needed, or the model's.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs of an engine.")] = 1,
    gpu_memory_utilization: UtilizationOption = None,
    kv_cache_gib: Annotated[
        float | None, typer.Option(min=0.1, help="KV cache of each engine; with it they start side by side (GPU).")
    ] = None,
    api_server_count: Annotated[
        int, typer.Option(min=1, help="API server processes of each side, as `vllm serve` has them.")
    ] = 1,
    http: Annotated[
        bool,
        typer.Option(help="Ask servers over HTTP, or vLLM's AsyncLLM in the client's process."),
    ] = True,
    vllm_arg: VllmArgOption = None,
    vllm_env: VllmEnvOption = None,
    patched_env: PatchedEnvOption = None,
    json_file: JsonFile = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=writable_file, help="Write tables and drawings there.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for a start, and for each load.")] = 3600,
    time_limit: TimeLimitOption = None,
) -> None:
    """Measure your own case on every side: TTFT, TPOT, ITL, end to end, tokens/s, acceptance, and where the time goes.

    Each side is a `vllm serve` of its own, and the servers of all sides are alive together and take turns. With --url
    it is one server that runs already, of which the results hold what was sent, and what the server says of itself;
    --against compares two such runs. vLLM's own client, that of `vllm bench serve`, sends the requests; what you write
    behind `--` is that client's (`-- --dataset-name sharegpt --dataset-path FILE`, `-- --burstiness 0.5`). Every
    concurrency is measured with every rate and every temperature; each k has servers of its own. A shape has dummy
    weights and synthetic acceptance, or, tiny, trained ones and prompts of its own. Prefix caching is off, because
    rounds repeat the prompts.

    Each round lasts at least 5 seconds on the fastest side (sized by a trial run). The first third is warm-up;
    responses after the last request was sent are not counted. Latencies are those of all rounds together, in
    milliseconds; tokens/s those of the best and of the slowest round. Steps are parted by what is in them, by how
    the target ran, and by what the plugin's fast paths made of them, all of all rounds.

    Exit code 1 when a patched side failed where stock ran on that runner, or when --against found a load slower; 2 when
    another side failed, when Ctrl-C or the time limit left something out (what all sides have measured is in the
    results then), and when --against refuses another load or cannot tell, because rounds differ more than the two
    runs.
    """
    limit, console = TimeLimit(time_limit), console_for(json_file)
    if html is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("needs matplotlib: pip install 'vllm-hwplugin[lab]'", param_hint="--html")
    if url is not None or against:
        for name in (*_SERVED, *_ENGINES):
            if given(context, name):
                option = f"--{name.replace('_', '-')}"
                raise typer.BadParameter("the server at --url has settled that; leave it out", param_hint=option)
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
        raise typer.BadParameter("--no-http starts no API server; leave it out", param_hint="--api-server-count")
    _check_served(method, target, draft, shape, model, acceptance_length, k)
    assert method is not None
    wanted = asked_sides(side)
    checkpoints = find_checkpoints(model) if shape == TINY else None
    asked: list[serving.Prompt] = []
    if prompts is not None:
        asked += serving.read_prompts(prompts)
    elif checkpoints is not None:
        # Random tokens are not what its drafters were trained for.
        asked += load_prompts(checkpoints, _TINY_PROMPTS)
    host, drafts = detect_host(), (0,) if method == NO_DRAFTS else tuple(dict.fromkeys(k or [3]))
    sides = wanted or possible_sides([method], host)
    if shape is not None:
        check([Case(shape, method, one) for one in drafts], host, sides)
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
    )
    show_host(host, console)
    results = new_results(serving.FORMAT, host, settings)
    measurements = serving.serve_measurements(settings, asked or None)
    folder = shapes_folder()
    with progress(console) as bar:
        turns = InTurn(bar, results, json_file, rounds, timeout, limit, serving.MODULE)
        for one in settings.k:

            def add(outcomes: Mapping[str, Outcome], one: int = one) -> None:
                put_case(results, {"k": one}, outcomes, lambda outcome: serving.side_entry(outcome, settings))

            if not turns.measure(
                {s: serving.serve_job(one, s, settings, host, checkpoints, folder) for s in sides},
                measurements,
                label=f"{method} k={one}",
                total=len(sides) * (1 + rounds * len(measurements)),
                at_once=host.device != "cpu" and serving.kv_cache_size(one, settings, host) is not None,
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
    """Whether the options say what the servers are to serve.

    Raises:
        typer.BadParameter: they do not.
    """
    if method is None:
        raise typer.BadParameter("how to draft is missing: name a method, or a server's --url", param_hint="--method")
    known([method], tuple(serving.METHODS), "--method")
    if shape != TINY and model is not None:
        raise typer.BadParameter("only --shape tiny has these; a target of your own is --target", param_hint="--model")
    if method == NO_DRAFTS and (k or draft is not None):
        option = "--k" if k else "--draft"
        raise typer.BadParameter("nothing drafts with --method none; leave it out", param_hint=option)
    if shape in (None, TINY) and acceptance_length is not None:
        raise typer.BadParameter("real weights decide it themselves; leave it out", param_hint="--acceptance-length")
    if shape is not None and (target is not None or draft is not None):
        raise typer.BadParameter("a shape says what target and drafter are; leave it or them out", param_hint="--shape")
    if shape is not None:
        known([shape], (TINY, *SHAPES), "--shape")
        known([method], METHODS, "--method")
    elif target is None:
        raise typer.BadParameter("what to serve is missing: name a target, or --shape", param_hint="--target")
    elif draft is None and method not in serving.BUILT_IN:
        raise typer.BadParameter(f"{method} needs a drafter: a folder, or a name", param_hint="--draft")
    for option, named in (("--target", target), ("--draft", draft)):
        if named is not None and named.startswith(("/", ".")) and not Path(named).exists():
            raise typer.BadParameter(f"{named}: no such folder; name one, or a model's name", param_hint=option)
