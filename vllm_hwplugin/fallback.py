# SPDX-License-Identifier: Apache-2.0
"""Log and journal that a live feature turns out not to apply to this engine; refuse the start if its gate is `on`."""

from __future__ import annotations

import logging

from . import gates, journal
from .errors import HwpluginError
from .features import gate_of

logger = logging.getLogger("vllm.hwplugin")


class FeatureRequired(HwpluginError, RuntimeError):
    """A gate says ``on``, and the engine that was configured cannot have the feature."""


def refuse_if_required(feature: str, reason: str) -> None:
    """End the start of an engine that does not use ``feature``, if the user demands it.

    Raises:
        FeatureRequired: the gate says ``on``.
    """
    gate = gate_of(feature)
    if gates.demands(gate):
        raise FeatureRequired(
            f"{gate}=on, but {feature} has no effect here: {reason}; set {gate}=auto to run without it"
        )


def stays_stock(feature: str, effect: str, reason: str, level: int = logging.INFO) -> None:
    """Put in the journal and in the log that ``feature`` leaves things as they are.

    Whether a patch fits is settled before vLLM is imported; whether the engine has a use for it only shows here.

    Args:
        feature: one of `features`.
        effect: what happens instead, as the log and ``vllm-hwplugin doctor`` say it.
        reason: why.
        level: of the log's line.

    Raises:
        FeatureRequired: the gate says ``on``.
    """
    refuse_if_required(feature, reason)
    journal.note(feature, f"{effect}: {reason}")
    journal.use(feature, False, reason)
    logger.log(level, "%s: %s: %s", feature, effect, reason)


def gives_up(feature: str, effect: str, reason: str) -> None:
    """Put in the journal and in the log that ``feature`` leaves things as they are from now on.

    While an engine serves: requests are under way, so no gate makes this an error.

    Args:
        feature: one of `features`.
        effect: what happens instead.
        reason: why.
    """
    journal.note(feature, f"{effect}: {reason}")
    journal.use(feature, False, reason)
    logger.warning("%s: from now on %s: %s", feature, effect, reason)
