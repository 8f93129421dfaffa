# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI server with the plugin and an Eagle3 draft, as its clients see it.

One server serves all tests here: clients ask at once, one goes away in the middle of its answer, and then the server is
told to end. The real `openai` client asks. A catalogue from outside changes vLLM's scheduler.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cpu_seconds import patience, wait_until
from vllm_hwplugin.base import run_records
from vllm_hwplugin.patching import find_installed
from vllm_hwplugin.spec_decode import step_counts
from vllm_hwplugin_lab import bench
from vllm_hwplugin_lab.bench._entry_points import provide
from vllm_hwplugin_lab.bench._launch import child_environment

pytestmark = [pytest.mark.engine, pytest.mark.smoke]

MODEL = "small"
START, STOP = 240, 60
# So many tokens that no host is done with them before it hears that the client is gone.
LONG, LENGTH = 16_000, 16_128
# What the checkpoints were trained on, so that drafts are accepted.
TEXTS = ("def add(a, b):\n    return a + b\n", "for i in range(10):\n", "class Node:\n    def __init__(self):\n")
#: What a feature of the catalogue from outside changes: requests for FIVE tokens get four.
SCHEDULER, LIMIT, FIVE = "vllm/v1/core/sched/utils.py", "num_output_tokens >= request.max_tokens", 5
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0.0, "max_tokens": 32, "extra_body": {"ignore_eos": True}}


class Server:
    """A running server: its address, log and counters."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.url, self._log = process, f"http://127.0.0.1:{port}", log

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def client(self) -> Any:
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=patience(60), max_retries=0)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def counters(self) -> dict[str, float]:
        """Samples by name, those of a request's end by name and reason, those of steps by name, path and outcome."""
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(f"{self.url}/metrics", timeout=patience(10)) as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = (sample.labels.get(name) for name in ("finished_reason", "feature", "part", "outcome"))
                name = " ".join((sample.name.removeprefix("vllm:"), *filter(None, labels)))
                found[name] = found.get(name, 0) + sample.value
        return found

    def wait_for(self, what: Callable[[], bool], seconds: float) -> bool:
        return wait_until(what, seconds, unless=lambda: self.process.poll() is not None)


def write_catalogue(folder: Path) -> Path:
    """Write a catalogue from outside for the installed vLLM."""
    vllm = find_installed()
    before = (vllm.read(SCHEDULER) or "").splitlines(keepends=True)
    after = [line.replace(LIMIT, f"{LIMIT} - (request.max_tokens == {FIVE})") for line in before]
    (folder / "half").mkdir(parents=True)
    (folder / "catalogue.toml").write_text('name = "acme"\n')
    (folder / "half" / "a.diff").write_text(
        "".join(difflib.unified_diff(before, after, f"a/{SCHEDULER}", f"b/{SCHEDULER}"))
    )
    (folder / "half" / "patch.toml").write_text(
        f'id = "half"\ntitle = "t"\nwhat = "w"\norigin = "o"\nremoval = "r"\nversions = "=={vllm.version}"\n'
    )
    return folder


