# SPDX-License-Identifier: Apache-2.0
"""Steps served and not served: what is counted, how it gets into run record and metrics, and when it is said."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from tests.cpu_seconds import patience, wait_until
from vllm_hwplugin.base import run_records
from vllm_hwplugin.base.cachedir import write_atomically
from vllm_hwplugin.base.gates import PLAIN_DECODE
from vllm_hwplugin.base.run_records import RunRecord, Use
from vllm_hwplugin.spec_decode import step_counts, step_metrics
from vllm_hwplugin.spec_decode.step_counts import Reason, StepCounts

PATH = "a-feature sampling"


@pytest.fixture(autouse=True)
def own_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has built an engine with a feature in use; its thread does not wait for seconds."""
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(step_counts, "INTERVAL", 0.05)
    monkeypatch.setattr(step_counts, "_paths", {})
    monkeypatch.setattr(step_counts, "_keeper", None)
    run_records.forget()
    run_records.begin(run_records.new("1"), tmp_path)
    run_records.settle_uses({"a-feature": Use(used=True, reason="")}, engine=0)
    yield
    run_records.forget()


def on_record(pid: int) -> dict[str, dict[str, int]]:
    entry = run_records.read_latest((run_records.pids(), pid))
    return {} if entry is None else entry.steps


def soon(what: Callable[[], bool]) -> bool:
    return wait_until(what, 20)


def test_each_step_is_counted_once_and_warm_up_is_none() -> None:
    counts, other = StepCounts("a-feature", "sampling"), StepCounts("a-feature", "drafting")
    counts.served()
    counts.missed(Reason.PROMPT)
    step_counts.begin()
    for _ in range(3):
        counts.served()
    for reason in (Reason.PROMPT, Reason.PROMPT, *Reason):
        counts.missed(reason)
    assert counts.outcomes() == {"served": 3, **{reason.label: 1 for reason in Reason}, "prompt": 3}
    step_counts.save()
    # What has counted nothing is not there.
    assert on_record(os.getpid()) == {PATH: counts.outcomes()}
    other.missed(Reason.MOVED)
    assert soon(lambda: on_record(os.getpid()).keys() == {PATH, "a-feature drafting"})
    # Another engine in the same process.
    StepCounts("a-feature", "sampling")
    step_counts.begin()
    assert on_record(os.getpid()) == {}


def _serve(ends: bool) -> None:
    counts = StepCounts("a-feature", "sampling")
    if ends:
        step_counts.INTERVAL = 60.0
    step_counts.begin()
    counts.served()
    if not ends:
        soon(lambda: bool(on_record(os.getpid())))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("ends", [True, False])
def test_an_engine_that_ends_or_is_killed_leaves_its_counts(ends: bool) -> None:
    """vLLM's workers are such children; this one begins while its parent's thread runs, which it does not inherit."""
    step_counts.begin()
    child = multiprocessing.get_context("fork").Process(target=_serve, args=(ends,))
    child.start()
    child.join(patience(60))
    assert child.exitcode == (0 if ends else -signal.SIGKILL)
    assert on_record(child.pid or 0) == {PATH: {"served": 1}}
    assert on_record(os.getpid()) == {}


@pytest.mark.parametrize(
    ("served", "missed", "used", "main"),
    [
        (99, {Reason.SAMPLING_PARAMETERS: 600, Reason.FEWER_DRAFTS: 301}, True, Reason.SAMPLING_PARAMETERS),
        (100, {Reason.SAMPLING_PARAMETERS: 900}, True, None),
        (0, {Reason.NOT_CAPTURED: 999}, True, None),
        (0, {Reason.NOT_CAPTURED: 1000}, False, None),
        # Steps with prompts are not judged, however many there are.
        (50, {Reason.PROMPT: 5000, Reason.STRUCTURED_OUTPUT: 960}, True, Reason.STRUCTURED_OUTPUT),
        (1, {Reason.PROMPT: 5000}, True, None),
    ],
)
def test_what_hardly_serves_is_said_once(
    served: int, missed: dict[Reason, int], used: bool, main: Reason | None, caplog: pytest.LogCaptureFixture
) -> None:
    run_records.use("a-feature", used)
    counts = StepCounts("a-feature", "sampling")
    for _ in range(served):
        counts.served()
    for reason, count in missed.items():
        for _ in range(count):
            counts.missed(reason)
    with caplog.at_level("INFO", "vllm.hwplugin"):
        counts.judge()
        counts.judge()
    assert [line.args for line in caplog.records] == (
        []
        if main is None
        else [
            (
                "a-feature",
                "sampling",
                served + sum(missed.values()) - missed.get(Reason.PROMPT, 0),
                served,
                missed[main],
                main.meaning,
            )
        ]
    )


