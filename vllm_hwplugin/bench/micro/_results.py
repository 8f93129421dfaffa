# SPDX-License-Identifier: Apache-2.0
"""The results file of ``bench attention`` and ``bench ops``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._host import Host
from .._results import ResultsError, provenance
from ._verdict import as_json, verdicts

__all__ = ["FORMAT", "ResultsError", "make", "read"]

FORMAT = 1


def make(
    kind: str,
    host: Host,
    settings: Mapping[str, Any],
    outcomes: Sequence[Mapping[str, Any]],
    processes: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The whole file; ``kind`` is ``attention`` or ``ops``."""
    results: dict[str, Any] = {
        "kernels_format": FORMAT,
        "kind": kind,
        **provenance(),
        "host": dataclasses.asdict(host),
        "settings": dict(settings),
        "processes": list(processes),
        "cells": list(outcomes),
    }
    if kind == "ops":
        results["verdicts"] = as_json(verdicts(results))
    return results


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
