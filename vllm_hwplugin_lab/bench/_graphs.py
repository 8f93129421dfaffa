# SPDX-License-Identifier: Apache-2.0
"""Which CUDA graphs a target and its drafter were given, pass by pass. vLLM's ``cudagraph_metrics`` says it of targets.

Asked where a runner decides it. V1 has ``_determine_batch_execution_and_padding`` on the runner and on the drafter, and
this project's drafter graphs have a method in front of the latter. V2 has managers with ``dispatch``.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ._inside import drafter_of, drafting_of

_V1_METHOD = "_determine_batch_execution_and_padding"
_V2_METHOD = "dispatch"


@dataclass
class GraphCounts:
    """Filled while :func:`counted` is entered: (whose, unpadded tokens, padded tokens, mode) -> passes."""

    passes: Counter[tuple[str, int, int, str]] = field(default_factory=Counter)

    def rows(self) -> list[dict[str, Any]]:
        """The most frequent first, each model's together."""
        order = sorted(self.passes.items(), key=lambda item: (item[0][0] != "target", item[0][0], -item[1], item[0]))
        names = ("model", "unpadded", "padded", "mode")
        return [{**dict(zip(names, key, strict=True)), "count": count} for key, count in order]


@contextmanager
def counted(runner: Any) -> Iterator[GraphCounts]:
    """Count while the block runs.

    Args:
        runner: vLLM's model runner, V1 or V2.
    """
    counts = GraphCounts()
    drafter = drafter_of(runner)
    depth = 0

    def watch(owner: Any, method: str, whose: str, found: Callable[[Any], tuple[int, str]]) -> Callable[[], None]:
        original = getattr(owner, method)
        place = list(inspect.signature(original).parameters).index("num_tokens")

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                result = original(*args, **kwargs)
            finally:
                depth -= 1
            if depth == 0:  # one asks another: the outermost says what the pass gets
                padded, mode = found(result)
                unpadded = kwargs["num_tokens"] if "num_tokens" in kwargs else args[place]
                counts.passes[whose, int(unpadded), padded, mode] += 1
            return result

        setattr(owner, method, call)
        return lambda: delattr(owner, method)

    with ExitStack() as stack:
        for owner, whose in ((runner, "target"), (drafter, "drafter")):
            if owner is None:
                continue
            if hasattr(owner, _V1_METHOD):
                stack.callback(watch(owner, _V1_METHOD, whose, _v1))
            for name, manager in sorted(vars(owner).items()):
                if name.endswith("cudagraph_manager") and hasattr(manager, _V2_METHOD):
                    part = name.removesuffix("cudagraph_manager").rstrip("_")
                    stack.callback(watch(manager, _V2_METHOD, f"{whose} {part}".rstrip(), _v2))
        graphs = getattr(drafter, "draft_graphs", None)
        if graphs is not None:
            stack.callback(watch(graphs, _V1_METHOD.lstrip("_"), "drafter", _v1))
        whole = drafting_of(runner)
        if whole is not None and whole is not drafter:
            stack.callback(_watch_whole(whole, counts))
        yield counts


def _watch_whole(whole: Any, counts: GraphCounts) -> Callable[[], None]:
    """The plugin's graph of the whole draft: where no pass of the drafter was asked for, it has served."""
    original = whole.propose
    arguments = inspect.signature(original)
    named, sizes = ("drafter tail", _v2_sizes) if "batch" in arguments.parameters else ("drafter phase", _v1_sizes)

    def propose(*args: Any, **kwargs: Any) -> Any:
        before = counts.passes.total()
        result = original(*args, **kwargs)
        if counts.passes.total() == before:
            unpadded, padded = sizes(arguments.bind(*args, **kwargs).arguments)
            counts.passes[named, unpadded, padded, "FULL"] += 1
        return result

    whole.propose = propose
    return lambda: delattr(whole, "propose")


def _v1_sizes(given: Mapping[str, Any]) -> tuple[int, int]:
    # The target has left its states for each token of its graph.
    return int(given["scheduler_output"].total_num_scheduled_tokens), int(given["hidden_states"].shape[0])


def _v2_sizes(given: Mapping[str, Any]) -> tuple[int, int]:
    return int(given["batch"].num_tokens), int(given["batch"].num_tokens_after_padding)


def _v1(result: Any) -> tuple[int, str]:
    mode, batch, *_ = result
    return int(getattr(batch, "num_tokens", batch)), str(mode.name)


def _v2(result: Any) -> tuple[int, str]:
    return int(result.num_tokens), str(result.cg_mode.name)
