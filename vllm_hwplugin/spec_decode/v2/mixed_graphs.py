# SPDX-License-Identifier: Apache-2.0
"""FULL CUDA graphs of batches of any shape, beside those of decode batches (Model Runner V2).

The host launches a step that holds a prompt, or fewer drafts of a request than of others: piece by piece, and kernel
by kernel above the largest PIECEWISE graph. For a small model that takes longer than the GPU's work. With
`cudagraph_mode` FULL vLLM captures such batches as a whole, but then it has no graphs of decode batches, which all that
follows the target builds on. Here its managers of graphs get both. Capture, padding and replay are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_hwplugin import journal
from vllm_hwplugin.fallback import stays_stock
from vllm_hwplugin.features import BACKPORT_MIXED_GRAPHS, V2_MIXED_GRAPHS
from vllm_hwplugin.spec_decode.decode_batch import MAX_NUM_REQS
from vllm_hwplugin.spec_decode.drafters import SHARED_FIRST_PASS
from vllm_hwplugin.spec_decode.obstacles import Part, decodes_plainly, why_not

_STOCK: Final = "only decode batches have FULL graphs"

#: Tokens of the graphs. A batch is padded to the next: by 31 tokens up to 1024, then by a sixteenth of its tokens at
#: most, and by 2 % on average. Each is captured for the target and for the drafter, and makes a start longer.
SIZES: Final = (*range(32, 1024, 32), *range(1024, 2048, 64), *range(2048, 4097, 128))

#: Of a `CompilationConfig`, where an engine has these graphs.
_ADDED: Final = "_hwplugin_mixed_graphs"

#: Tokens times parts.
_SPLIT_TOKENS: Final = 4096


def most_splits(compilation_config: Any, num_tokens: int, most: int) -> int | None:
    """Parts that FlashAttention 3 may split a request's keys into, in a graph of any batch of so many tokens; None
    where vLLM decides, because this engine has no such graphs beside vLLM's. Called by its patched metadata builder.

    It keeps float32 outputs for each token and each part. Many tokens keep the GPU busy without parts. A graph is
    replayed with the parts of its capture, as Model Runner V2 tells both of a longest request of all tokens. The V1
    runner tells the capture alone.

    Args:
        compilation_config: of the engine.
        num_tokens: of the graph.
        most: parts that vLLM allows.
    """
    if not has_mixed_graphs(compilation_config):
        return None
    return max(1, min(4, most, _SPLIT_TOKENS // num_tokens))


def has_mixed_graphs(compilation_config: Any) -> bool:
    """Whether this engine has such graphs beside vLLM's own."""
    return bool(vars(compilation_config).get(_ADDED))


def leave_out_mixed_graphs(compilation_config: Any) -> None:
    """Have none from now on, after their capture has failed."""
    vars(compilation_config)[_ADDED] = False


def add_mixed_graphs(runner: Any) -> None:
    """Have target and drafter capture FULL graphs of any batch as well, and prefer them to PIECEWISE graphs or none.

    They are no larger than the largest capture size, which the user may have named.

    An engine without a drafter has none, unless it is asked for graphs.

    Raises:
        FeatureRequired: an engine with a drafter cannot have them, and the feature's gate says `on`.
    """
    if runner.speculator is None and not decodes_plainly(runner):
        return
    if vars(runner.compilation_config).get(_ADDED) is False:
        # As vLLM measured memory; it is known why.
        return
    most_tokens = min(runner.max_num_tokens, runner.compilation_config.max_cudagraph_capture_size or 0)
    sizes = [size for size in SIZES if size <= most_tokens]
    reason = why_not(runner, Part.V2_MIXED)
    if reason is not None or not sizes:
        stays_stock(V2_MIXED_GRAPHS, _STOCK, reason or f"graphs have {most_tokens} tokens at most")
        return
    most = min(runner.max_num_reqs, MAX_NUM_REQS)
    graphs = [
        BatchExecutionDescriptor(cg_mode=CUDAGraphMode.FULL, num_tokens=size, num_reqs=min(size, most))
        for size in sizes
    ]
    _offer(runner.cudagraph_manager, graphs)
    if type(runner.speculator).__name__ in SHARED_FIRST_PASS:
        _offer(runner.speculator.prefill_cudagraph_manager, graphs)
    vars(runner.compilation_config)[_ADDED] = True
    journal.note(V2_MIXED_GRAPHS, f"{len(graphs)} shapes of at most {sizes[-1]} tokens and {most} requests")
    for feature in (V2_MIXED_GRAPHS, BACKPORT_MIXED_GRAPHS):
        journal.use(feature, True)


def _offer(manager: Any, graphs: Sequence[Any]) -> None:
    """Have a `CudaGraphManager` capture these, in ascending order of tokens, and find the smallest that takes a batch.

    It looks behind its own FULL graphs, which are of one shape and pad less, and before PIECEWISE ones.
    """
    planned = manager._capture_descs.setdefault(CUDAGraphMode.FULL, [])
    planned.extend(graphs)
    planned.sort(key=lambda desc: desc.num_tokens, reverse=True)
    start = 1
    for graph in graphs:
        for num_tokens in range(start, graph.num_tokens + 1):
            own = manager._candidates.get((num_tokens, 0), [])
            manager._candidates[num_tokens, 0] = [*_of(own, True), graph, *_of(own, False)]
        start = graph.num_tokens + 1


def _of(descs: Iterable[Any], full: bool) -> list[Any]:
    return [desc for desc in descs if (desc.cg_mode == CUDAGraphMode.FULL) == full]
