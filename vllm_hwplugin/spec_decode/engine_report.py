# SPDX-License-Identifier: Apache-2.0
"""Report which patched-in features this process's part of an engine uses: one log line, and the run record.

Whether an engine calls the patched code of a feature depends on its configuration, which is final only when the engine
is built.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from vllm_hwplugin.base import log, run_records
from vllm_hwplugin.base.fallback import refuse_if_required
from vllm_hwplugin.base.run_records import RunRecord, Use

logger = logging.getLogger("vllm.hwplugin")

#: The cause of reasons that cost the engine nothing.
UNNEEDED: Final = "this engine does not need them"


class Unused(NamedTuple):
    """Why an engine does not use a feature.

    Attributes:
        text: the whole reason, with `{}` for the result of `holds`.
        holds: whether it is so in this engine, or a function that finds out.
        cause: a fact about the engine that several reasons share; features are shown together by it.
        wants: what the feature is for in place of that fact (a model runner, a drafter), shown in place of its name.
        cure: what to change, if an option of vLLM or a variable changes it.
    """

    text: str
    holds: object = True
    cause: str = ""
    wants: str = ""
    cure: str = ""


NO_SPECULATION: Final = Unused(
    "there is no speculative decoding", cause="there is no speculative decoding", cure="--speculative-config"
)


@dataclass(frozen=True)
class Findings:
    """What a part of an engine is.

    Attributes:
        described: the part and what decides about it, for the log.
        uses: whether it uses each patched-in feature that works in it, as far as its configuration says.
        demanded: the features that this part must use if their switch is `on`. Fixes are not among them: an engine that
            does not use a fix does not have the bug.
        engine: index of the engine whose steps this part counts; None if another part of it does.
    """

    described: str
    uses: Mapping[str, Use]
    demanded: Collection[str] = ()
    engine: int | None = None


def report(part: Any, examine: Callable[[Any, RunRecord], Findings]) -> None:
    """Log and record what a worker or scheduler uses.

    Raises:
        FeatureRequired: a switch is `on`, and the feature is not used.
        HwpluginError: a module of a feature was imported past the plugin; see :func:`.run_records.check_live`.
    """
    entry = run_records.current()
    if entry is None:
        return
    # A Ray worker may get here before vLLM's logging is configured.
    log.give_out()
    run_records.check_live()
    try:
        findings = examine(part, entry)
    except Exception:
        # Only the report is lost: this vLLM may keep elsewhere what was looked for here.
        logger.warning("cannot say which features this %s uses", type(part).__name__, exc_info=True)
        return
    settled = run_records.settle_uses(findings.uses, findings.engine)
    logger.info("%s %s", findings.described, sentence(settled))
    for feature in findings.demanded:
        if feature in settled and not settled[feature]["used"]:
            refuse_if_required(feature, settled[feature]["reason"])


def use_of(reasons: Iterable[Unused]) -> Use:
    """Return the first reason that holds as "unused", or "used"."""
    for reason in reasons:
        if holds := reason.holds() if callable(reason.holds) else reason.holds:
            text = reason.text.format(holds)
            return Use(used=False, reason=text, cause=reason.cause, wants=reason.wants, cure=reason.cure)
    return Use(used=True, reason="")


def sentence(uses: Mapping[str, Use]) -> str:
    """Say in one line which features are used, and why not others."""
    used = [name for name, use in uses.items() if use["used"]]
    return "; ".join(
        [f"uses {', '.join(used) or 'no feature'}", *(f"unused because {line}" for line in unused_by_cause(uses))]
    )


def unused_by_cause(uses: Mapping[str, Use]) -> list[str]:
    """Return a line per cause of unused features, with what to change."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, use in uses.items():
        if not use["used"]:
            cause, cure = use.get("cause") or use["reason"], use.get("cure", "")
            groups.setdefault((cause, cure), []).append((name, use.get("wants", "")))
    # What costs nothing comes last.
    ordered = sorted(groups.items(), key=lambda group: group[0][0] == UNNEEDED)
    return [f"{cause}{f' ({cure})' if cure else ''}: {_members(group)}" for (cause, cure), group in ordered]


def _members(group: Collection[tuple[str, str]]) -> str:
    named = [name for name, wants in group if not wants]
    counts = Counter(wants for _, wants in group if wants)
    first = [named[0] if len(named) == 1 else f"{named[0]} and {len(named) - 1} more"] if named else []
    return ", ".join([*first, *(f"{count} for {wants}" for wants, count in counts.items())])
