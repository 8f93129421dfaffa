# SPDX-License-Identifier: Apache-2.0
"""vLLM compiles steps that the kernels serve apart from those of more tokens, where :mod:`.restore_pass` has its turn.

Imports neither vLLM nor torch before the feature is known to be live: every engine's platform class asks.
"""

from __future__ import annotations

from typing import Any

from vllm_hwplugin import features, journal


def check_and_update_config(vllm_config: Any) -> None:
    """End a range of ``CompilationConfig.compile_ranges_endpoints`` at the most tokens that the kernels serve.

    For `check_and_update_config` of a platform. vLLM itself leaves out a bound above ``max_num_batched_tokens``. With
    two ranges it runs no graph whose shapes are all static, and an encoder's may be such.

    Args:
        vllm_config: the `VllmConfig` that is being made.
    """
    entry = journal.current()
    if entry is None or features.LINEAR not in entry.live:
        return
    from vllm_hwplugin.linear import layers
    from vllm_hwplugin.linear.operations import MOST_TOKENS

    compilation = vllm_config.compilation_config
    if layers.ON_HOPPER and not compilation.compile_mm_encoder:
        compilation.compile_ranges_endpoints = sorted({*(compilation.compile_ranges_endpoints or ()), MOST_TOKENS})
