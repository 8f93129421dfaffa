# SPDX-License-Identifier: Apache-2.0
"""vLLM engines that have left run records, and the engine to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ..base import run_records
from ..base.errors import HwpluginError
from ..base.features import ENGINE_REPORT
from ..base.run_records import RunRecord, pids

State = Literal["starting", "running", "orphaned", "ended"]

#: Roles that ask for work, and roles that compute.
_FRONTS: Final = ("parent", "api-server")
_COMPUTES: Final = ("engine-core", "worker")
_NAMES: Final[Mapping[str, str]] = {"api-server": "API server", "engine-core": "engine core", "parent": "first process"}


class NoSuchEngine(HwpluginError):
    """No process with this id has left a run record."""


@dataclass(frozen=True, slots=True)
class Engine:
    """vLLM processes that belong together.

    Attributes:
        pid: Id of the first process that has left a record.
        started: Its start, as ISO 8601.
        running: Whether a process runs. Processes that only inspect model classes do not count.
        stands: Whether a process has built an engine. Some processes only read a configuration.
        state: `orphaned`: the processes that ask for work have ended, and the rest runs on.
    """

    pid: int
    started: str
    running: bool
    stands: bool
    state: State


def find_engines(written: Sequence[RunRecord], wanted: int | None) -> tuple[tuple[Engine, ...], tuple[RunRecord, ...]]:
    """Return all recorded engines, and the records of the engine to show.

    Engines are sorted newest first.

    Args:
        written: All records, oldest first.
        wanted: Id of a process of the engine to show; None: the newest running engine, else the newest.

    Raises:
        NoSuchEngine: That process has left no record.
    """
    families = {_engine(members): tuple(members) for members in reversed(run_records.families(written).values())}
    if wanted is not None:
        matching = [members for members in families.values() if any(member.pid == wanted for member in members)]
        if matching:
            # Processes of another container may have the same ids.
            here = [members for members in matching if any(member.process == (pids(), wanted) for member in members)]
            return tuple(families), (here or matching)[0]
        known = ", ".join(str(engine.pid) for engine in families if engine.stands)
        raise NoSuchEngine(f"process {wanted} has left no run record; engines with a run record: {known or 'none'}")

    def rank(engine: Engine) -> tuple[bool, bool, bool]:
        # A starting server ranks before an ended engine; a running script does not.
        serves = engine.stands or families[engine][0].role == "api-server"
        return engine.running and serves, engine.stands, engine.running

    shown = max(families, key=rank, default=None)
    return tuple(families), () if shown is None else families[shown]


def _engine(members: Sequence[RunRecord]) -> Engine:
    first = members[0]
    stands = any(member.uses or member.role in _COMPUTES for member in members)
    state = _state(members, stands)
    return Engine(first.pid, first.started, state != "ended", stands, state)


def _state(members: Sequence[RunRecord], stands: bool) -> State:
    alive = [member for member in members if member.role != "inspection" and run_records.is_running(member)]
    if not alive:
        return "ended"
    if orphans(members):
        return "orphaned"
    # The workers report once the engine is built.
    reports = any(ENGINE_REPORT in member.live for member in members)
    built = any(member.uses for member in members) if reports else stands
    return "running" if built else "starting"


def orphans(members: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the computing processes that outlived all processes that ask for work."""
    fronts = [member for member in members if member.role in _FRONTS]
    # An engine on several hosts, or under Ray, may have no such process here.
    if not fronts or any(map(run_records.is_running, fronts)):
        return []
    return [member for member in members if member.role in _COMPUTES and run_records.is_running(member)]


def name_of(process: RunRecord) -> str:
    """Return a process's role and id, such as "engine core 4711"."""
    return f"{_NAMES.get(process.role, process.role)} {process.pid}"


def warn_of_orphans(processes: Sequence[RunRecord]) -> list[str]:
    """Return a warning if processes of the engine are orphans, else nothing."""
    left = orphans(processes)
    if not left:
        return []
    ended = ", ".join(name_of(process) for process in processes if process.role in _FRONTS)
    run = f"{', '.join(map(name_of, left))} still run{'s' * (len(left) == 1)}"
    pids_left = " ".join(str(process.pid) for process in left)
    return [f"{ended} ended; {run} (orphans) and may hold the device's memory: kill {pids_left}"]


def fingerprints_differ(processes: Sequence[RunRecord]) -> list[str]:
    """Return a warning if processes of the engine run different patches."""
    by_fingerprint: dict[str, list[str]] = {}
    for process in processes:
        by_fingerprint.setdefault(process.fingerprint, []).append(name_of(process))
    if len(by_fingerprint) < 2:
        return []
    parts = "; ".join(f"{fingerprint} in {', '.join(names)}" for fingerprint, names in by_fingerprint.items())
    return [
        f"the engine's processes have different patches (fingerprint {parts}): restart the engine, and change no "
        "patch or variable during the start"
    ]
