# SPDX-License-Identifier: Apache-2.0
"""The results file of ``bench attention`` and ``bench ops``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ... import __version__
from .._host import Host
from .._results import ResultsError, commit, write
from ._cells import MEASURED

__all__ = ["FORMAT", "find", "make", "read", "write"]

FORMAT = 1


def make(
    kind: str,
    host: Host,
    settings: Mapping[str, Any],
    outcomes: Sequence[Mapping[str, Any]],
    processes: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The whole file; ``kind`` is ``attention`` or ``ops``."""
    return {
        "kernels_format": FORMAT,
        "kind": kind,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "plugin": __version__,
        "commit": commit(),
        "host": dataclasses.asdict(host),
        "settings": dict(settings),
        "processes": list(processes),
        "cells": list(outcomes),
    }


def read(path: Path) -> dict[str, Any]:
    """Read a results file.

    Raises:
        ResultsError: not there, not JSON, or another format.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ResultsError(f"{path} is no results file of `bench attention` or `bench ops` ({error})") from None
    found = results.get("kernels_format") if isinstance(results, dict) else type(results).__name__
    if found != FORMAT:
        raise ResultsError(f"{path}: results format {found}, this version reads {FORMAT}; run the benchmark again")
    assert isinstance(results, dict)
    return results


def find(results: Mapping[str, Any], kernel: str, case: str) -> Mapping[str, Any] | None:
    """A cell that was measured, or None."""
    for cell in results["cells"]:
        if (cell["kernel"], cell["case"], cell["status"]) == (kernel, case, MEASURED):
            return dict(cell)
    return None


def bandwidth(results: Mapping[str, Any], cell: Mapping[str, Any]) -> float:
    """The copy bandwidth of the process that measured the cell, bytes a second."""
    return float(results["processes"][cell["process"]]["copy_bandwidth"])
