# SPDX-License-Identifier: Apache-2.0
"""What can go wrong while the text of a vLLM version is looked for.

Each message is one line that says what was looked at, what was found and what to do: the command line prints it as it
stands and ends with status 2.
"""

from __future__ import annotations

from vllm_hwplugin.errors import HwpluginError


class SourceError(HwpluginError):
    """The text of a vLLM version could not be read."""


class BadTarget(SourceError):
    """A TARGET is neither a wheel file, nor an unpacked tree, nor a version."""


class BadWheel(SourceError):
    """A wheel is damaged, or holds no vLLM."""


class BadTree(SourceError):
    """A folder holds no vLLM, or one whose version is not written down."""


class UnknownVersion(SourceError):
    """The package index has no wheel of this version."""


class IndexUnreachable(SourceError):
    """The package index did not answer, or not with what an index answers."""


class MissingTool(SourceError):
    """An optional library that is needed for this kind of target is not installed."""
