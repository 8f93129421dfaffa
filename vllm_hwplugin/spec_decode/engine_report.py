# SPDX-License-Identifier: Apache-2.0
"""What this process's part of an engine does with the live features: one log line, and the process journal.

A feature is live when its patches are in force. Whether the engine ever calls the patched code depends on its
configuration, which is final only when the engine stands.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_hwplugin import journal
from vllm_hwplugin.fallback import refuse_if_required
from vllm_hwplugin.journal import Journal, Use

logger = logging.getLogger("vllm.hwplugin")


@dataclass(frozen=True)
class Findings:
    """What a part of an engine is.

    Attributes:
        described: the part and what decides about it, for the log.
        uses: whether it uses each live feature that works in it, as far as its configuration says.
        demanded: the features that this part has to use where their gate says `on`. Features that mend a fault are not
            among them: an engine that does not use them does not have the fault.
        engine: index of the engine whose steps this part counts; None where another part of it does.
    """

    described: str
    uses: Mapping[str, Use]
    demanded: Collection[str] = ()
    engine: int | None = None


def report(part: Any, examine: Callable[[Any, Journal], Findings]) -> None:
    """Put in the journal and in the log what a part of the engine uses. Without a journal nothing happens.

    Args:
        part: vLLM's worker or scheduler.
        examine: looks at it.

    Raises:
        FeatureRequired: a gate says `on`, and the feature is not used.
        HwpluginError: a module of a feature was imported past the plugin; see :func:`vllm_hwplugin.journal.check_live`.
    """
    entry = journal.current()
    if entry is None:
        return
    journal.check_live()
    try:
        found = examine(part, entry)
    except Exception:
        # Only a report is lost, and the engine serves without it: a vLLM may keep elsewhere what was looked for here.
        logger.warning("vllm-hwplugin cannot say which features this %s uses", type(part).__name__, exc_info=True)
        return
    settled = journal.settle_uses(found.uses, found.engine)
    logger.info("vllm-hwplugin: %s %s", found.described, sentence(settled))
    for feature in found.demanded:
        if feature in settled and not settled[feature]["used"]:
            refuse_if_required(feature, settled[feature]["reason"])


def use_of(reasons: Mapping[str, object]) -> Use:
    """A feature is used unless one of these reasons holds, the first of which is said."""
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    return Use(used=reason is None, reason=reason or "")


def sentence(uses: Mapping[str, Use]) -> str:
    """`uses` in one line: what is used, then the others with their reasons, equal reasons once."""
    used = [name for name, use in uses.items() if use["used"]]
    unused: dict[str, list[str]] = {}
    for name, use in uses.items():
        if not use["used"]:
            unused.setdefault(use["reason"], []).append(name)
    parts = [f"uses {', '.join(used) or 'no feature'}"]
    parts += [f"not {', '.join(names)} ({reason})" for reason, names in unused.items()]
    return "; ".join(parts)
