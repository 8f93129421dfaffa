# SPDX-License-Identifier: Apache-2.0
"""Which engines of vLLM have left journals, and which one somebody who asks for none means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .. import journals
from ..errors import HwpluginError
from ..journal import Journal, pids


class NoSuchEngine(HwpluginError):
    """There is no journal of the process that somebody asked for."""


@dataclass(frozen=True, slots=True)
class Engine:
    """Processes of vLLM that belong together.

    Attributes:
        pid: of the first that has left a journal.
        started: its start, as ISO 8601.
        running: whether one of them runs.
        stands: whether an engine was built in one of them; there are also those that only look at a configuration.
    """

    pid: int
    started: str
    running: bool
    stands: bool


def find_engines(written: Sequence[Journal], wanted: int | None) -> tuple[tuple[Engine, ...], tuple[Journal, ...]]:
    """All that have left journals, the newest first, and the journals of the one that is shown.

    Args:
        written: all journals, oldest first.
        wanted: id of one of its processes; None: the newest engine that runs, else the newest.

    Raises:
        NoSuchEngine: that process has left no journal.
    """
    families = {
        Engine(
            members[0].pid,
            members[0].started,
            any(map(journals.is_running, members)),
            any(item.uses or item.role in ("engine-core", "worker") for item in members),
        ): tuple(members)
        for members in reversed(journals.families(written).values())
    }
    if wanted is not None:
        asked = [members for members in families.values() if any(item.pid == wanted for item in members)]
        if asked:
            # Before one of another container, whose processes may have the same ids.
            here = [members for members in asked if any(item.process == (pids(), wanted) for item in members)]
            return tuple(families), (here or asked)[0]
        others = ", ".join(str(one.pid) for one in families if one.stands)
        raise NoSuchEngine(f"process {wanted} has left no journal; engines that have: {others or 'none'}")
    shown = max(families, key=lambda one: (one.stands, one.running), default=None)
    return tuple(families), () if shown is None else families[shown]


def fingerprints_differ(processes: Sequence[Journal]) -> list[str]:
    """A line if the patches in force differ: the processes of one engine compute one model together."""
    of: dict[str, list[str]] = {}
    for item in processes:
        of.setdefault(item.fingerprint, []).append(f"{item.pid} {item.role}")
    if len(of) < 2:
        return []
    parts = "; ".join(f"{fingerprint} in {', '.join(names)}" for fingerprint, names in of.items())
    return [
        f"the engine's processes do not have the same patches in force (fingerprint {parts}): start it again, and "
        "change no patch or variable meanwhile"
    ]