@dataclass
class Seen:
    """What came of the session."""

    alone: dict[str, str] = field(default_factory=dict)
    together: list[tuple[str, str, int]] = field(default_factory=list)
    of_five: int = 0
    read_before_leaving: int = 0
    counters: dict[str, dict[str, float]] = field(default_factory=dict)
    left_running: bool = True
    healthy: bool = False
    exit_code: int | None = None
    left_over: list[int] = field(default_factory=list)
    log: str = ""
    records: tuple[run_records.RunRecord, ...] = ()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def processes_of(session: int) -> list[int]:
    """The processes of a session that still run; those that wait to be reaped are gone."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # After the name, which may hold blanks and brackets: state, parent, group, session.
                state, _, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(of) == session and state != "Z":
                found.append(int(folder.name))
    return found


def for_long_texts(name: str, folder: Path) -> Path:
    """A copy of a checkpoint that takes more tokens than it was trained for."""
    copy = folder / name
    shutil.copytree(bench.find_checkpoints(None).root / name, copy, copy_function=shutil.copyfile)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LENGTH}))
    return copy


@pytest.fixture(scope="module")
def server(cpu_host: bench.Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    target, drafter = (for_long_texts(name, folder) for name in ("target", "eagle3"))
    speculation = f'{{"method": "eagle3", "model": "{drafter}", "num_speculative_tokens": 3}}'
    # As README says it for a host without a GPU.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(target), "--served-model-name", MODEL]
    command += ["--host", "127.0.0.1", "--port", str(port), "--speculative-config", speculation]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(LENGTH), "--max-num-seqs", "8"]
    command += ["--no-enable-prefix-caching", "--seed", "0"]
    variables = bench.engine_environment("cpu", patched=True) | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_HWPLUGIN_CACHE_DIR": str(folder / "cache"),
        "VLLM_HWPLUGIN_DFLASH_FULL_GRAPH": "off",
        "VLLM_HWPLUGIN_LINEAR": "perhaps",
        "VLLM_NWOR_MODE": "stage",
        "VLLM_NWOR_EMIT_METRICS": "1",
        "VLLM_HWPLUGIN_PATCHES": str(write_catalogue(folder / "acme")),
        "VLLM_HWPLUGIN_PATCH_ACME_HALF": "on",
    }
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=child_environment(variables, provide(folder / "metadata")),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running = Server(process, port, log)
        try:
            assert running.wait_for(running.healthy, START), running.log[-6000:]
            yield running
        finally:
            for left in processes_of(process.pid):
                os.kill(left, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def seen(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Everything that the clients do, in order, and then the end."""
    found = Seen()
    found.counters["before"] = server.counters()
    for text in TEXTS:
        found.alone[text] = server.client().completions.create(prompt=text, **GREEDY).choices[0].text
    found.counters["alone"] = server.counters()

    with ThreadPoolExecutor(6) as clients:
        completions = [clients.submit(_complete, server, text) for text in (*TEXTS, *TEXTS)]
        found.together = [one.result() for one in completions]

    of_five = server.client().completions.create(prompt=TEXTS[0], **{**GREEDY, "max_tokens": FIVE})
    found.of_five = of_five.usage.completion_tokens
    found.counters["before leaving"] = server.counters()
    with server.client().completions.create(prompt=TEXTS[0], stream=True, **{**GREEDY, "max_tokens": LONG}) as stream:
        for _ in stream:
            found.read_before_leaving += 1
            if found.read_before_leaving == 3:
                break
    found.left_running = not server.wait_for(lambda: server.counters()["num_requests_running"] == 0, 20)
    found.counters["after leaving"] = server.counters()
    found.healthy = server.healthy()
    # A worker puts its last steps in the run record, and the server looks there.
    time.sleep(patience(2 * step_counts.INTERVAL + 1))
    found.counters["later"] = server.counters()

    server.process.send_signal(signal.SIGTERM)
    try:
        found.exit_code = server.process.wait(patience(STOP))
    except subprocess.TimeoutExpired:
        found.exit_code = None
    # The tracker of shared memory ends by itself when the last process that could have used it is gone.
    wait_until(lambda: not processes_of(server.process.pid), 10)
    found.left_over = processes_of(server.process.pid)
    found.log = server.log
    found.records = tuple(run_records.read_all(server._log.parent / "cache"))
    return found


def _complete(server: Server, text: str) -> tuple[str, str, int]:
    answer = server.client().completions.create(prompt=text, **GREEDY)
    return text, answer.choices[0].text, answer.usage.completion_tokens


def growth(seen: Seen, counter: str, start: str, end: str) -> float:
    return seen.counters[end].get(counter, 0) - seen.counters[start].get(counter, 0)


def test_clients_that_ask_at_once_get_what_each_would_get_alone(seen: Seen) -> None:
    assert len(seen.together) == 6
    assert all(tokens == GREEDY["max_tokens"] for _, _, tokens in seen.together)
    assert {(prompt, text) for prompt, text, _ in seen.together} == set(seen.alone.items())
    assert len(set(seen.alone.values())) == len(TEXTS)


