# SPDX-License-Identifier: Apache-2.0
"""Log and note that a patched-in feature does not apply to this engine; refuse the start if its switch is `on`."""

from __future__ import annotations

import logging

from . import gates, run_records
from .errors import HwpluginError
from .features import gate_of

logger = logging.getLogger("vllm.hwplugin")


class FeatureRequired(HwpluginError, RuntimeError):
    """A switch says ``on``, and the configured engine cannot have the feature."""


def refuse_if_required(feature: str, reason: str) -> None:
    """Raise FeatureRequired if the switch of ``feature`` says ``on``."""
    gate = gate_of(feature)
    if gates.demands(gate):
        raise FeatureRequired(
            f"{gate}=on, but {feature} has no effect here: {reason}; set {gate}=auto to run without it"
        )


def report_unused(feature: str, effect: str, reason: str, level: int = logging.INFO) -> None:
    """Log and note that this engine has no use for ``feature``.

    `effect` is what happens instead, for the log and ``vllm-hwplugin doctor``.

    Raises:
        FeatureRequired: the switch says ``on``.
    """
    refuse_if_required(feature, reason)
    run_records.note(feature, f"{effect}: {reason}")
    run_records.use(feature, False, reason)
    logger.log(level, "%s: %s: %s", feature, effect, reason)


def gives_up(feature: str, effect: str, reason: str) -> None:
    """Log and note that ``feature`` is disabled from here on.

    An engine with requests under way calls it, so no switch makes it an error. `effect` is what happens instead.
    """
    run_records.note(feature, f"{effect}: {reason}")
    run_records.use(feature, False, reason)
    logger.warning("%s: from now on %s: %s", feature, effect, reason)


def in_a_line(failure: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0]}" if lines else type(failure).__name__
