# SPDX-License-Identifier: Apache-2.0
"""What a process says when its patches are settled."""

from __future__ import annotations

import logging

from .. import __version__
from ..journal import Journal
from ..versions import SUPPORTED, is_supported
from ._installed import Installed
from ._model import Plan

logger = logging.getLogger("vllm.hwplugin")


def report(entry: Journal, plan: Plan, installed: Installed, try_unlisted: bool) -> None:
    """One line that says what is live, and one for each feature that should be and is not."""
    listed = is_supported(installed.version)
    if not listed:
        logger.warning(
            "vLLM %s is not a version that vllm-hwplugin %s knows (%s to %s); %s",
            installed.version,
            __version__,
            SUPPORTED[0],
            SUPPORTED[-1],
            "features whose every hunk fits exactly are live"
            if try_unlisted
            else "its features are off: set VLLM_HWPLUGIN_TRY_UNLISTED=1 to use those whose every hunk fits exactly",
        )
    for name, item in entry.features.items():
        # Where nothing is tried, the line above is the reason for all of the project's own.
        told = name in plan.features and not plan.features[name].feature.is_outside and not listed and not try_unlisted
        if item["state"] == "refused" and not told:
            logger.warning("%s is not live, vLLM runs stock there: %s", name, item["reason"])
    logger.info(
        "vllm-hwplugin %s on %s %s (%s): in force: %s",
        __version__,
        installed.dist,
        installed.version,
        entry.role,
        ", ".join(entry.live) or "nothing",
    )
