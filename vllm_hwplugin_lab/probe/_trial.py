# SPDX-License-Identifier: Apache-2.0
"""One trial on one backend: its cases in turn, and what they come to."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from ._cases import Case, Plain, Trial, draw
from ._reference import Measure
from ._refusal import Refused, one_line
from ._verdict import Behaviour, Declared, combine

#: On top of the factor, by dtype: a backend's exp is often a polynomial that is right to some ulps of float32, which
#: 16-bit dtypes do not show.
SLACK: Final = {"float32": 2.0}


class BackendHost(Protocol):
    """A backend on a device; `_vllm.LayerHost` is the real one."""

    @property
    def plain(self) -> Plain: ...

    def declared(self, trial: Trial, case: Case) -> Declared: ...

    def run(self, case: Case) -> Measure: ...

    def check(self) -> None: ...


def try_out(
    host: BackendHost, trial: Trial, *, seed: int, count: int, factor: float, on_case: Callable[[Case, Declared], None]
) -> dict[str, Any]:
    """Run a trial's cases.

    Args:
        host: the backend.
        trial: what to try.
        seed: of the cases.
        count: how many cases.
        factor: how many times SDPA's error an answer may be off by; `SLACK` comes on top.
        on_case: called before each case, which may end the process.

    Returns:
        A result without its verdict: declared, behaviour, cases, shape, detail, ratio.

    Raises:
        Exception: the device is unusable after a case, or the class does not say what it declares.
    """
    behaviours: list[Behaviour] = []
    told: dict[Behaviour, tuple[Case, str]] = {}
    worst: float | None = None
    cases = draw(trial, host.plain, seed, count)
    declared = host.declared(trial, cases[0])
    for case in cases:
        on_case(case, declared)
        try:
            found = host.run(case)
        except Exception as error:
            refused = isinstance(error, Refused)
            behaviour = Behaviour.REFUSES if refused else Behaviour.ERROR
            detail = str(error) if refused else f"{one_line(error)} {_origin(error)}"
            # An exception leaves the device as it was; a fault of a kernel shows again here, and ends this process.
            host.check()
        else:
            behaviour = Behaviour.WORKS if found.ratio <= factor * SLACK.get(case.dtype, 1.0) else Behaviour.WRONG
            detail = str(found)
            if worst is None or found.ratio > worst:
                worst = found.ratio
                told[behaviour] = (case, detail)
        behaviours.append(behaviour)
        told.setdefault(behaviour, (case, detail))
    behaviour = combine(behaviours)
    case, detail = told[behaviour]
    return {
        "declared": declared.value,
        "behaviour": behaviour.value,
        "cases": len(behaviours),
        "shape": str(case),
        "detail": detail,
        "ratio": worst,
    }


def _origin(error: Exception) -> str:
    """Where an exception came from: one line of its trace."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"({Path(frame.filename).name}:{frame.lineno} in {frame.name})"
