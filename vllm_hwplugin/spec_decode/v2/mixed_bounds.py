# SPDX-License-Identifier: Apache-2.0
"""Recognize a batch that replays a mixed batch's graph by its shape (Model Runner V2).

vLLM's patched attention backends ask here, also in engines without these graphs. So this module imports nothing of
vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: Attribute of a `CompilationConfig`: num_reqs -> longest query of the mixed graphs, by tokens. Empty if their capture
#: failed.
_SHAPES: Final = "_hwplugin_mixed_shapes"

#: Requests of the largest graph of mixed batches. A decode batch of as many with three drafts is the largest captured.
MOST_REQS: Final = 512

#: Limit of the floats of all splits: 64 MiB.
_SPLIT_FLOATS: Final = 1 << 24


def set_mixed_graphs(compilation_config: Any, shapes: Mapping[int, Mapping[int, int]]) -> None:
    """Set the shapes of an engine's mixed graphs."""
    vars(compilation_config)[_SHAPES] = shapes


def has_mixed_graphs(compilation_config: Any) -> bool:
    """Whether this engine has graphs of mixed batches."""
    return bool(vars(compilation_config).get(_SHAPES))


def lost_mixed_graphs(compilation_config: Any) -> bool:
    """Whether the capture of mixed graphs failed."""
    return bool(vars(compilation_config).get(_SHAPES) == {})


def longest_query(compilation_config: Any, num_tokens: int) -> int:
    """Return the longest query of the mixed graphs with `num_tokens`."""
    shapes: Mapping[int, Mapping[int, int]] = vars(compilation_config)[_SHAPES]
    return max(shapes[num_tokens].values())


def is_mixed_graph(compilation_config: Any, num_reqs: int, num_tokens: int, max_query_len: int) -> bool:
    """Whether a padded batch has the shape of a mixed graph.

    A batch's longest request seldom has that many tokens, so attention backends get the graph's longest query only in
    its capture and in a replay. A batch without a graph that has this shape by chance runs as if it had one: a kernel
    is launched for longer requests and with fewer splits.

    Args:
        max_query_len: the longest request, as vLLM's runner tells the backend.
    """
    shapes: Mapping[int, Mapping[int, int]] = vars(compilation_config).get(_SHAPES, {})
    return shapes.get(num_tokens, {}).get(num_reqs) == max_query_len


def most_splits(
    compilation_config: Any, num_reqs: int, num_tokens: int, max_query_len: int, most: int, width: int = 4096
) -> int | None:
    """Return FlashAttention 3's limit of KV splits in a mixed batch's graph.

    vLLM's patched metadata builders call this. None: the batch has only vLLM's graphs, and vLLM decides.

    Args:
        most: vLLM's limit.
        width: floats of a token's output.
    """
    if not is_mixed_graph(compilation_config, num_reqs, num_tokens, max_query_len):
        return None
    # FlashAttention 3 keeps a float32 output for each token and split, and many tokens keep the GPU busy without
    # splits. So do many requests: a graph with more rows than another holds no batch that fits into the other. The
    # kernel only splits long requests, so a higher limit costs short ones nothing. A replay uses the capture's splits,
    # because both have the graph's shape.
    fewest = min(vars(compilation_config)[_SHAPES][num_tokens])
    return max(1, min(most, _SPLIT_FLOATS // (num_tokens * width))) if num_reqs == fewest else 1
