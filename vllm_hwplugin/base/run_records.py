# SPDX-License-Identifier: Apache-2.0
"""Run records: one JSON file for each process with what the plugin did there.

vLLM runs a parent, an engine core, workers and short-lived inspection processes, and a log line in one of them tells
nothing about the others. Each writes ``<cache>/records/<start in ms>-<pid>.json``, and ``vllm-hwplugin doctor`` shows
them. They are only information for people: if a record cannot be written, vLLM runs on without it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import multiprocessing
import multiprocessing.util
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypedDict

from . import cachedir, gates
from .cachedir import UntrustedFolder, places, private_folder, read_private, trusted_folder, write_atomically
from .errors import HwpluginError

logger = logging.getLogger("vllm.hwplugin")

FORMAT = 1
KEPT = 256
FOLDER = "records"

_LONG_OPTION = re.compile("--[A-Za-z][A-Za-z0-9_-]*")

# The name of a process that `multiprocessing` has not started, and prefixes of the names that vLLM gives to others.
_FIRST = "MainProcess"
_ROLES = {
    "EngineCore": "engine-core",
    "DPEngineCore": "engine-core",
    "VllmWorker": "worker",
    "Worker": "worker",
    "ApiServer": "api-server",
    "APIServer": "api-server",
}
# `vllm serve`, `python -m vllm.entrypoints.cli.main serve`, `python -m vllm.entrypoints.openai.api_server`: arguments
# joined by zeros.
_SERVER = re.compile(
    r"(^|\0|/)(vllm|vllm\.entrypoints\.cli\.main)\0serve(\0|$)|vllm[./]entrypoints[./]\w+[./]api_server"
)


class _Said(TypedDict):
    used: bool
    reason: str


class Use(_Said, total=False):
    """Whether an engine uses a patched-in feature, and why not.

    `cause`, `wants` and `cure` are set if the engine's configuration is the reason; see
    `spec_decode.engine_report.Unused`.
    """

    cause: str
    wants: str
    cure: str


@dataclass
class RunRecord:
    """The plugin's state in one process.

    Attributes:
        pids: see :func:`pids`; empty in a record of an older plugin.
        ticks: see :func:`ticks`; -1 in a record of an older plugin.
        argv: the interpreter and the names of long options, without values: records go into bug reports.
        features: feature id -> ``{"state": ..., "reason": ...}`` with the states of the plan.
        modules: patched module -> ``pending`` (not imported yet), ``served`` (from its copy), ``re-applied`` (imported
            before the plugin, got new code in place), ``stock`` (imported past the plugin).
        uses: patched-in feature that works in this process -> whether its engine uses it; empty without an engine.
        decisions: run-time decisions by key; see :func:`note`.
        engine: index of the vLLM engine that `steps` count; None if the process counts none.
        steps: fast path (feature and part of a step) -> outcome -> number of steps.
        error: one line, if the plugin could not work at all.
        off: ``VLLM_HWPLUGIN=0``, the plugin did nothing. Then `features`, `modules` and `vllm_dist` are empty, and
            version and root are taken from an imported vLLM.
    """

    pid: int
    ppid: int
    role: str
    started: str
    argv: list[str]
    python: str
    plugin_version: str
    vllm_dist: str | None = None
    vllm_version: str | None = None
    vllm_root: str | None = None
    fingerprint: str = "none"
    overlay: str | None = None
    features: dict[str, dict[str, str]] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    uses: dict[str, Use] = field(default_factory=dict)
    decisions: dict[str, str] = field(default_factory=dict)
    engine: int | None = None
    steps: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    off: bool = False
    format: int = FORMAT
    pids: str = ""
    ticks: int = -1

    @property
    def process(self) -> tuple[str, int]:
        """What distinguishes a process from all others that run, in any container."""
        return self.pids, self.pid

    @property
    def live(self) -> tuple[str, ...]:
        return tuple(name for name, feature in self.features.items() if feature["state"] == "live")


_lock = threading.RLock()
_current: RunRecord | None = None
_folder: Path | None = None
_path: Path | None = None
# Checks that patched-in features run. Patched code calls it, and must not import the package that sets it.
_check: Callable[[], None] | None = None
# Decisions that were noted before the run record began.
_early: dict[str, str] = {}
# Reports of features since an engine's uses were last settled.
_said: dict[str, Use] = {}


def role(name: str | None = None, argv: Sequence[str] | None = None) -> str:
    """Return this process's role in vLLM, from its name and command line.

    ``engine-core`` or ``worker``; ``api-server``, which answers clients: the first process of ``vllm serve``, or one of
    several that it has started; ``inspection``, which looks at a model class and ends; ``child``, another child of
    `multiprocessing`; ``parent``, any other first process, such as one that calls ``LLM()``. With
    ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` a ``parent`` is also engine core and worker.
    """
    name = multiprocessing.current_process().name if name is None else name
    argv = sys.orig_argv if argv is None else argv
    if name != _FIRST:
        return next((role for prefix, role in _ROLES.items() if name.startswith(prefix)), "child")
    if any(argument.endswith(("vllm.model_executor.models.registry", "models/registry.py")) for argument in argv):
        return "inspection"
    # Under Ray the command line is Ray's.
    if any(argument.endswith("ray/_private/workers/default_worker.py") for argument in argv):
        return "worker"
    # `vllm serve --headless` only starts engine cores.
    return "api-server" if _SERVER.search("\0".join(argv)) and "--headless" not in argv else "parent"


def starts_engines() -> bool:
    """Whether this is the first process of its engines."""
    return multiprocessing.current_process().name == _FIRST and role() in ("parent", "api-server")


def repeats_another() -> bool:
    """Whether another process of this engine already logs common decisions."""
    return multiprocessing.current_process().name != _FIRST or role() == "inspection"


def pids() -> str:
    """Return the namespace of process ids and the boot id, or "".

    Containers that share a cache folder have processes of equal ids.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def ticks(pid: int) -> int:
    """Return a process's start in clock ticks since boot, or -1.

    No change of the clock moves these ticks. -1 also for a zombie.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        # proc(5): `state` is the third field, `starttime` the 22nd.
        return -1 if state in "ZX" else int(fields[18])
    except (OSError, ValueError, IndexError):
        return -1


def new(plugin_version: str) -> RunRecord:
    return RunRecord(
        pid=os.getpid(),
        ppid=os.getppid(),
        role=role(),
        started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds"),
        argv=[*sys.orig_argv[:1], *(option[0] for option in map(_LONG_OPTION.match, sys.orig_argv) if option)],
        python=sys.version.split()[0],
        plugin_version=plugin_version,
        pids=pids(),
        ticks=ticks(os.getpid()),
    )


def begin(record: RunRecord, base: Path | None) -> None:
    """Make ``record`` this process's, written below ``base`` unless None."""
    global _current, _folder, _path
    with _lock:
        record.decisions = {**_early, **record.decisions}
        _early.clear()
        _current, _folder = record, base / FOLDER if base is not None else None
        _path = _folder / f"{time.time_ns() // 1_000_000:013d}-{record.pid}.json" if _folder else None
        _write()
        _prune()


def begin_off(plugin_version: str) -> RunRecord:
    """Begin a record that the plugin is switched off in this process.

    The log says so in the first process, and in a child of a process in which the plugin is on.
    """
    differs = os.environ.get(gates.FINGERPRINT) is not None
    if starts_engines():
        os.environ.pop(gates.FINGERPRINT, None)
    logger.log(
        logging.INFO if differs or starts_engines() else logging.DEBUG,
        "switched off by VLLM_HWPLUGIN, vLLM runs unpatched",
    )
    record = new(plugin_version)
    record.off = True
    if (vllm := sys.modules.get("vllm")) is not None:
        record.vllm_version = getattr(vllm, "__version__", None)
        record.vllm_root = next((os.path.dirname(folder) for folder in getattr(vllm, "__path__", ())), None)
    base = None
    with contextlib.suppress(HwpluginError):
        base = cachedir.own_folder(writable_only=True)
    begin(record, base)
    return record


def current() -> RunRecord | None:
    return _current


def save() -> None:
    with _lock:
        adopt()
        _write()


def note(key: str, text: str) -> None:
    """Note a decision made at run time, and why; callable any time.

    A repetition costs nothing. ``note(feature, ...)`` also takes back the feature's earlier ``use(feature, ...)``.
    """
    with _lock:
        adopt()
        if _current is None:
            _early[key] = text
        elif _current.decisions.get(key) != text:
            _current.decisions[key] = text
            _write()
        _said.pop(key, None)


def use(feature: str, used: bool, reason: str = "") -> None:
    """Note whether a patched-in feature takes part in this engine.

    Callable at any time: :func:`settle_uses` reads it, and later calls correct the record.
    """
    with _lock:
        adopt()
        report = Use(used=used, reason=reason)
        _said[feature] = report
        if _current is not None and feature in _current.uses and _current.uses[feature] != report:
            _current.uses[feature] = report
            _write()


def check_with(check: Callable[[], None]) -> None:
    """Set the function of :func:`check_live`: it corrects the record, or raises."""
    global _check
    _check = check


def check_live() -> None:
    """Make sure that patched-in features run in this process.

    Raises:
        HwpluginError: a feature does not, and the engine must not run without it, or with half of it.
    """
    if _check is not None:
        _check()


def settle_uses(by_configuration: Mapping[str, Use], engine: int | None = None) -> dict[str, Use]:
    """Note and return which patched-in features the engine just built uses.

    A feature's own report since the last call takes precedence over the engine's configuration; the configuration's
    cause is kept with it.
    """
    with _lock:
        adopt()
        settled = {name: _settled(use, _said.pop(name, None)) for name, use in by_configuration.items()}
        if _current is not None:
            _current.uses.update(settled)
            _current.engine = engine if engine is not None else _current.engine
            _write()
        return settled


def _settled(configured: Use, report: Use | None) -> Use:
    if report is None:
        return configured
    return report if report["used"] else {**configured, **report}


def keep_steps(steps: dict[str, dict[str, int]]) -> None:
    with _lock:
        adopt()
        if _current is not None and _current.steps != steps:
            _current.steps = steps
            _write()


def adopt() -> None:
    """Give a forked child its own record, without its parent's engine.

    `multiprocessing` calls this in its children; after a plain `os.fork` the child's first note does.
    """
    with _lock:
        if _current is None or _current.pid == os.getpid():
            return
        own = new(_current.plugin_version)
        for name in ("pid", "ppid", "role", "started", "argv", "ticks"):
            setattr(_current, name, getattr(own, name))
        _current.uses, _current.steps, _current.engine = {}, {}, None
        _said.clear()
        begin(_current, _folder.parent if _folder else None)


def forget() -> None:
    """Drop this process's record from memory, for tests."""
    global _current, _folder, _path
    with _lock:
        _current = _folder = _path = None
        _early.clear()
        _said.clear()


def read_all(base: Path | None = None, notes: list[str] | None = None, *, pid: int | None = None) -> list[RunRecord]:
    """Read run records, oldest first, from folders that others cannot change.

    Args:
        base: a cache folder; None: every place where this user's cache may lie.
        notes: gets a line for each folder and record that is skipped, with the reason.
        pid: read only records of processes with this id.
    """
    notes = [] if notes is None else notes
    ending = ".json" if pid is None else f"-{pid}.json"
    by_name: dict[str, RunRecord] = {}
    for place in [base] if base is not None else places():
        try:
            folder = trusted_folder(place / FOLDER)
            names = [name for name in os.listdir(folder) if name.endswith(ending)]
        except FileNotFoundError:
            continue
        except (OSError, UntrustedFolder) as error:
            notes.append(f"no run records are read from {place}: {error}")
            continue
        for name in names:
            try:
                record = _load(folder / name)
            except (ValueError, TypeError) as error:
                notes.append(f"the run record {folder / name} is skipped: {error}; remove it")
            else:
                if record is not None:
                    by_name[f"{name} {place}"] = record
    return [record for _, record in sorted(by_name.items())]


def read_latest(process: tuple[str, int]) -> RunRecord | None:
    """Return the newest record of a `RunRecord.process`, or None."""
    return next((record for record in reversed(read_all(pid=process[1])) if record.process == process), None)


def families(records: Sequence[RunRecord]) -> dict[tuple[str, int], list[RunRecord]]:
    """Return each process's family (itself, ancestors, their children), by `process`.

    Ids are reused: the newest process counts, and a parent's record is older than its child's. So `records` must be
    ordered from the oldest, as :func:`read_all` returns them.
    """
    groups: dict[tuple[str, int], list[RunRecord]] = {}
    for record in records:
        members = groups.get((record.pids, record.ppid), [])
        members.append(record)
        groups[record.process] = members
    return groups


def is_running(record: RunRecord) -> bool:
    """Whether a record's process runs on this host, or in this container."""
    # Older plugins wrote no namespace.
    if record.pids not in ("", pids()):
        return False
    # A later process may have the same id.
    return record.ticks >= 0 and ticks(record.pid) == record.ticks


def _write() -> None:
    if _path is None or _current is None:
        return
    # `vars` and one line: a copy or an indented layout would take most of the time of a record.
    data = json.dumps(vars(_current)).encode("utf-8")
    try:
        private_folder(_path.parent)
        write_atomically(_path, data, durable=False)
    except (OSError, UntrustedFolder) as error:
        logger.debug("no run record in %s: %s", _path, error)


def _prune() -> None:
    """Keep the newest records, and for a while records of running processes."""
    # An engine that fails and restarts must not displace the records of an engine that runs on.
    if _folder is None:
        return
    try:
        names = sorted(name for name in os.listdir(_folder) if name.endswith(".json"))
        for number, name in enumerate(names[:-KEPT]):
            if number < len(names) - 4 * KEPT or ticks(_pid(name)) < 0:
                (_folder / name).unlink(missing_ok=True)
    except OSError as error:
        logger.debug("run records in %s not pruned: %s", _folder, error)


def _pid(name: str) -> int:
    """Return the process id in a record's file name, 0 if missing."""
    pid = name.rpartition("-")[2].removesuffix(".json")
    return int(pid) if pid.isdecimal() else 0


def _load(path: Path) -> RunRecord | None:
    """Return a record; None if removed meanwhile or of another format."""
    data = read_private(path)
    if data is None:
        if not os.path.lexists(path):
            return None
        raise ValueError("it is no readable file of this user")
    entry = json.loads(data)
    if not isinstance(entry, dict) or "format" not in entry:
        raise ValueError("it is no run record")
    if entry["format"] != FORMAT:
        return None
    # Another release may have written further fields.
    known = {known.name for known in fields(RunRecord)}
    record = RunRecord(**{name: value for name, value in entry.items() if name in known})
    datetime.datetime.fromisoformat(record.started)
    return record


def _renew_lock() -> None:
    # A thread of the parent may have held the lock, and the child does not have that thread.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)
multiprocessing.util.register_after_fork(sys.modules[__name__], lambda _: adopt())
