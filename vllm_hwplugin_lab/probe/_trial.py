# SPDX-License-Identifier: Apache-2.0
"""A trial on a backend: run its cases and combine the results."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from ._cases import Case, Trial, draw
from ._refusals import Refused
from ._session import Behaviour, Declared, one_line

if TYPE_CHECKING:
    from ._host import LayerHost

#: Multiplies the allowed factor, by dtype: a backend's exp is often a polynomial exact to some ulps of float32, which
#: only float32 results show.
SLACK: Final = {"float32": 2.0}


def try_out(
    host: LayerHost, trial: Trial, *, seed: int, count: int, factor: float, on_case: Callable[[Case, Declared], None]
) -> dict[str, Any]:
    """Run a trial's cases on a backend.

    Args:
        factor: Allowed error in units of SDPA's error; multiplied by `SLACK`.
        on_case: Called before each case, which may end the process.

    Returns:
        A result without its verdict: declared, behaviour, cases, shape and detail of the worst case, the worst ratio.

    Raises:
        Exception: The device is unusable after a case, or asking the class for its declaration fails.
    """
    outcomes: list[tuple[Behaviour, float, Case, str]] = []
    cases = draw(trial, host.plain, seed, count)
    declared = host.declared(trial, cases[0])
    for case in cases:
        on_case(case, declared)
        try:
            measure = host.run(case)
        except Exception as error:
            # An exception does not harm the device; a kernel's error raises again here, and ends this process.
            host.check()
            if isinstance(error, Refused):
                outcomes.append(("refuses", 0.0, case, str(error)))
            else:
                at = traceback.extract_tb(error.__traceback__)[-1]
                where = f"({Path(at.filename).name}:{at.lineno} in {at.name})"
                outcomes.append(("error", 0.0, case, f"{one_line(error)} {where}"))
        else:
            works = measure.ratio <= factor * SLACK.get(case.dtype, 1.0)
            outcomes.append(("works" if works else "wrong", measure.ratio, case, str(measure)))
    # The worst case decides: a partial refusal is a refusal.
    behaviour, _, case, detail = max(outcomes, key=lambda outcome: (get_args(Behaviour).index(outcome[0]), outcome[1]))
    ratio = max((ratio for result, ratio, *_ in outcomes if result in ("works", "wrong")), default=math.inf)
    return {
        "declared": declared,
        "behaviour": behaviour,
        "cases": len(outcomes),
        "shape": str(case),
        "detail": detail,
        "ratio": ratio if math.isfinite(ratio) else None,  # infinity has no JSON
    }
