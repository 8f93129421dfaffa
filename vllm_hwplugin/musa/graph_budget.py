# SPDX-License-Identifier: Apache-2.0
"""Capture sizes limited to the graphs that one process can hold. Not run on MUSA hardware.

According to torchada 0.1.103 (`_graph_rotation.py`) the capture of about the 2,043rd graph of a process on an MTT S5000
fails. From 1,900 on torchada evicts graphs, which takes 0.3 ms at the next replay of each. For a model with 36 layers
vLLM's 51 sizes have 37 PIECEWISE graphs each.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ..spec_decode.capture_sizes import leave_mixed_to_vllm, piecewise_sizes
from ..spec_decode.draft_schedule import counts_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.hwplugin")

#: Graphs of a process; the rest up to torchada's 1,900 is for other captures.
MOST: Final = 1800
# Graphs of a size without its pieces, with a drafter: the target's FULL graph, the drafter's passes, their inputs, and
# the parts of sampling and drafting; for each number of drafts that has graphs.
_WHOLE: Final = 10


def fit(vllm_config: VllmConfig, *, named: bool) -> None:
    """Drop capture sizes until an engine has at most `MOST` graphs.

    `named` sizes of the user stay, with a warning. The plugin's sizes for batches with prompts are dropped first, then
    the sizes whose loss adds least padding. The largest decode size stays.
    """
    compilation = vllm_config.compilation_config
    if not compilation.cudagraph_capture_sizes:
        return
    pieces = _pieces(vllm_config)
    whole = 1 if vllm_config.speculative_config is None else _WHOLE * max(len(counts_of(compilation)), 1)
    cases = _lora_cases(vllm_config)

    def graphs(chosen: Sequence[int]) -> int:
        # The sizes of batches with prompts may end at a smaller size.
        largest = max(piecewise_sizes(compilation), default=0)
        return cases * (pieces * sum(size <= largest for size in chosen) + whole * len(chosen))

    if not named and graphs(compilation.cudagraph_capture_sizes) > MOST:
        leave_mixed_to_vllm(vllm_config)
    sizes = list(compilation.cudagraph_capture_sizes)
    fitting = list(sizes)
    while len(fitting) > 2 and graphs(fitting) > MOST:
        fitting.pop(min(range(1, len(fitting) - 1), key=lambda at: fitting[at + 1] / fitting[at - 1]))
    if fitting == sizes:
        return
    excess = f"{len(sizes)} capture sizes would have some {graphs(sizes)} graphs, expected {MOST} at most on MUSA"
    if named:
        logger.warning("%s: replays will instantiate graphs again; choose at most %d sizes", excess, len(fitting))
        return
    compilation.cudagraph_capture_sizes = fitting
    logger.info("%s: %d sizes are captured", excess, len(fitting))


def _pieces(vllm_config: VllmConfig) -> int:
    """Count a size's PIECEWISE graphs, of target and drafter."""
    if not vllm_config.compilation_config.cudagraph_mode.requires_piecewise_compilation():
        return 0
    models = [vllm_config.model_config]
    drafter = getattr(vllm_config.speculative_config, "draft_model_config", None)
    # n-gram has no model, and its configuration is the target's.
    if drafter is not None and drafter is not models[0]:
        models.append(drafter)
    # They lie before, between and after the attention layers.
    return sum(1 + model.get_num_layers(vllm_config.parallel_config) for model in models)


def _lora_cases(vllm_config: VllmConfig) -> int:
    """Return how often each size is captured, as vLLM's `CudagraphDispatcher._get_lora_cases`."""
    lora: Any = vllm_config.lora_config
    if lora is None or not vllm_config.compilation_config.cudagraph_specialize_lora:
        return 1
    # Without LoRA and with all adapters, or with up to each power of two.
    return 2 + (lora.max_loras.bit_length() if getattr(lora, "specialize_active_lora", False) else 0)