def test_drafts_are_made_and_accepted(seen: Seen) -> None:
    drafted = growth(seen, "spec_decode_num_draft_tokens_total", "before", "alone")
    accepted = growth(seen, "spec_decode_num_accepted_tokens_total", "before", "alone")
    drafts = growth(seen, "spec_decode_num_drafts_total", "before", "alone")
    assert drafted == 3 * drafts > 0
    assert 0 < accepted < drafted
    assert growth(seen, "generation_tokens_total", "before", "alone") == 3 * GREEDY["max_tokens"]
    assert growth(seen, "request_success_total length", "before", "before leaving") == 3 + 6 + 1


def test_draft_rows_are_counted(seen: Seen) -> None:
    drafted, accepted, rejected = (
        growth(seen, f"nwor_{name}_rows_total", "before", "after leaving")
        for name in ("drafted", "accepted", "rejected")
    )
    assert drafted == growth(seen, "spec_decode_num_draft_tokens_total", "before", "after leaving")
    assert accepted == growth(seen, "spec_decode_num_accepted_tokens_total", "before", "after leaving")
    assert (drafted, rejected > 0) == (accepted + rejected, True)


def test_a_client_that_goes_away_ends_its_request_alone(seen: Seen) -> None:
    assert seen.read_before_leaving == 3
    assert not seen.left_running
    assert growth(seen, "generation_tokens_total", "before leaving", "after leaving") < LONG
    assert growth(seen, "request_success_total length", "before leaving", "after leaving") == 0
    assert seen.counters["after leaving"]["num_requests_waiting"] == 0
    assert seen.healthy


def test_the_server_ends_when_told_and_leaves_no_process(seen: Seen) -> None:
    assert seen.exit_code == 0, seen.log[-4000:]
    assert seen.left_over == []


def test_its_log_says_once_and_in_vllms_form_what_is_patched_in(seen: Seen) -> None:
    form = r"(?:\(\w+ pid=\d+\) )?([A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[_runtime.py:\d+\] vllm-hwplugin: (.*)"
    refused, patched_in = re.findall(form, seen.log)
    assert (refused[0], refused[1].split(": ")[0]) == ("WARNING", "linear is not patched in, vLLM runs unpatched there")
    assert (patched_in[0], patched_in[1].split()[:3]) == ("INFO", ["patched", "in", "on"])
    assert "draft-full-graph" in patched_in[1].rpartition(": ")[2].split(", ")


def test_its_worker_says_what_it_uses_and_every_process_what_is_in_force(seen: Seen) -> None:
    roles = {one.role for one in seen.records}
    assert {"api-server", "engine-core", "worker"} <= roles
    assert all("draft-full-graph" in one.live and "dflash-full-graph" not in one.live for one in seen.records)
    assert len({one.fingerprint for one in seen.records}) == 1
    # A catalogue from outside is patched into each process, and vLLM knows its switch.
    assert all("acme/half" in one.live for one in seen.records)
    assert seen.of_five == FIVE - 1
    assert not any("Unknown vLLM environment variable" in line and "ACME" in line for line in seen.log.splitlines())
    (worker,) = (one for one in seen.records if one.uses)
    assert worker.role == "worker"
    assert not worker.uses["draft-full-graph"]["used"]
    assert worker.uses["nwor"]["used"]
    # Without CUDA graphs no step is served.
    assert {outcome for outcomes in worker.steps.values() for outcome in outcomes} == {"not_captured"}
    assert {path.split()[0] for path in worker.steps} >= {"v1-step-inputs", "v1-draft-phase", "draft-full-graph"}
    assert {
        f"hwplugin_steps_total {path} {outcome}": steps
        for path, outcomes in worker.steps.items()
        for outcome, steps in outcomes.items()
    } == {name: value for name, value in seen.counters["later"].items() if name.startswith("hwplugin_steps_total ")}
