# SPDX-License-Identifier: Apache-2.0
"""What the plugin did in each process, as one JSON file a process.

vLLM runs a parent, an engine core, workers and short-lived inspection processes, and a log line in one of them says
nothing about the others. Each writes ``<cache>/records/<start in ms>-<pid>.json``; ``vllm-hwplugin doctor`` shows them.
A journal is information for people: if it cannot be written, vLLM runs on without it.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from . import gates
from .cachedir import UntrustedFolder, places, private_folder, writable, write_atomically
from .errors import HwpluginError

logger = logging.getLogger("vllm.hwplugin")

FORMAT = 1
KEPT = 256
FOLDER = "records"

_LONG_OPTION = re.compile("--[A-Za-z][A-Za-z0-9_-]*")

# The name of a process that `multiprocessing` has not started, and what begins the names that vLLM gives to the others.
_FIRST = "MainProcess"
_ROLES = {
    "EngineCore": "engine-core",
    "DPEngineCore": "engine-core",
    "VllmWorker": "worker",
    "Worker": "worker",
    "ApiServer": "api-server",
    "APIServer": "api-server",
}
# `vllm serve`, `python -m vllm.entrypoints.cli.main serve`, `python -m vllm.entrypoints.openai.api_server`, over the
# arguments joined by zeros.
_SERVER = re.compile(
    r"(^|\0|/)(vllm|vllm\.entrypoints\.cli\.main)\0serve(\0|$)|vllm[./]entrypoints[./]\w+[./]api_server"
)


class _Said(TypedDict):
    used: bool
    reason: str


class Use(_Said, total=False):
    """Whether an engine uses a feature that is patched in, and why not.

    `cause`, `wants` and `cure` are there where the engine's configuration gives the reason; see
    :class:`vllm_hwplugin.spec_decode.engine_report.Unused`.
    """

    cause: str
    wants: str
    cure: str


@dataclass
class Journal:
    """The state of the plugin in one process.

    Attributes:
        pids: where a process's id is its own, see :func:`pids`; empty in a journal of an older plugin.
        ticks: when the process began, see :func:`ticks`; -1 in a journal of an older plugin.
        role: see :func:`role`.
        argv: the interpreter and the names of long options, without any value: journals go into bug reports.
        features: feature id -> ``{"state": ..., "reason": ...}`` with the states of the plan.
        modules: patched module -> ``pending`` (not imported yet), ``served`` (from its copy), ``re-applied`` (was
            imported before the plugin and got new code in place).
        uses: live feature -> whether the engine of this process uses it; empty where the process built no engine, and
            without the features that work in another process of the engine.
        decisions: what code of the plugin decided at run time, by key; see :func:`note`.
        engine: index of vLLM's engine, where this process's `steps` are that engine's; None in the other ones.
        steps: fast path (a feature and a part of a step) -> outcome -> how many steps of the engine had it.
        error: one line, where the plugin could not do its work at all.
        off: ``VLLM_HWPLUGIN=0``: the plugin did nothing here. `features` and `modules` are empty, vLLM's version and
            root are those of the vLLM that the process had imported, or None, and `vllm_dist` is None.
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
        """What no other process that runs has, in whatever container."""
        return self.pids, self.pid

    @property
    def live(self) -> tuple[str, ...]:
        return tuple(name for name, feature in self.features.items() if feature["state"] == "live")


_lock = threading.RLock()
_current: Journal | None = None
_folder: Path | None = None
_path: Path | None = None
# Looks whether what is live runs; what is patched in asks for it, and must not know who answers.
_check: Callable[[], None] | None = None
# Decisions that were noted before the plugin began its journal.
_early: dict[str, str] = {}
# What features said of themselves since an engine's uses were last settled.
_said: dict[str, Use] = {}


