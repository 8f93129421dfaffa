# SPDX-License-Identifier: Apache-2.0
"""What can be wrong with a change that is to become a feature."""

from __future__ import annotations

from vllm_hwplugin.errors import HwpluginError


class ChangeError(HwpluginError):
    """A diff or patch cannot be read, or holds nothing that could become a feature."""


class FeatureFolderError(HwpluginError):
    """A feature's folder cannot take what is to be written there."""


class WorkTreeError(HwpluginError):
    """A work tree is not as `patches edit` left it, or holds nothing to save."""
