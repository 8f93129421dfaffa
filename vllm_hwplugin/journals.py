# SPDX-License-Identifier: Apache-2.0
"""The journals that processes of vLLM have left, and which of them belong together."""

from __future__ import annotations

import datetime
import json
import logging
import os
import reprlib
import time
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cachedir import UntrustedFolder, places, read_private, trusted_folder
from .journal import FOLDER, FORMAT, SKEW, Journal

logger = logging.getLogger("vllm.hwplugin")


def read_all(base: Path | None = None, notes: list[str] | None = None) -> list[Journal]:
    """All journals that can be read, oldest first.

    Journals are read only from a folder that nobody but this user can have written to. One that says it is from the
    future (the clock was wrong once) is left out: it would stay the newest for ever.

    Args:
        base: a cache folder; by default every place where this user's cache may lie.
        notes: gets a line for each folder and journal that was left out, and why.
    """
    left_out: list[str] = []
    latest = datetime.datetime.now(datetime.timezone.utc) + SKEW
    found: list[tuple[str, Journal]] = []
    for place in [base] if base is not None else places():
        try:
            folder = trusted_folder(place / FOLDER)
            names = [name for name in os.listdir(folder) if name.endswith(".json")]
        except FileNotFoundError:
            continue
        except (OSError, UntrustedFolder) as error:
            left_out.append(f"no process journals are read from {place}: {error}")
            continue
        for name in names:
            try:
                journal = _load(folder / name)
                if _started(journal) > latest:
                    raise ValueError(f"it says it started at {journal.started}, which is still to come")
            except _Unread:
                continue
            except (ValueError, TypeError, RecursionError) as error:
                left_out.append(f"the process journal {folder / name} is left out: {error}; remove it")
                continue
            found.append((name, journal))
    if notes is not None:
        notes += left_out
    elif left_out:
        logger.debug("%s", "; ".join(left_out))
    return [entry for _, entry in sorted(found, key=lambda item: item[0])]


def read_latest(pid: int) -> Journal | None:
    """The newest journal of a process; None where there is none that can be read."""
    found: list[tuple[str, Journal]] = []
    for place in places():
        try:
            folder = trusted_folder(place / FOLDER)
            names = [name for name in os.listdir(folder) if name.endswith(f"-{pid}.json")]
            found += [(name, _load(folder / name)) for name in sorted(names)[-1:]]
        except (OSError, UntrustedFolder, _Unread, ValueError, TypeError, RecursionError):
            continue
    return max(found, key=lambda item: item[0])[1] if found else None


def families(journals: Sequence[Journal]) -> dict[int, list[Journal]]:
    """The processes that belong together, oldest first: with its ancestors' children, each process by its id.

    An id may have been used before: it is the newest process that counts, and a parent is looked for only among
    journals that are older than the child.

    Args:
        journals: oldest first, as :func:`read_all` gives them.
    """
    found: dict[int, list[Journal]] = {}
    for item in journals:
        members = found.get(item.ppid, [])
        members.append(item)
        found[item.pid] = members
    return found


def is_running(journal: Journal) -> bool:
    """Whether the process that left it runs, as far as this host, or this container, has it."""
    try:
        state, *fields = Path(f"/proc/{journal.pid}/stat").read_text().rpartition(")")[2].split()
        since_boot = int(fields[18]) / os.sysconf("SC_CLK_TCK")
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return False
    # A later process may have the same id; a journal is begun after its process.
    began = time.time() - uptime + since_boot
    return state not in "ZX" and began < _started(journal).timestamp() + 1


class _Unread(Exception):
    """A journal that is in order, or gone by now, and not for this release."""


def _load(path: Path) -> Journal:
    data = read_private(path)
    if data is None:
        if not os.path.lexists(path):
            # Pruned by another process in the meantime.
            raise _Unread
        raise ValueError("it is no file of this user that can be read")
    entry = json.loads(data)
    if not isinstance(entry, dict) or "format" not in entry:
        raise ValueError("it is no process journal")
    if entry["format"] != FORMAT:
        raise _Unread
    kinds = typing.get_type_hints(Journal)
    values = {name: value for name, value in entry.items() if name in kinds}
    for name, value in values.items():
        if not _is(value, kinds[name]):
            raise ValueError(f"its {name} is {reprlib.repr(value)}, expected {kinds[name]}")
    for name, state in values.get("features", {}).items():
        if not {"state", "reason"} <= state.keys():
            raise ValueError(f"its feature {name!r} has no state or no reason")
    return Journal(**values)


def _is(value: object, kind: Any) -> bool:
    """Whether a value out of JSON is of the type that an annotation of :class:`Journal` names."""
    if typing.is_typeddict(kind):
        fields = typing.get_type_hints(kind)
        return isinstance(value, dict) and all(name in value and _is(value[name], fields[name]) for name in fields)
    inner = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(_is(value, one) for one in inner)
    if isinstance(value, list):
        return typing.get_origin(kind) is list and all(_is(item, inner[0]) for item in value)
    if isinstance(value, dict):
        return typing.get_origin(kind) is dict and all(_is(item, inner[1]) for item in value.values())
    return type(value) is kind


def _started(journal: Journal) -> datetime.datetime:
    started = datetime.datetime.fromisoformat(journal.started)
    if started.tzinfo is None:
        raise ValueError(f"its start {journal.started} has no time zone")
    return started