def role(name: str | None = None, argv: Sequence[str] | None = None) -> str:
    """Return what this process is for vLLM, as far as its name and command line tell.

    Returns:
        ``engine-core`` or ``worker``; ``api-server``: it answers clients, as the first process of ``vllm serve`` does,
        or one of several that it has started; ``inspection``: it looks at a model class and ends; ``child``: another
        child of `multiprocessing`; ``parent``: any other first process, such as one that calls ``LLM()``. The worker's
        command line under Ray is Ray's own. With ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` a ``parent`` is also engine core
        and worker.
    """
    name = multiprocessing.current_process().name if name is None else name
    argv = sys.orig_argv if argv is None else argv
    if name != _FIRST:
        return next((found for prefix, found in _ROLES.items() if name.startswith(prefix)), "child")
    if any(argument.endswith(("vllm.model_executor.models.registry", "models/registry.py")) for argument in argv):
        return "inspection"
    if any(argument.endswith("ray/_private/workers/default_worker.py") for argument in argv):
        return "worker"
    # Without an API server of its own, `vllm serve --headless` only starts engine cores.
    return "api-server" if _SERVER.search("\0".join(argv)) and "--headless" not in argv else "parent"


def starts_engines() -> bool:
    """Whether no process of vLLM has started this one: it is the first process of its engines."""
    return multiprocessing.current_process().name == _FIRST and role() in ("parent", "api-server")


def repeats_another() -> bool:
    """Whether another process of this engine on this host has said what both decide alike when they start."""
    return multiprocessing.current_process().name != _FIRST or role() == "inspection"


def pids() -> str:
    """This process's namespace of process ids, and the boot of its kernel: containers that share a cache folder have
    processes of the same ids. Empty where the system does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def ticks(pid: int) -> int:
    """When a process began, in the kernel's clock ticks since boot, which no change of the clock moves.

    -1 where there is no such process, or one that has ended and is still listed.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        # proc(5): `state` is the third field, `starttime` the 22nd.
        return -1 if state in "ZX" else int(fields[18])
    except (OSError, ValueError, IndexError):
        return -1


def new(plugin_version: str) -> Journal:
    """A journal of this process that says nothing yet about vLLM."""
    return Journal(
        pid=os.getpid(),
        ppid=os.getppid(),
        role=role(),
        started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds"),
        argv=[*sys.orig_argv[:1], *(found[0] for found in map(_LONG_OPTION.match, sys.orig_argv) if found)],
        python=sys.version.split()[0],
        plugin_version=plugin_version,
        pids=pids(),
        ticks=ticks(os.getpid()),
    )


def begin(journal: Journal, base: Path | None) -> None:
    """Make ``journal`` this process's own and write it below the cache folder ``base`` (None: keep it in memory)."""
    global _current, _folder, _path
    with _lock:
        journal.decisions = {**_early, **journal.decisions}
        _early.clear()
        _current, _folder = journal, base / FOLDER if base is not None else None
        _path = _folder / f"{time.time_ns() // 1_000_000:013d}-{journal.pid}.json" if _folder else None
        _write()
        _prune()


def begin_off(plugin_version: str) -> Journal:
    """Begin a journal that says that the plugin is switched off in this process, so that ``doctor`` confirms it.

    The log says it once: in the first process, and in a child of one in which the plugin is on.
    """
    differs = os.environ.get(gates.FINGERPRINT) is not None
    if starts_engines():
        os.environ.pop(gates.FINGERPRINT, None)
    logger.log(
        logging.INFO if differs or starts_engines() else logging.DEBUG,
        "switched off by VLLM_HWPLUGIN, vLLM runs unpatched",
    )
    journal = new(plugin_version)
    journal.off = True
    if (vllm := sys.modules.get("vllm")) is not None:
        journal.vllm_version = getattr(vllm, "__version__", None)
        journal.vllm_root = next((os.path.dirname(folder) for folder in getattr(vllm, "__path__", ())), None)
    begin(journal, _first_writable())
    return journal


def _first_writable() -> Path | None:
    try:
        for place in places():
            with contextlib.suppress(OSError, UntrustedFolder):
                if writable(folder := private_folder(place)):
                    return folder
    except HwpluginError as error:
        logger.debug("no process journal: %s", error)
    return None


def current() -> Journal | None:
    """This process's journal, if it has begun one."""
    return _current


def save() -> None:
    """Write this process's journal again, after a change to it. Without a journal nothing happens."""
    with _lock:
        adopt()
        _write()


