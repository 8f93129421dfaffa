# SPDX-License-Identifier: Apache-2.0
"""What has to agree after the start: a feature's modules in one process, and the patches of one engine's processes."""

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

# Of the plugin's variables and of their older names.
_PREFIXES: Final = (gates.PREFIX, "VLLM_MUSA_", "VLLM_NWOR_")
# Those that choose no patch.
_NO_CHOICE: Final = frozenset(
    {name for gate in gates.GATES if "patches" not in gate.affects for name in gate.variables} | {gates.FINGERPRINT}
)


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
    logger.warning("%s: not patched in, vLLM runs unpatched there: %s", ", ".join(named), reason)


def compare_with_first(entry: Journal, environ: Mapping[str, str], *, stop: bool) -> bool:
    """Say, or refuse, that the processes of an engine have different patches in force: they compute one model together.

    The first process leaves in the environment of its children the fingerprint, the plugin's version and a digest of
    the variables that choose patches. A child in which one of these variables is another is meant to differ.

    Args:
        entry: the process's journal; it gets a note.
        stop: refuse it.

    Returns:
        Whether the first process has the same in force, so that it has said all there is to say.

    Raises:
        InstallError: with `stop`.
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
        "is another one on this host; make them the same and start the engine again"
    )
    if stop:
        raise InstallError(text)
    entry.notes.append(text)
    logger.warning("%s", text)
    return False


def _digest(environ: Mapping[str, str]) -> str:
    """Name what the user has set, and no default: which variables catalogues from outside have may change meanwhile."""
    said = sorted(
        (name, value.strip())
        for name, value in environ.items()
        if value.strip() and name.startswith(_PREFIXES) and name not in _NO_CHOICE
    )
    return hashlib.sha256(repr(said).encode("utf-8", "surrogateescape")).hexdigest()[:20]
