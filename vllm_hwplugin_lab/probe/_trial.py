# SPDX-License-Identifier: Apache-2.0
"""One trial on one backend: its cases in turn, which exceptions are the backend's no, and what all come to."""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import torch

from vllm_hwplugin.errors import HwpluginError

from ._cases import Case, Trial, draw
from ._session import Behaviour, Declared, one_line

if TYPE_CHECKING:
    from ._host import LayerHost

#: On top of the factor, by dtype: a backend's exp is often a polynomial that is right to some ulps of float32, which
#: 16-bit dtypes do not show.
SLACK: Final = {"float32": 2.0}
#: What vLLM's backends, torch and the kernels say no with. A TypeError, a KeyError or an AttributeError is none of
#: them: it is what a wrong call of this vLLM looks like.
_REFUSALS = (NotImplementedError, ValueError, AssertionError, RuntimeError)


class Refused(HwpluginError):
    """A backend does not take a batch; says why, in its own words on one line."""


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Around calls of a backend and of nothing else: what it says no with becomes `Refused`.

    Raises:
        Refused: see there.
    """
    try:
        yield
    except Exception as error:
        # Triton's own derive from none of those: a shape that does not compile or does not fit the device.
        refused = isinstance(error, _REFUSALS) or type(error).__module__.partition(".")[0] == "triton"
        # Memory that ran out says nothing about the backend.
        if not refused or isinstance(error, torch.OutOfMemoryError):
            raise
        raise Refused(one_line(error)) from error


def try_out(
    host: LayerHost, trial: Trial, *, seed: int, count: int, factor: float, on_case: Callable[[Case, Declared], None]
) -> dict[str, Any]:
    """Run a trial's cases on a backend.

    Args:
        factor: how many times SDPA's error an answer may be off by; `SLACK` comes on top.
        on_case: called before each case, which may end the process.

    Returns:
        A result without its verdict: declared, behaviour, cases, shape and detail of the worst case, the worst ratio.

    Raises:
        Exception: the device is unusable after a case, or the class does not say what it declares.
    """
    found: list[tuple[Behaviour, float, Case, str]] = []
    cases = draw(trial, host.plain, seed, count)
    declared = host.declared(trial, cases[0])
    for case in cases:
        on_case(case, declared)
        try:
            measure = host.run(case)
        except Exception as error:
            # An exception leaves the device as it was; a fault of a kernel shows again here, and ends this process.
            host.check()
            if isinstance(error, Refused):
                found.append(("refuses", 0.0, case, str(error)))
            else:
                at = traceback.extract_tb(error.__traceback__)[-1]
                where = f"({Path(at.filename).name}:{at.lineno} in {at.name})"
                found.append(("error", 0.0, case, f"{one_line(error)} {where}"))
        else:
            works = measure.ratio <= factor * SLACK.get(case.dtype, 1.0)
            found.append(("works" if works else "wrong", measure.ratio, case, str(measure)))
    # What is refused in part is not supported.
    behaviour, _, case, detail = max(found, key=lambda one: (get_args(Behaviour).index(one[0]), one[1]))
    ratio = max((ratio for one, ratio, *_ in found if one in ("works", "wrong")), default=math.inf)
    return {
        "declared": declared,
        "behaviour": behaviour,
        "cases": len(found),
        "shape": str(case),
        "detail": detail,
        "ratio": ratio if math.isfinite(ratio) else None,  # infinity has no JSON
    }
