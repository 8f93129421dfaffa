# SPDX-License-Identifier: Apache-2.0
"""The run records of vLLM's processes, and which processes belong together."""

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
from .journal import FOLDER, FORMAT, RunRecord, pids, ticks


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
    kinds = get_type_hints(RunRecord)
    entry = {name: value for name, value in entry.items() if name in kinds}
    for name, value in entry.items():
        if not _is_a(value, kinds[name]):
            raise TypeError(f"its {name} is {reprlib.repr(value)}, expected {formatannotation(kinds[name])}")
    record = RunRecord(**entry)
    datetime.datetime.fromisoformat(record.started)
    return record


def _is_a(value: Any, kind: Any) -> bool:
    if is_typeddict(kind):
        kinds = get_type_hints(kind)
        required: frozenset[str] = getattr(kind, "__required_keys__")  # noqa: B009
        return isinstance(value, dict) and all(
            _is_a(value.get(name), part) for name, part in kinds.items() if name in value or name in required
        )
    origin, of = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_is_a(value, part) for part in of)
    if origin is list:
        return isinstance(value, list) and all(_is_a(element, of[0]) for element in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is_a(element, of[1]) for element in value.values())
    return isinstance(value, kind)
