# SPDX-License-Identifier: Apache-2.0
"""The host and the vLLM that the tests of the platform classes are run on."""

from __future__ import annotations

from ..platforms.conftest import _fresh, dflash, musa_host, real_vllm

__all__ = ["_fresh", "dflash", "musa_host", "real_vllm"]
