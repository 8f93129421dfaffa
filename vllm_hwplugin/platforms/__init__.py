# SPDX-License-Identifier: Apache-2.0
"""Which platform class vLLM is offered, and the classes: :mod:`.cuda` for NVIDIA, :mod:`..musa.platform` for Moore
Threads.

vLLM asks for the class while it is being imported itself. So what decides is imported here, and imports neither vLLM
nor torch nor the patch engine. The classes do; vLLM imports one by name once it has chosen it.
"""

from ._offer import CLASSES, GATE, GROUP, KEY, Decision, PlatformError, foresee, must_hold, note_used, offer

__all__ = [
    "CLASSES",
    "GATE",
    "GROUP",
    "KEY",
    "Decision",
    "PlatformError",
    "foresee",
    "must_hold",
    "note_used",
    "offer",
]
