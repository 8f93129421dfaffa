# SPDX-License-Identifier: Apache-2.0
"""Errors of the patch engine. Each message says in one line what, where, found, expected, and the way out."""

from __future__ import annotations

from typing import Final

from ..base.errors import HwpluginError

#: What `compile` raises for a text that is no Python, or that is too large for its parser.
NOT_COMPILED: Final = (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError)


class PatchingError(HwpluginError):
    """Base of the engine's errors."""


class CatalogueError(PatchingError):
    """A folder of patches, or a `patch.toml` in it, is invalid."""


class UnreadableFile(PatchingError):
    """A file of vLLM cannot be read as text, or is not what Python imports, so no hunk can be checked."""


class NotPython(PatchingError):
    """A patched file cannot be compiled."""


class DiffError(PatchingError):
    """A diff is malformed, or has what this engine does not support."""


class AlreadyImported(PatchingError):
    """A module is imported already, and a feature there is only for processes that import it later."""


class ReapplyRefused(PatchingError):
    """A module is imported already and cannot be patched in place."""


class InstallError(PatchingError):
    """A feature cannot be patched in, and the process must not run without it."""
