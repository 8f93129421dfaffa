# SPDX-License-Identifier: Apache-2.0
"""``bench serve --url``: a server that somebody else started, and two runs of one load on such servers.

A results file holds what was sent and what the server says of itself. Nothing of the client's environment is in it but
what ``client`` names.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_hwplugin.errors import HwpluginError
from vllm_hwplugin.patching import find_installed
from vllm_hwplugin.spec_decode.step_counts import SERVED

from ._job import Job, Outcome
from .results import provenance, read_results
from .serve import LoadSettings, Prompt, loads_entry
from .table import between

FORMAT = "running 1"
#: The name of the only side.
SIDE = "server"
#: The sides of two runs, the baseline first.
BEFORE, AFTER = "before", "after"
#: Seconds for a server's answer.
_ANSWER = 10
#: What two runs may differ in: names of one server and one file.
_NAMES = frozenset({"url", "model", "prompts"})


class ServerSilent(HwpluginError):
    """The server that is to be measured does not answer as one."""


class NoRun(HwpluginError):
    """A file holds no results of ``bench serve --url``."""


class AnotherLoad(HwpluginError):
    """Two runs sent different loads, so their figures cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class RunningSettings(LoadSettings):
    """What a running server was sent.

    Attributes:
        url: of the server.
        model: its name in requests.
        checkpoint: what the server says that it loaded; the client has its tokenizer from there.
        prompts_sha256: of the prompts' text; None: the client made them.
    """

    url: str
    model: str
    checkpoint: str
    prompts_sha256: str | None


def served_by(url: str) -> tuple[str, str]:
    """Name and checkpoint of the model that a server offers.

    Raises:
        ServerSilent: nobody answers there as vLLM's server does.
    """
    key = os.environ.get("OPENAI_API_KEY")
    asked = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(asked, timeout=_ANSWER) as answer:
            model = json.load(answer)["data"][0]
        return str(model["id"]), str(model.get("root") or model["id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ServerSilent(
            f"{asked.full_url}: expected the models of a running `vllm serve`, found {error!r}; start it, or fix --url"
        ) from error


def digest(prompts: Sequence[Prompt]) -> str | None:
    """What tells the prompts of one file from others'; None of no prompts."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest() if prompts else None


def job(settings: RunningSettings) -> Job:
    """What the client is told."""
    return Job(settings.url, False, {"url": settings.url, "model": settings.model}, {}, workloads=())


def new_results(settings: RunningSettings) -> dict[str, Any]:
    """An empty results file.

    Raises:
        NotInstalled: there is no vLLM here, whose client sends the requests.
    """
    made = provenance()
    client = {"vllm": find_installed().version, "vllm-hwplugin": made["plugin"], "commit": made["commit"]}
    return {
        "format": FORMAT,
        "date": made["date"],
        "client": {**client, "python": platform.python_version(), "cpus": os.cpu_count()},
        "settings": json.loads(json.dumps(dataclasses.asdict(settings))),
        "cases": [],
    }


def server_entry(outcome: Outcome, settings: RunningSettings) -> dict[str, Any]:
    """What a results file has of the server."""
    said = next(iter(outcome.of("said")), {})
    return {
        "error": outcome.error,
        "log_tail": outcome.log_tail,
        "said": {name: value for name, value in said.items() if name != "event"},
        "loads": loads_entry(outcome, settings),
    }


def servers(results: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The sides of a results file that are running servers, and their entries."""
    return ((side, one) for case in results["cases"] for side, one in case["sides"].items() if "said" in one)


def in_words(entry: Mapping[str, Any]) -> str:
    """What a server said of itself, in one sentence."""
    said = entry["said"]
    if not said:
        return "the run ended before the server was asked what it is"
    drafted, cached = said["drafted"], said["prefix_caching"]
    speculation = {None: "speculation unknown", 0: "no speculation"}
    caching = {None: "prefix caching unknown", True: "prefix caching on", False: "prefix caching off"}
    return "; ".join(
        (
            f"vLLM {said['vllm'] or 'of unknown version'}",
            speculation.get(drafted, f"drafts of up to {drafted} tokens"),
            caching[cached],
            f"plugin: {_plugin(said['plugin'], drafted)}",
        )
    )


def _plugin(paths: Mapping[str, Mapping[str, int]] | None, drafted: int | None) -> str:
    if paths is None:
        # Without speculation, steps are counted only where the plugin was asked for graphs there.
        return "no counters: off, or older" if drafted else "no counters: off, older, or not counted here"
    if not paths:
        return "on, counted no step"
    shares = [outcomes.get(SERVED, 0) / sum(outcomes.values()) for outcomes in paths.values()]
    left: Counter[str] = Counter()
    for outcomes in paths.values():
        left.update({reason: count for reason, count in outcomes.items() if reason != SERVED})
    why = f", most others left for `{left.most_common(1)[0][0]}`" if left else ""
    return f"on, served {between(shares, '.0%', '–')} of the steps by path{why}"


def read_run(file: Path) -> dict[str, Any]:
    """The results of a run.

    Raises:
        NoRun: the file cannot be read, or holds something else.
    """
    try:
        found = read_results(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NoRun(f"{file}: expected results of `bench serve --url`, found {error}") from error
    form = found.get("format") if isinstance(found, dict) else type(found).__name__
    if form != FORMAT:
        raise NoRun(f"{file}: expected results of `bench serve --url` (format {FORMAT!r}), found format {form!r}")
    run: dict[str, Any] = found
    return run


def same_load(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Refuse to compare runs of different loads.

    Args:
        before: settings of a run.
        after: settings of the other run.

    Raises:
        AnotherLoad: names each key that differs, with both values.
    """
    keys = [key for key in before.keys() | after.keys() if key not in _NAMES]
    differing = sorted(key for key in keys if before.get(key) != after.get(key))
    if differing:
        told = "; ".join(f"{key}: {before.get(key)!r} before, {after.get(key)!r} after" for key in differing)
        raise AnotherLoad(f"not the same load: {told}; measure both with the same options")


def round_sizes(run: Mapping[str, Any]) -> dict[str, int]:
    """Name of each load of a run -> requests of one of its rounds."""
    loads = run["cases"][0]["sides"][SIDE]["loads"] if run["cases"] else {}
    return {name: load["requests"] // load["rounds"] for name, load in loads.items() if load}


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Two runs of one load as one results file with two sides.

    Raises:
        AnotherLoad: they did not send the same.
    """
    same_load(before["settings"], after["settings"])
    runs = {BEFORE: before, AFTER: after}
    sides = {name: run["cases"][0]["sides"][SIDE] for name, run in runs.items() if run["cases"]}
    stopped = [case["stopped"] for run in runs.values() for case in run["cases"] if case["stopped"]]
    case = {"sides": sides, "stopped": stopped[0] if stopped else None}
    return {**after, "dates": {name: run["date"] for name, run in runs.items()}, "cases": [case]}
