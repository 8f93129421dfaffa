# SPDX-License-Identifier: Apache-2.0
"""Checks after the start: a feature's modules in one process, and the patches of one engine's processes."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Collection, Mapping
from typing import Final

from .. import gates
from ..journal import Journal, starts_engines
from ._errors import InstallError
from ._model import Plan

logger = logging.getLogger("vllm.hwplugin")

# Prefixes of the plugin's variables and of their older names.
_PREFIXES: Final = (gates.PREFIX, "VLLM_MUSA_", "VLLM_NWOR_")
# Variables that choose no patch.
_NO_CHOICE: Final = frozenset(
    {name for gate in gates.GATES if "patches" not in gate.affects for name in gate.variables} | {gates.FINGERPRINT}
)


def features_in(plan: Plan, modules: Collection[str]) -> set[str]:
    """Return the features that change any of the modules."""
    return {name for file in plan.files.values() if file.module in modules for name in file.features}


def lost_with(plan: Plan, unpatched: Collection[str]) -> set[str]:
    """Return features of unpatched modules, and features that require them."""
    lost = features_in(plan, unpatched)
    # Requirements come first.
    for name, state in plan.features.items():
        if not lost.isdisjoint(state.feature.requires):
            lost.add(name)
    return lost


def give_up(
    entry: Journal,
    plan: Plan,
    unpatched: Mapping[str, str],
    patched: Collection[str],
    choices: Mapping[str, str],
    *,
    strict: bool,
) -> None:
    """Refuse the features of modules that were imported past the plugin.

    Args:
        unpatched: module -> why.
        patched: modules that run from their copies, or will.

    Raises:
        InstallError: a part of such a feature runs patched, or strict mode or its switch demands the feature.
    """
    lost = lost_with(plan, unpatched)
    named = [name for name in entry.live if name in lost]
    if not named:
        return
    half = features_in(plan, patched)
    reason = "; ".join(unpatched.values())
    for name in named:
        gate = plan.features[name].feature.gate
        if name in half or strict or choices[gate] == "on":
            why = "only a part of it runs patched" if name in half else f"{gate}=on or {gates.STRICT}=1 demands it"
            gates_off = " ".join(dict.fromkeys(f"{plan.features[lost_one].feature.gate}=off" for lost_one in named))
            raise InstallError(
                f"{name}: {why}: {reason}; put the import hook that did it (sys.meta_path begins with "
                f"{sys.meta_path[:1]}) in place before vLLM loads its plugins, or set {gates_off}"
            )
    # The run record does not count them as patched in from here on, so a process logs this once.
    entry.modules |= dict.fromkeys(unpatched, "stock")
    entry.features |= {name: {"state": "refused", "reason": reason} for name in named}
    logger.warning("%s: not patched in, vLLM runs unpatched there: %s", ", ".join(named), reason)


def compare_with_first(entry: Journal, environ: Mapping[str, str], *, stop: bool) -> bool:
    """Return whether the engine's first process has logged the same patches.

    The processes of an engine compute one model together. The first process leaves in the environment of its children
    the fingerprint, the plugin's version and a digest of the variables that choose patches. A child with another digest
    is meant to differ. Otherwise a difference raises an InstallError with `stop`, or is logged and noted in `entry`.
    """
    mine = ["failed" if entry.error else entry.fingerprint, entry.plugin_version, _digest(environ)]
    first = environ.get(gates.FINGERPRINT, "").split()
    if environ is os.environ and (not first or starts_engines()):
        os.environ[gates.FINGERPRINT] = " ".join(mine)
    if starts_engines() or first[-1:] != mine[-1:]:
        return False
    if first == mine:
        return True
    text = (
        f"this process ({entry.role}) runs other patches (fingerprint {' '.join(mine[:-1])}) than the first "
        f"process of its engine ({' '.join(first[:-1])}): a catalogue, vLLM or the plugin was changed in between, or "
        "differs on this host; make them the same and start the engine again"
    )
    if stop:
        raise InstallError(text)
    entry.notes.append(text)
    logger.warning("%s", text)
    return False


def _digest(environ: Mapping[str, str]) -> str:
    """Hash what the user has set."""
    # Without defaults, because the variables that external catalogues have may change meanwhile.
    settings = sorted(
        (name, value.strip())
        for name, value in environ.items()
        if value.strip() and name.startswith(_PREFIXES) and name not in _NO_CHOICE
    )
    return hashlib.sha256(repr(settings).encode("utf-8", "surrogateescape")).hexdigest()[:20]
