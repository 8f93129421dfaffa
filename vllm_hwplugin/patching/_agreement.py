# SPDX-License-Identifier: Apache-2.0
"""Comparison of the patches of one engine's processes."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from typing import Final

from ..base import gates
from ..base.run_records import RunRecord, starts_engines
from ._errors import InstallError

logger = logging.getLogger("vllm.hwplugin")

# Prefixes of the plugin's variables and of their older names.
_PREFIXES: Final = (gates.PREFIX, "VLLM_MUSA_", "VLLM_NWOR_")
# Variables that choose no patch.
_NO_CHOICE: Final = frozenset(
    {name for gate in gates.GATES if "patches" not in gate.affects for name in gate.variables} | {gates.FINGERPRINT}
)


def compare_with_first(entry: RunRecord, environ: Mapping[str, str], *, stop: bool) -> bool:
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