def note(key: str, text: str) -> None:
    """Note a decision that was made at run time, such as which call a feature chose and why.

    Callable from any code of the plugin at any time, also before the journal has begun; saying the same again costs
    nothing. ``note(feature, ...)``, under a feature's own id, also takes back its earlier ``use(feature, ...)``.
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
    """Note that a live feature takes part in this engine, or that it found out that it cannot.

    Callable at any time: while the engine is built it is kept for :func:`settle_uses`, and it corrects what that has
    written. What is said last holds.

    Args:
        feature: its id.
        used: whether it takes part.
        reason: why not.
    """
    with _lock:
        adopt()
        said = Use(used=used, reason=reason)
        _said[feature] = said
        if _current is not None and feature in _current.uses and _current.uses[feature] != said:
            _current.uses[feature] = said
            _write()


def check_with(check: Callable[[], None]) -> None:
    """Have `check` called by :func:`check_live`; it corrects the journal, or raises."""
    global _check
    _check = check


def check_live() -> None:
    """Make sure that what the journal calls live runs in this process, whose part of an engine stands by now.

    Raises:
        HwpluginError: a feature does not, and the engine must not run without it, or with half of it.
    """
    if _check is not None:
        _check()


def settle_uses(by_configuration: Mapping[str, Use], engine: int | None = None) -> dict[str, Use]:
    """Note which live features the engine uses that this process has just built.

    What a feature said of itself since the last call takes precedence; the cause in the configuration stays with it.

    Args:
        by_configuration: feature -> what the engine's configuration says.
        engine: see :class:`Journal`.

    Returns:
        What is in the journal now for those features.
    """
    with _lock:
        adopt()
        settled = {name: _settled(item, _said.pop(name, None)) for name, item in by_configuration.items()}
        if _current is not None:
            _current.uses.update(settled)
            _current.engine = engine if engine is not None else _current.engine
            _write()
        return settled


def _settled(configured: Use, said: Use | None) -> Use:
    if said is None:
        return configured
    return said if said["used"] else {**configured, **said}


def keep_steps(steps: dict[str, dict[str, int]]) -> None:
    """Note how many steps each fast path has served; see :class:`Journal`."""
    with _lock:
        adopt()
        if _current is not None and _current.steps != steps:
            _current.steps = steps
            _write()


def adopt() -> None:
    """Give a forked child a journal of its own, with what its parent's said of the plugin, but not of an engine.

    `multiprocessing` runs this in its children; one of a plain `os.fork` gets here with the first that it has to say.
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
    """Drop this process's journal from memory (its file stays). For tests."""
    global _current, _folder, _path
    with _lock:
        _current = _folder = _path = None
        _early.clear()
        _said.clear()


def _write() -> None:
    if _path is None or _current is None:
        return
    # `vars`, and on one line: copying it first, or laying it out, would take most of the time that a journal costs.
    data = json.dumps(vars(_current)).encode("utf-8")
    try:
        private_folder(_path.parent)
        write_atomically(_path, data, durable=False)
    except (OSError, UntrustedFolder) as error:
        logger.debug("no process journal in %s: %s", _path, error)


def _prune() -> None:
    """Keep the newest journals, and for some time those of processes that may run; names begin with the start's time.

    An engine that starts and fails again and again shall not take those of another one that serves.
    """
    if _folder is None:
        return
    try:
        names = sorted(name for name in os.listdir(_folder) if name.endswith(".json"))
        for number, name in enumerate(names[:-KEPT]):
            if number < len(names) - 4 * KEPT or ticks(_pid(name)) < 0:
                (_folder / name).unlink(missing_ok=True)
    except OSError as error:
        logger.debug("journals in %s not pruned: %s", _folder, error)


def _pid(name: str) -> int:
    """Of a journal's file; 0 where it is named otherwise."""
    pid = name.rpartition("-")[2].removesuffix(".json")
    return int(pid) if pid.isdecimal() else 0


def _renew_lock() -> None:
    # Another thread of the parent may have held it, and that thread is not in the child.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)
multiprocessing.util.register_after_fork(sys.modules[__name__], lambda _: adopt())
