# SPDX-License-Identifier: Apache-2.0
"""What has to agree after the start: a feature's modules in one process, and the patches of one engine's processes."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Collection, Mapping

from .. import gates
from ..journal import Journal
from ._errors import InstallError
from ._model import Plan

logger = logging.getLogger("vllm.hwplugin")


def features_in(plan: Plan, modules: Collection[str]) -> set[str]:
    """The features that change one of these modules."""
    return {name for file in plan.files.values() if file.module in modules for name in file.features}


def lost_with(plan: Plan, stock: Collection[str]) -> set[str]:
    """The features that cannot be live where these modules run stock: those in them, and those that require these."""
    lost = features_in(plan, stock)
    # Requirements come first.
    for name, item in plan.features.items():
        if not lost.isdisjoint(item.feature.requires):
            lost.add(name)
    return lost


def give_up(
    entry: Journal,
    plan: Plan,
    stock: Mapping[str, str],
    patched: Collection[str],
    choices: Mapping[str, str],
    *,
    strict: bool,
) -> None:
    """Count features as refused whose modules were imported past the plugin, and stay stock.

    Args:
        entry: the process's journal; it is corrected.
        stock: the modules, and why they are stock.
        patched: those that run from their copies, or will.
        choices: gate -> ``auto``, ``on`` or ``off``.

    Raises:
        InstallError: a part of such a feature runs patched, or strict mode or its gate demands it.
    """
    lost = lost_with(plan, stock)
    named = [name for name in entry.live if name in lost]
    if not named:
        return
    half = features_in(plan, patched)
    reason = "; ".join(stock.values())
    for name in named:
        gate = plan.features[name].feature.gate
        if name in half or strict or choices[gate] == "on":
            what = "only a part of it runs patched" if name in half else f"{gate}=on or {gates.STRICT}=1 demands it"
            gates_off = " ".join(dict.fromkeys(f"{plan.features[one].feature.gate}=off" for one in named))
            raise InstallError(
                f"{name}: {what}: {reason}; put the import hook that did it (sys.meta_path begins with "
                f"{sys.meta_path[:1]}) in place before vLLM loads its plugins, or set {gates_off}"
            )
    # From here on the journal does not count them as live, so this is said once in a process.
    entry.modules |= dict.fromkeys(stock, "stock")
    entry.features |= {name: {"state": "refused", "reason": reason} for name in named}
    logger.warning("%s: not live, vLLM runs stock there: %s", ", ".join(named), reason)


def compare_with_first(entry: Journal, asked: object, environ: Mapping[str, str], *, stop: bool) -> bool:
    """Say, or refuse, that the processes of an engine have different patches in force: they compute one model together.

    The first process leaves its fingerprint in the environment for its children.

    Args:
        entry: the process's journal; it gets a note.
        asked: what it decided by. Where the first process had something else, they are meant to differ.
        stop: refuse it.

    Returns:
        Whether the first process has the same in force, so that it has said all there is to say.

    Raises:
        InstallError: with `stop`.
    """
    digest = hashlib.sha256(repr(asked).encode()).hexdigest()[:20]
    first, _, first_asked = environ.get(gates.FINGERPRINT, "").partition(" ")
    if entry.role == "parent" or first_asked != digest:
        if environ is os.environ:
            os.environ[gates.FINGERPRINT] = f"{entry.fingerprint} {digest}"
        return False
    if first != entry.fingerprint:
        text = (
            f"this process ({entry.role}) has other patches in force (fingerprint {entry.fingerprint}) than the first "
            f"one of its engine ({first}): a catalogue, vLLM or the plugin was changed in between, or is another one "
            "on this host; make them the same and start the engine again"
        )
        if stop:
            raise InstallError(text)
        entry.notes.append(text)
        logger.warning("%s", text)
    return first == entry.fingerprint
