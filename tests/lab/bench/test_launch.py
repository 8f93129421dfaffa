"""The child is replaced by small scripts: what matters is that nothing it does loses the outcome."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from datetime import datetime, timedelta, timezone

import pytest

from tests.cpu_seconds import patience, wait_until
from vllm_hwplugin.base import run_records
from vllm_hwplugin_lab.bench import _launch

JOB = ("module", '{"label": "tiny"}', {"SAID": "yes"})


@pytest.fixture
def child(instead_of_engines):
    """Run a script in place of the engine; it gets the paths of the job and of the answer."""
    return lambda script: instead_of_engines("import os, sys, time, json\njob, answer = sys.argv[-2:]\n" + script)


def test_events_come_as_they_are_written(child):
    child(
        "f = open(answer, 'a')\n"
        "assert json.load(open(job))['label'] == 'tiny' and os.environ['SAID'] == 'yes'\n"
        # A line in two halves must not be read as two.
        'f.write(\'{"event": "rea\'); f.flush(); time.sleep(0.4); f.write(\'dy"}\\n{"event": "done"}\\n\')\n'
        "print('loading\\nGraph capturing finished in 12 secs, took 0.41 GiB\\ntooken')\n"
    )
    seen = []
    outcome = _launch.run_child(*JOB, timeout=patience(30), on_event=seen.append)
    assert outcome.error is None
    assert outcome.log_tail == ""
    assert outcome.took == ("Graph capturing finished in 12 secs, took 0.41 GiB",)
    assert [e["event"] for e in outcome.events] == ["ready", "done"]
    assert seen == list(outcome.events)


def test_a_crash_keeps_what_was_measured_and_the_end_of_the_log(child):
    child(
        "open(answer, 'a').write('{\"event\": \"ready\"}\\n')\n"
        "print('(EngineCore pid=5) ERROR MemoryError: 3 GiB are missing')\n"
        "for i in range(100): print('line', i, flush=True)\n"
        "sys.stderr.write('the reason\\n'); sys.exit(3)\n"
    )
    outcome = _launch.run_child(*JOB, timeout=patience(30))
    assert outcome.error == "exit code 3"
    assert [e["event"] for e in outcome.events] == ["ready"]
    lines = outcome.log_tail.splitlines()
    assert len(lines) == 31
    assert lines[0].endswith("MemoryError: 3 GiB are missing")
    assert "the reason" in lines
    assert "line 99" in lines


def test_a_hang_is_ended_with_its_children(child):
    child(
        "import subprocess\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        "print(json.dumps({'event': 'ready', 'child': p.pid}), file=open(answer, 'a'), flush=True)\n"
        "time.sleep(300)\n"
    )
    silence = patience(0.2)
    outcome = _launch.run_child(*JOB, timeout=patience(60), patience=silence)
    assert outcome.error == f"no event for {silence:g} s; killed"
    assert _gone(outcome.events[0]["child"])


def test_a_child_may_be_silent_before_its_first_event_and_behind_its_last(child):
    silence = patience(0.2)
    child(
        # In one write: the child may have to wait for a core before a second.
        f"time.sleep({2 * silence})\n"
        "lines = ''.join(json.dumps({'event': event}) + '\\n' for event in ('ready', 'done'))\n"
        "print(lines, file=open(answer, 'a'), flush=True, end='')\n"
        f"time.sleep({2 * silence})\n"
    )
    assert _launch.run_child(*JOB, timeout=patience(60), patience=silence).error is None


def test_a_terminated_benchmark_takes_its_engine_along(child, tmp_path):
    pid = tmp_path / "pid"
    child(f"open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(300)\n")

    def end_this_process():
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_this_process, daemon=True).start()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        _launch.run_child(*JOB, timeout=patience(60))
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert _gone(int(pid.read_text()))


def _gone(pid):
    def is_gone():
        try:
            with open(f"/proc/{pid}/stat") as stat:
                return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    return wait_until(is_gone, 5)


def at(pid, ppid, moment):
    made = run_records.new("0")
    made.pid, made.ppid, made.started = pid, ppid, moment.isoformat(timespec="milliseconds")
    return made


def test_a_command_between_does_not_hide_the_records(child, monkeypatch):
    child("open(answer, 'a').write(json.dumps({'event': 'ready', 'pid': os.getpid()}) + '\\n')\n")
    with _launch.Child(*JOB, under=["/bin/sh", "-c", '"$@"; exit', "sh"]) as between:
        assert between.follow(patience(30), until=lambda event: event["event"] == "ready")
        pid = between.events[0]["pid"]
        monkeypatch.setattr(run_records, "read_all", lambda: [at(pid, 1, datetime.now(timezone.utc))])
        assert [found["pid"] for found in between.end().records] == [pid]


def test_records_of_the_process_and_its_children_but_not_of_an_older_one(monkeypatch):
    now = datetime.now(timezone.utc)

    def after(pid, ppid, seconds):
        return at(pid, ppid, now + timedelta(seconds=seconds))

    everyone = [after(10, 1, -50), after(10, 1, 1), after(11, 10, 2), after(12, 11, 3), after(20, 1, 3)]
    # Of a process in another container, which has the same id.
    everyone.append(dataclasses.replace(everyone[1], pids="elsewhere"))
    monkeypatch.setattr(run_records, "read_all", lambda: everyone)
    assert [r["pid"] for r in _launch.records_of({10}, now)] == [10, 11, 12]
