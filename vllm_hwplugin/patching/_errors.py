# SPDX-License-Identifier: Apache-2.0
"""Errors of the patch engine. Each message says what, where, found, expected, and the way out, in one line."""

from __future__ import annotations

from typing import Final

from ..errors import HwpluginError

#: What `compile` raises of a text that is no Python, or more than its parser can hold.
NOT_COMPILED: Final = (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError)


class PatchingError(HwpluginError):
    """Base of the engine's errors."""


class CatalogueError(PatchingError):
    """The folder of patches, or one `patch.toml` in it, is not what it has to be."""


class UnreadableFile(PatchingError):
    """A file of vLLM is there and cannot be read as text, or is not what Python imports: nothing can be said of it."""


class NotPython(PatchingError):
    """What patches make of a file cannot be compiled."""


class DiffError(PatchingError):
    """A file that should be a unified diff is malformed, or says things that this engine refuses to guess at."""


class InstallError(PatchingError):
    """A feature that was asked for cannot be live, and the process must not run without it."""
