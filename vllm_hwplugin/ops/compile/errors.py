# SPDX-License-Identifier: Apache-2.0
"""Why a kernel cannot be had."""

from __future__ import annotations

from ...errors import HwpluginError


class KernelUnavailable(HwpluginError):
    """A kernel is not here and cannot be built here. The message says what is missing and how to get it."""