# -- vLLM's metrics


def worker(engine: int | None, steps: dict[str, dict[str, int]]) -> RunRecord:
    """A child with a record of its own, which waits to be killed."""
    ready, told = os.pipe()
    pid = os.fork()
    if not pid:
        run_records.adopt()
        run_records.settle_uses({}, engine)
        run_records.keep_steps(steps)
        os.write(told, b"1")
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)
    entry = run_records.read_latest((run_records.pids(), pid))
    assert entry is not None
    return entry


def test_metrics_are_what_the_workers_of_this_servers_engines_have_on_record(tmp_path: Path) -> None:
    workers = [
        worker(0, {PATH: {"served": 5, "prompt": 2}}),
        # Another rank of its tensor parallelism.
        worker(None, {PATH: {"served": 5, "prompt": 2}}),
        worker(1, {PATH: {"prompt": 1}}),
        # Of a replica that another server speaks for.
        worker(2, {PATH: {"served": 9}}),
    ]
    registry = prometheus_client.CollectorRegistry()

    def counter(**asked: Any) -> Any:
        return prometheus_client.Counter(registry=registry, **asked)

    def sample(engine: int, outcome: str) -> float | None:
        labels = {"model_name": "m", "engine": str(engine), "feature": "a-feature", "part": "sampling"}
        return registry.get_sample_value("vllm:hwplugin_steps_total", {**labels, "outcome": outcome})

    try:
        counters = step_metrics.StepCounters(counter, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
        counters.observe()
        counters.observe()
        assert [sample(0, "served"), sample(0, "prompt"), sample(1, "prompt")] == [5, 2, 1]
        assert sample(2, "served") is None
        (path,) = (tmp_path / "records").glob(f"*-{workers[0].pid}.json")
        text = path.read_text()
        # A process of the same id in another container, which shares the folder.
        elsewhere = dataclasses.asdict(workers[0]) | {"pids": "elsewhere", "steps": {PATH: {"served": 9000}}}
        write_atomically(path.with_name(f"9999999999999-{workers[0].pid}.json"), json.dumps(elsewhere).encode())
        # It captures anew in between.
        for steps, expected in (('"served": 8', 8), ('"served": 1', 9)):
            path.write_text(text.replace('"served": 5', steps))
            counters.observe()
            assert sample(0, "served") == expected
    finally:
        for one in workers:
            os.kill(one.pid, signal.SIGKILL)
            os.waitpid(one.pid, 0)


@pytest.mark.parametrize(
    ("drafts", "v2", "plain", "counted"),
    [(True, False, "0", True), (False, True, "1", True), (False, True, "0", False), (False, False, "1", False)],
)
def test_metrics_follow_engines_that_the_plugin_may_serve(
    drafts: bool, v2: bool, plain: str, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PLAIN_DECODE, plain)
    config = SimpleNamespace(
        speculative_config=object() if drafts else None,
        use_v2_model_runner=v2,
        parallel_config=SimpleNamespace(_api_process_rank=0),
    )
    registry = prometheus_client.CollectorRegistry()
    counter = partial(prometheus_client.Counter, registry=registry)
    step_metrics.follow(config, counter, ["model_name", "engine"], {0: ["m", "0"]})
    step_metrics._stop.set()
    assert bool([*registry.collect()]) is counted


def test_each_reason_is_in_the_documents_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    table = page.partition("\n## Steps served\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [reason.label for reason in Reason]
