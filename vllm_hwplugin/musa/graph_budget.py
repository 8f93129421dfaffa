# SPDX-License-Identifier: Apache-2.0
"""So few capture sizes that one process can hold their graphs. Not run on MUSA hardware.

A process on an MTT S5000 holds about 2,043 graphs that are ready to be replayed, says torchada 0.1.103
(`_graph_rotation.py`); one more ends its capture with an illegal memory access. From 1,900 on torchada makes room, and
a graph without a place is made ready anew at its next replay, which takes 0.3 ms. vLLM's 51 sizes have 37 PIECEWISE
graphs each where a model has 36 layers, and a drafter has graphs as well.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from ..spec_decode.capture_sizes import leave_mixed_to_vllm, piecewise_sizes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.hwplugin")

#: Graphs of a process. What is left up to torchada's 1,900 is for what others capture.
MOST: Final = 1800
# Of a size, beside its pieces, with a drafter: the target's FULL graph, the drafter's passes, what they read, and the
# parts of a phase.
_WHOLE: Final = 10


def fit(vllm_config: VllmConfig, *, named: bool) -> None:
    """Leave out capture sizes of an engine whose graphs would be more than `MOST`; tell the user of those he named.

    The plugin's for batches with prompts go first, then those without which batches are padded least. The largest one
    of decode batches stays.

    Args:
        vllm_config: when its sizes are decided.
        named: whether the user chose the sizes.
    """
    compilation = vllm_config.compilation_config
    if not compilation.cudagraph_capture_sizes:
        return
    pieces = _pieces(vllm_config)
    whole = 1 if vllm_config.speculative_config is None else _WHOLE
    cases = _lora_cases(vllm_config)

    def graphs(chosen: Sequence[int]) -> int:
        # Those of batches with prompts may end before the others.
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
    asked = f"{len(sizes)} capture sizes would have some {graphs(sizes)} graphs, expected {MOST} at most on MUSA"
    if named:
        logger.warning("%s: some are made ready anew at each replay; name %d sizes or fewer", asked, len(fitting))
        return
    compilation.cudagraph_capture_sizes = fitting
    logger.info("%s: %d sizes are kept", asked, len(fitting))


def _pieces(vllm_config: VllmConfig) -> int:
    """PIECEWISE graphs of a size: what is before, between and behind the layers' attention, also a drafter's."""
    compilation = vllm_config.compilation_config
    if not compilation.cudagraph_mode.requires_piecewise_compilation():
        return 0
    model, speculation = vllm_config.model_config, vllm_config.speculative_config
    models = [model, None if speculation is None else speculation.draft_model_config]
    # n-gram has the target's, and no model.
    if models[1] is model:
        models.pop()
    return sum(1 + one.get_num_layers(vllm_config.parallel_config) for one in models if one is not None)


def _lora_cases(vllm_config: VllmConfig) -> int:
    """How often each size is captured, as vLLM's `CudagraphDispatcher._get_lora_cases` says it."""
    lora: Any = vllm_config.lora_config
    if lora is None or not vllm_config.compilation_config.cudagraph_specialize_lora:
        return 1
    # Without any, and with all of them, or with up to each power of two.
    powers = lora.max_loras.bit_length() if getattr(lora, "specialize_active_lora", False) else 0
    return 2 + powers
