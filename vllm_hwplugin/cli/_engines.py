# SPDX-License-Identifier: Apache-2.0
"""Engines of vLLM that have left run records: their processes, which of these run, and which engine to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from .. import journals
from ..errors import HwpluginError
from ..features import ENGINE_REPORT
from ..journal import Journal, pids

State = Literal["starting", "running", "orphaned", "ended"]

#: What serves requests or asks for them, and what computes.
_FRONTS: Final = ("parent", "api-server")
_COMPUTES: Final = ("engine-core", "worker")
_NAMES: Final[Mapping[str, str]] = {"api-server": "API server", "engine-core": "engine core", "parent": "first process"}


class NoSuchEngine(HwpluginError):
    """No process of this id has left a run record."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Processes of vLLM that belong together.

    Attributes:
        pid: of the first that has left a record.
        started: its start, as ISO 8601.
        running: whether one of them runs; those that only inspect model classes do not count.
        stands: whether an engine was built in one of them; some only look at a configuration.
        state: `orphaned` where the processes that ask for work have ended and the others run on.
    """

    pid: int
    started: str
    running: bool
    stands: bool
    state: State


def find_engines(written: Sequence[Journal], wanted: int | None) -> tuple[tuple[Engine, ...], tuple[Journal, ...]]:
    """Return all engines that have left records, newest first, and the records of the engine to show.

    Args:
        written: all records, oldest first.
        wanted: id of one of its processes; None: the newest engine that runs, else the newest.

    Raises:
        NoSuchEngine: that process has left no record.
    """
    families = {_engine(members): tuple(members) for members in reversed(journals.families(written).values())}
    if wanted is not None:
        asked = [members for members in families.values() if any(item.pid == wanted for item in members)]
        if asked:
            # Before one of another container, whose processes may have the same ids.
            here = [members for members in asked if any(item.process == (pids(), wanted) for item in members)]
            return tuple(families), (here or asked)[0]
        others = ", ".join(str(one.pid) for one in families if one.stands)
        raise NoSuchEngine(f"process {wanted} has left no run record; engines that have: {others or 'none'}")

    def rank(engine: Engine) -> tuple[bool, bool, bool]:
        # A server that starts comes before an engine that has ended; a script that runs does not.
        serves = engine.stands or families[engine][0].role == "api-server"
        return engine.running and serves, engine.stands, engine.running

    shown = max(families, key=rank, default=None)
    return tuple(families), () if shown is None else families[shown]


def _engine(members: Sequence[Journal]) -> Engine:
    first = members[0]
    stands = any(item.uses or item.role in _COMPUTES for item in members)
    state = _state(members, stands)
    return Engine(first.pid, first.started, state != "ended", stands, state)


def _state(members: Sequence[Journal], stands: bool) -> State:
    alive = [item for item in members if item.role != "inspection" and journals.is_running(item)]
    if not alive:
        return "ended"
    if orphans(members):
        return "orphaned"
    # The workers report when the engine is built.
    reports = any(ENGINE_REPORT in item.live for item in members)
    built = any(item.uses for item in members) if reports else stands
    return "running" if built else "starting"


def orphans(members: Sequence[Journal]) -> list[Journal]:
    """Return the processes of an engine that compute on though no process that asks for work is left."""
    fronts = [item for item in members if item.role in _FRONTS]
    # Of an engine on several hosts, or under Ray, there are none here.
    if not fronts or any(map(journals.is_running, fronts)):
        return []
    return [item for item in members if item.role in _COMPUTES and journals.is_running(item)]


def name_of(item: Journal) -> str:
    """Return a process's role and id, such as "engine core 4711"."""
    return f"{_NAMES.get(item.role, item.role)} {item.pid}"


def warn_of_orphans(processes: Sequence[Journal]) -> list[str]:
    """Return a line where processes of the engine have outlived the ones that use them."""
    left = orphans(processes)
    if not left:
        return []
    ended = ", ".join(name_of(item) for item in processes if item.role in _FRONTS)
    run = f"{', '.join(map(name_of, left))} still run{'s' * (len(left) == 1)}"
    pids_left = " ".join(str(item.pid) for item in left)
    return [f"{ended} ended; {run} (orphans) and may hold the device's memory: kill {pids_left}"]


def fingerprints_differ(processes: Sequence[Journal]) -> list[str]:
    """Return a line if the processes of an engine, which compute one model together, run different patches."""
    of: dict[str, list[str]] = {}
    for item in processes:
        of.setdefault(item.fingerprint, []).append(name_of(item))
    if len(of) < 2:
        return []
    parts = "; ".join(f"{fingerprint} in {', '.join(names)}" for fingerprint, names in of.items())
    return [
        f"the engine's processes do not have the same patches in force (fingerprint {parts}): start it again, and "
        "change no patch or variable meanwhile"
    ]
