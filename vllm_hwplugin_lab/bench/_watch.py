# SPDX-License-Identifier: Apache-2.0
"""Count what a model runner does: steps by batch size, draft phases, and replayed CUDA graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ._inside import drafting_of, replaying

_TARGET, _DRAFT = "target", "draft"
#: Of a step, in their order.
PARTS = ("inputs", _TARGET, "sampling", _DRAFT)


@dataclass
class Counts:
    """Filled while :func:`watched` is entered.

    Attributes:
        steps: passes of the target over at least one token.
        batch_sizes: requests in a step -> how many steps had so many.
        mixed_steps: steps in which some requests began and others went on.
        draft_phases: how often a step asked for drafts: the drafter's ``propose``, or that of the plugin's graphs.
        draft_phases_in_graphs: those that replayed a CUDA graph.
        replays: CUDA graphs replayed, by the part of a step: ``draft`` within a draft phase, ``inputs`` and
            ``sampling`` within the plugin's methods of these, and ``target`` outside.
    """

    steps: int = 0
    batch_sizes: Counter[int] = field(default_factory=Counter)
    mixed_steps: int = 0
    draft_phases: int = 0
    draft_phases_in_graphs: int = 0
    replays: Counter[str] = field(default_factory=Counter)

    def facts(self) -> dict[str, Any]:
        """The counts for a results file."""
        return {
            "steps": self.steps,
            "batch_sizes": {str(size): count for size, count in sorted(self.batch_sizes.items())},
            "mixed_steps": self.mixed_steps,
            "draft_phases": self.draft_phases,
            "draft_phases_in_graphs": self.draft_phases_in_graphs,
            "graph_replays": {part: self.replays[part] for part in PARTS},
        }


@contextmanager
def watched(runner: Any, graph_class: type | None) -> Iterator[Counts]:
    """Count while the block runs.

    Args:
        runner: vLLM's model runner.
        graph_class: ``torch.cuda.CUDAGraph``, through whose ``replay`` all graphs go; None without a GPU.
    """
    counts = Counts()
    current = _TARGET
    run_step, drafting = runner.execute_model, drafting_of(runner)

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        size, new = len(scheduler_output.num_scheduled_tokens), len(scheduler_output.scheduled_new_reqs)
        if size:  # else vLLM only tells the runner which requests have ended
            counts.steps += 1
            counts.batch_sizes[size] += 1
            counts.mixed_steps += 0 < new < size
        return run_step(scheduler_output, *args, **kwargs)

    def within(part: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal current
            outside, current = current, part
            try:
                return original(*args, **kwargs)
            finally:
                current = outside

        return call

    def propose(*args: Any, **kwargs: Any) -> Any:
        before = counts.replays[_DRAFT]
        try:
            return draft(*args, **kwargs)
        finally:
            counts.draft_phases += 1
            counts.draft_phases_in_graphs += counts.replays[_DRAFT] > before

    def replay(graph: Any) -> Any:
        counts.replays[current] += 1
        return run_graph(graph)

    with ExitStack() as stack:

        def put(owner: Any, method: str, instead: Callable[..., Any]) -> None:
            # On the instance, above the class's own method.
            setattr(owner, method, instead)
            stack.callback(delattr, owner, method)

        put(runner, "execute_model", execute_model)
        for part, owner, method in replaying(runner):
            put(owner, method, within(part, getattr(owner, method)))
        if drafting is not None:
            draft = within(_DRAFT, drafting.propose)
            put(drafting, "propose", propose)
        if graph_class is not None:
            run_graph = graph_class.replay  # type: ignore[attr-defined]
            graph_class.replay = replay  # type: ignore[attr-defined]
            stack.callback(setattr, graph_class, "replay", run_graph)
        yield counts
