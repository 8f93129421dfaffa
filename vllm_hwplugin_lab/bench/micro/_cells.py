# SPDX-License-Identifier: Apache-2.0
"""A cell of a table: one kernel on one case, and what can become of it."""

from __future__ import annotations

from typing import Any

#: (kernel, key of the case)
Cell = tuple[str, str]

MEASURED = "measured"
#: The kernel is not on this host.
MISSING = "missing"
#: It does not claim to run the case.
REFUSED = "refused"
#: It raised an exception.
FAILED = "failed"
#: Its process died or hung.
CRASHED = "crashed"
NOT_RUN = "not run"


def outcome(cell: Cell, status: str, reason: str | None = None, **facts: Any) -> dict[str, Any]:
    kernel, case = cell
    return {"kernel": kernel, "case": case, "status": status, "reason": reason, **facts}
