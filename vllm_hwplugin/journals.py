# SPDX-License-Identifier: Apache-2.0
"""The journals that processes of vLLM have left, and which of them belong together."""

from __future__ import annotations

import datetime
import json
import os
import reprlib
from collections.abc import Sequence
from inspect import formatannotation
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints, is_typeddict

from .cachedir import UntrustedFolder, places, read_private, trusted_folder
from .journal import FOLDER, FORMAT, Journal, pids, ticks


def read_all(base: Path | None = None, notes: list[str] | None = None, *, pid: int | None = None) -> list[Journal]:
    """All journals that can be read, oldest first.

    Journals are read only from a folder that nobody but this user can have written to.

    Args:
        base: a cache folder; by default every place where this user's cache may lie.
        notes: gets a line for each folder and journal that was left out, and why.
        pid: only those of a process with this id.
    """
    notes = [] if notes is None else notes
    ending = ".json" if pid is None else f"-{pid}.json"
    found: dict[str, Journal] = {}
    for place in [base] if base is not None else places():
        try:
            folder = trusted_folder(place / FOLDER)
            names = [name for name in os.listdir(folder) if name.endswith(ending)]
        except FileNotFoundError:
            continue
        except (OSError, UntrustedFolder) as error:
            notes.append(f"no process journals are read from {place}: {error}")
            continue
        for name in names:
            try:
                journal = _load(folder / name)
            except (ValueError, TypeError) as error:
                notes.append(f"the process journal {folder / name} is left out: {error}; remove it")
            else:
                if journal is not None:
                    found[f"{name} {place}"] = journal
    return [journal for _, journal in sorted(found.items())]


def read_latest(process: tuple[str, int]) -> Journal | None:
    """The newest journal of a :attr:`Journal.process`; None where there is none that can be read."""
    return next((one for one in reversed(read_all(pid=process[1])) if one.process == process), None)


def families(journals: Sequence[Journal]) -> dict[tuple[str, int], list[Journal]]:
    """The processes that belong together, oldest first: with its ancestors' children, each :attr:`Journal.process`.

    An id may have been used before: it is the newest process that counts, and a parent is looked for only among
    journals that are older than the child.

    Args:
        journals: oldest first, as :func:`read_all` gives them.
    """
    found: dict[tuple[str, int], list[Journal]] = {}
    for item in journals:
        members = found.get((item.pids, item.ppid), [])
        members.append(item)
        found[item.process] = members
    return found


def is_running(journal: Journal) -> bool:
    """Whether the process that left it runs, as far as this host, or this container, has it."""
    # Older plugins left none.
    if journal.pids not in ("", pids()):
        return False
    # A later process may have the same id.
    return journal.ticks >= 0 and ticks(journal.pid) == journal.ticks


def _load(path: Path) -> Journal | None:
    """None of another release, or of one that another process has removed in the meantime.

    Raises:
        ValueError, TypeError: it is no journal.
    """
    data = read_private(path)
    if data is None:
        if not os.path.lexists(path):
            return None
        raise ValueError("it is no file of this user that can be read")
    entry = json.loads(data)
    if not isinstance(entry, dict) or "format" not in entry:
        raise ValueError("it is no process journal")
    if entry["format"] != FORMAT:
        return None
    kinds = get_type_hints(Journal)
    entry = {name: value for name, value in entry.items() if name in kinds}
    for name, value in entry.items():
        if not _is_a(value, kinds[name]):
            raise TypeError(f"its {name} is {reprlib.repr(value)}, expected {formatannotation(kinds[name])}")
    journal = Journal(**entry)
    datetime.datetime.fromisoformat(journal.started)
    return journal


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value from JSON is of a kind that a field of `Journal` has."""
    if is_typeddict(kind):
        kinds = get_type_hints(kind)
        required: frozenset[str] = getattr(kind, "__required_keys__")  # noqa: B009
        return isinstance(value, dict) and all(
            _is_a(value.get(name), one) for name, one in kinds.items() if name in value or name in required
        )
    origin, of = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_is_a(value, one) for one in of)
    if origin is list:
        return isinstance(value, list) and all(_is_a(one, of[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is_a(one, of[1]) for one in value.values())
    return isinstance(value, kind)
