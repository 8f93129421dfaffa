# SPDX-License-Identifier: Apache-2.0
"""A separate compile range for steps with more tokens than the kernels take; :mod:`.restore_pass` changes its graph.

Imports neither vLLM nor torch before the feature is patched in: every engine's platform class calls it.
"""

from __future__ import annotations

from typing import Any

from vllm_hwplugin.base import features, run_records


def check_and_update_config(vllm_config: Any) -> None:
    """End a range of ``compile_ranges_endpoints`` at the kernels' most tokens.

    For `check_and_update_config` of a platform. vLLM drops a bound above ``max_num_batched_tokens``. With two ranges it
    runs no graph whose shapes are all static, and an encoder's may be.
    """
    entry = run_records.current()
    if entry is None or features.LINEAR not in entry.live:
        return
    from vllm_hwplugin.linear import layers
    from vllm_hwplugin.linear.operations import MOST_TOKENS

    compilation = vllm_config.compilation_config
    if layers.ON_HOPPER and not compilation.compile_mm_encoder:
        compilation.compile_ranges_endpoints = sorted({*(compilation.compile_ranges_endpoints or ()), MOST_TOKENS})
