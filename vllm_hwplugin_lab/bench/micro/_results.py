# SPDX-License-Identifier: Apache-2.0
"""The results file of ``bench attention`` and ``bench ops``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .._host import Host
from .._results import provenance

FORMAT = 1


def make_results(
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
        **provenance(),
        "host": dataclasses.asdict(host),
        "settings": dict(settings),
        "processes": list(processes),
        "cells": list(outcomes),
    }
