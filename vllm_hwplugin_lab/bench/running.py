# SPDX-License-Identifier: Apache-2.0
"""``bench serve --url``: a running server, and the comparison of two runs of one load.

A results file holds what was sent and what the server reports about itself. Of the client's environment it holds only
the fields of ``client``.
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

from vllm_hwplugin.base.errors import HwpluginError
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
#: Settings in which two runs may differ: names of the server and the file.
_NAMES = frozenset({"url", "model", "prompts"})


class ServerSilent(HwpluginError):
    """The URL does not answer as a vLLM server."""


class NoRun(HwpluginError):
    """A file does not hold results of ``bench serve --url``."""


class AnotherLoad(HwpluginError):
    """Two runs sent different loads, so their figures cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class RunningSettings(LoadSettings):
    """The settings of a run on a running server.

    Attributes:
        model: The model's name in requests.
        checkpoint: The checkpoint that the server reports, for the client's tokenizer.
        prompts_sha256: Digest of the prompts' text; None: the client made the prompts.
    """

    url: str
    model: str
    checkpoint: str
    prompts_sha256: str | None


def served_by(url: str) -> tuple[str, str]:
    """Return a served model's name and checkpoint; raise ServerSilent without an answer."""
    key = os.environ.get("OPENAI_API_KEY")
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER) as answer:
            model = json.load(answer)["data"][0]
        return str(model["id"]), str(model.get("root") or model["id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ServerSilent(
            f"{request.full_url}: expected the models of a running `vllm serve`, found {error!r}; start the server, or "
            "fix --url"
        ) from error


def digest(prompts: Sequence[Prompt]) -> str | None:
    """Return a digest of the prompts of a file, or None."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest() if prompts else None


def job(settings: RunningSettings) -> Job:
    """Return the client's job."""
    return Job(settings.url, False, {"url": settings.url, "model": settings.model}, {}, workloads=())


def new_results(settings: RunningSettings) -> dict[str, Any]:
    """Return an empty results file.

    Raises:
        NotInstalled: vLLM is not installed here; its client sends the requests.
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
    """Return the server's entry of a results file."""
    report = next(iter(outcome.of("said")), {})
    return {
        "error": outcome.error,
        "log_tail": outcome.log_tail,
        "said": {name: value for name, value in report.items() if name != "event"},
        "loads": loads_entry(outcome, settings),
    }


def servers(results: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the running servers of a results file, with their entries."""
    return ((side, entry) for case in results["cases"] for side, entry in case["sides"].items() if "said" in entry)


def in_words(entry: Mapping[str, Any]) -> str:
    """Return the server's own facts in one sentence."""
    report = entry["said"]
    if not report:
        return "the run ended before the server reported about itself"
    drafted, cached = report["drafted"], report["prefix_caching"]
    speculation = {None: "speculation unknown", 0: "no speculation"}
    caching = {None: "prefix caching unknown", True: "prefix caching on", False: "prefix caching off"}
    return "; ".join(
        (
            f"vLLM {report['vllm'] or 'of unknown version'}",
            speculation.get(drafted, f"drafts of up to {drafted} tokens"),
            caching[cached],
            f"plugin: {_plugin(report['plugin'], drafted)}",
        )
    )


def _plugin(paths: Mapping[str, Mapping[str, int]] | None, drafted: int | None) -> str:
    if paths is None:
        # Without speculation the plugin counts steps only if it was asked for graphs.
        return "no counters: off, or older" if drafted else "no counters: off, older, or not counted here"
    if not paths:
        return "on, counted no step"
    shares = [outcomes.get(SERVED, 0) / sum(outcomes.values()) for outcomes in paths.values()]
    left: Counter[str] = Counter()
    for outcomes in paths.values():
        left.update({reason: count for reason, count in outcomes.items() if reason != SERVED})
    why = f", most of the rest left for `{left.most_common(1)[0][0]}`" if left else ""
    return f"on, served {between(shares, '.0%', '–')} of the steps by path{why}"


def read_run(file: Path) -> dict[str, Any]:
    """Read a run's results; raise NoRun if the file has none."""
    try:
        content = read_results(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NoRun(f"{file}: expected results of `bench serve --url`, found {error}") from error
    form = content.get("format") if isinstance(content, dict) else type(content).__name__
    if form != FORMAT:
        raise NoRun(f"{file}: expected results of `bench serve --url` (format {FORMAT!r}), found format {form!r}")
    run: dict[str, Any] = content
    return run


def same_load(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Refuse to compare runs of different loads.

    Raises:
        AnotherLoad: The loads differ; names each key with both values.
    """
    keys = [key for key in before.keys() | after.keys() if key not in _NAMES]
    differing = sorted(key for key in keys if before.get(key) != after.get(key))
    if differing:
        differences = "; ".join(f"{key}: {before.get(key)!r} before, {after.get(key)!r} after" for key in differing)
        raise AnotherLoad(f"not the same load: {differences}; measure both with the same options")


def round_sizes(run: Mapping[str, Any]) -> dict[str, int]:
    """Return load name -> requests per round."""
    loads = run["cases"][0]["sides"][SIDE]["loads"] if run["cases"] else {}
    return {name: load["requests"] // load["rounds"] for name, load in loads.items() if load}


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Combine two runs to results with two sides; raises as :func:`same_load`."""
    same_load(before["settings"], after["settings"])
    runs = {BEFORE: before, AFTER: after}
    sides = {name: run["cases"][0]["sides"][SIDE] for name, run in runs.items() if run["cases"]}
    stopped = [case["stopped"] for run in runs.values() for case in run["cases"] if case["stopped"]]
    case = {"sides": sides, "stopped": stopped[0] if stopped else None}
    return {**after, "dates": {name: run["date"] for name, run in runs.items()}, "cases": [case]}
