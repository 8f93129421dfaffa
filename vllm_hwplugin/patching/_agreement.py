# SPDX-License-Identifier: Apache-2.0
"""What has to agree after the start: a feature's modules in one process, and the patches of one engine's processes."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Collection, Mapping, Sequence

from .. import gates
from ..journal import Journal
from ._errors import InstallError
from ._model import ModuleCheck, Plan

logger = logging.getLogger("vllm.hwplugin")


def give_up_stock(
    entry: Journal, plan: Plan, checks: Sequence[ModuleCheck], choices: Mapping[str, str], *, strict: bool
) -> None:
    """Count features as refused whose modules were imported past the plugin, by another import hook.

    Args:
        entry: the process's journal; it is corrected.
        checks: of every patched module.
        choices: gate -> ``auto``, ``on`` or ``off``.

    Raises:
        InstallError: a part of such a feature runs patched, or strict mode or its gate demands it.
    """
    stock = {check.module: check.detail for check in checks if check.state == "stock"}
    lost = _features(plan, stock)
    # Requirements come first.
    for name, item in plan.features.items():
        if item.state == "live" and not lost.isdisjoint(item.feature.requires):
            lost.add(name)
    named = [name for name in entry.live if name in lost]
    if not named:
        return
    half = _features(plan, [check.module for check in checks if check.state in ("served", "re-applied")])
    reason = "; ".join(f"{module} was {detail}, past the plugin" for module, detail in stock.items())
    for name in named:
        gate = plan.features[name].feature.gate
        if name in half or strict or choices[gate] == "on":
            what = "only a part of it runs patched" if name in half else f"{gate}=on or {gates.STRICT}=1 demands it"
            raise InstallError(
                f"{name}: {what}: {reason}; put the import hook that did it (sys.meta_path begins with "
                f"{sys.meta_path[:1]}) in place before vLLM loads its plugins, or set {gate}=off"
            )
    entry.modules |= dict.fromkeys(stock, "stock")
    entry.features |= {name: {"state": "refused", "reason": reason} for name in named}
    logger.warning("%s: not live, vLLM runs stock there: %s", ", ".join(named), reason)


def _features(plan: Plan, modules: Collection[str]) -> set[str]:
    return {name for file in plan.files.values() if file.module in modules for name in file.features}


def compare_with_first(entry: Journal, asked: object, environ: Mapping[str, str], *, stop: bool) -> None:
    """Say, or refuse, that the processes of an engine have different patches in force: they compute one model together.

    The first process leaves its fingerprint in the environment for its children.

    Args:
        entry: the process's journal; it gets a note.
        asked: what it decided by. Where the first process had something else, they are meant to differ.
        stop: refuse it.

    Raises:
        InstallError: with `stop`.
    """
    digest = hashlib.sha256(repr(asked).encode()).hexdigest()[:20]
    first, _, first_asked = environ.get(gates.FINGERPRINT, "").partition(" ")
    if entry.role == "parent" or first_asked != digest:
        if environ is os.environ:
            os.environ[gates.FINGERPRINT] = f"{entry.fingerprint} {digest}"
    elif first != entry.fingerprint:
        text = (
            f"this process ({entry.role}) has other patches in force (fingerprint {entry.fingerprint}) than the first "
            f"one of its engine ({first}): a catalogue, vLLM or the plugin was changed in between, or is another one "
            "on this host; make them the same and start the engine again"
        )
        if stop:
            raise InstallError(text)
        entry.notes.append(text)
        logger.warning("%s", text)
