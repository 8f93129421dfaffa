"""One process, one file; what it says survives a fork, and old files go."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_hwplugin.base import run_records


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    run_records.forget()
    yield
    run_records.forget()


def written(base: Path) -> dict[str, object]:
    (path,) = (base / "records").glob("*.json")
    entry: dict[str, object] = json.loads(path.read_text())
    return entry


def test_a_run_record_is_written_and_read_back(tmp_path: Path) -> None:
    entry = run_records.new("1.2.3")
    entry.features = {"a": {"state": "live", "reason": "fits"}, "b": {"state": "off", "reason": "gate"}}
    run_records.begin(entry, tmp_path)
    assert run_records.current() is entry
    (found,) = run_records.read_all(tmp_path)
    assert found == entry
    assert found.live == ("a",)
    assert found.pid == os.getpid()
    assert (tmp_path / "records").stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_forked_child_gets_a_run_record_of_its_own(tmp_path: Path) -> None:
    run_records.begin(run_records.new("1"), tmp_path)
    run_records.note("key", "from the parent")
    run_records.settle_uses({}, engine=0)
    run_records.keep_steps({"feature part": {"served": 1}})
    child = os.fork()
    if not child:
        run_records.adopt()
        run_records.adopt()
        os._exit(0)
    os.waitpid(child, 0)
    run_records.adopt()
    entries = {entry.pid: entry for entry in run_records.read_all(tmp_path)}
    assert set(entries) == {os.getpid(), child}
    assert entries[child].ppid == os.getpid()
    assert entries[child].decisions == {"key": "from the parent"}
    assert [(one.engine, one.steps) for one in (entries[os.getpid()], entries[child])] == [
        (0, {"feature part": {"served": 1}}),
        (None, {}),
    ]


def test_a_run_record_keeps_names_of_the_command_line_and_no_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = "python /x/vllm serve m --api-key sk-1 --key=sk-2 -tp 2 --o.token=sk-3 -- x"
    monkeypatch.setattr("sys.orig_argv", command.split())
    run_records.begin(run_records.new("1"), tmp_path)
    assert written(tmp_path)["argv"] == ["python", "--api-key", "--key", "--o"]


def test_old_run_records_are_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_records, "KEPT", 3)
    folder = tmp_path / "records"
    folder.mkdir(mode=0o700)
    # Linux has no process of this number.
    gone = 1 << 23
    for number in range(5):
        (folder / f"000000000000{number}-{gone}.json").write_text("{}")
    (folder / "notes.txt").touch()

    def names() -> list[str]:
        return sorted(path.name for path in folder.glob("*.json") if path.is_file())

    run_records.begin(run_records.new("1"), tmp_path)
    assert names()[:2] == [f"0000000000003-{gone}.json", f"0000000000004-{gone}.json"]
    assert len(names()) == 3
    assert (folder / "notes.txt").exists()
    # An engine that serves keeps its own while others start, but not for ever.
    running = f"0000000000000-{os.getppid()}.json"
    for count, kept in ((6, True), (20, False)):
        (folder / running).write_text("{}")
        for number in range(count):
            (folder / f"{1000000000000 + number}-{gone}.json").write_text("{}")
        run_records.begin(run_records.new("1"), tmp_path)
        assert (running in names()) == kept


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 99}', '{"format": 1}', '{"format": 1, "pid": 3}'])
def test_a_damaged_or_foreign_run_record_is_left_out(tmp_path: Path, text: str) -> None:
    run_records.begin(run_records.new("1"), tmp_path)
    (tmp_path / "records" / "0-1.json").write_text(text)
    assert len(run_records.read_all(tmp_path)) == 1


@pytest.mark.parametrize(
    ("name", "argv", "expected"),
    [
        ("MainProcess", ["/x/python", "/x/bin/vllm", "serve", "model", "--port", "1"], "api-server"),
        ("MainProcess", ["/x/python", "/x/bin/vllm", "serve", "model", "--headless"], "parent"),
        ("MainProcess", ["python", "-m", "vllm.entrypoints.cli.main", "serve", "model"], "api-server"),
        ("MainProcess", ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"], "api-server"),
        ("EngineCore_DP3", [], "engine-core"),
        ("VllmWorker-0", [], "worker"),
        ("APIServer_DPRank_0", [], "api-server"),
        ("SpawnProcess-1", [], "child"),
        ("MainProcess", ["python", "-m", "vllm.model_executor.models.registry"], "inspection"),
        ("MainProcess", ["python", "/x/ray/_private/workers/default_worker.py", "--y"], "worker"),
    ],
)
def test_the_role_is_told_by_name_and_command_line(name: str, argv: list[str], expected: str) -> None:
    assert run_records.role(name, argv) == expected


def use(used: bool, reason: str = "") -> run_records.Use:
    return {"used": used, "reason": reason}


def test_what_a_feature_said_while_an_engine_was_built_is_of_that_engine_alone(tmp_path: Path) -> None:
    run_records.begin(run_records.new("1"), tmp_path)
    run_records.use("a", False, "found an obstacle")
    run_records.settle_uses({"a": use(True), "b": use(True)})
    assert written(tmp_path)["uses"] == {"a": use(False, "found an obstacle"), "b": use(True)}
    # Another engine in the same process.
    run_records.settle_uses({"a": use(True)})
    assert written(tmp_path)["uses"] == {"a": use(True), "b": use(True)}
    # What found an obstacle and then decides anew is not held to the obstacle.
    run_records.use("a", False, "found an obstacle")
    run_records.note("a", "decided anew")
    run_records.settle_uses({"a": use(True), "b": use(False, "not configured")})
    assert written(tmp_path)["uses"] == {"a": use(True), "b": use(False, "not configured")}


def process(pid: int, ppid: int) -> run_records.RunRecord:
    return dataclasses.replace(run_records.new("1"), pid=pid, ppid=ppid)


def family(written: list[run_records.RunRecord], pid: int) -> list[run_records.RunRecord]:
    return run_records.families(written)[run_records.pids(), pid]


def test_a_process_is_found_with_its_ancestors_children() -> None:
    older = [process(10, 1), process(11, 10)]
    newer = [process(20, 1), process(21, 20), process(22, 21), process(23, 20)]
    for pid in (20, 21, 22, 23):
        assert family([*older, *newer], pid) == newer
    assert family([*older, *newer], 11) == older
    # Another container has processes of the same ids.
    others = [dataclasses.replace(one, pids="elsewhere") for one in newer]
    assert family([*newer, *others], 21) == newer
    assert not any(map(run_records.is_running, others))


def test_a_process_runs_that_has_not_ended_nor_left_its_id_to_a_later_one() -> None:
    own = run_records.new("1")
    assert run_records.is_running(own)
    # Whatever the clock says by now.
    assert run_records.is_running(dataclasses.replace(own, started="2020-01-01T00:00:00.000+00:00"))
    assert not run_records.is_running(dataclasses.replace(own, ticks=own.ticks - 1))
    assert not run_records.is_running(dataclasses.replace(own, ticks=-1))
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    left = dataclasses.replace(own, pid=ended.pid, ticks=run_records.ticks(ended.pid))
    assert run_records.is_running(left)
    assert ended.stdin is not None
    ended.stdin.close()
    # Until somebody asks for its status it is still in the list of processes.
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert not run_records.is_running(left)
    ended.wait()
    assert not run_records.is_running(left)
