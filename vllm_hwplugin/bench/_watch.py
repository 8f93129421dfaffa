# SPDX-License-Identifier: Apache-2.0
"""Count what a model runner does: steps by batch size, draft phases, and replayed CUDA graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ._inside import drafting_of


@dataclass
class Counts:
    """Filled while :func:`watched` is entered.

    Attributes:
        steps: passes of the target over at least one token.
        batch_sizes: requests in a step -> how many steps had so many.
        mixed_steps: steps in which some requests began and others went on.
        draft_phases: calls of the drafter's ``propose``.
        draft_phases_in_graphs: those that replayed a CUDA graph.
        replays: CUDA graphs replayed, ``draft`` within a draft phase and ``target`` outside.
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
            "graph_replays": {phase: self.replays[phase] for phase in ("target", "draft")},
        }


@contextmanager
def watched(runner: Any, graph_class: type | None) -> Iterator[Counts]:
    """Count while the block runs.

    Args:
        runner: vLLM's model runner.
        graph_class: ``torch.cuda.CUDAGraph``, through whose ``replay`` all of vLLM's graphs go; None without a GPU.
    """
    counts = Counts()
    drafting = False
    run_step, drafter = runner.execute_model, drafting_of(runner)

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        size, new = len(scheduler_output.num_scheduled_tokens), len(scheduler_output.scheduled_new_reqs)
        if size:  # else vLLM only tells the runner which requests have ended
            counts.steps += 1
            counts.batch_sizes[size] += 1
            counts.mixed_steps += 0 < new < size
        return run_step(scheduler_output, *args, **kwargs)

    def propose(*args: Any, **kwargs: Any) -> Any:
        nonlocal drafting
        before, drafting = counts.replays["draft"], True
        try:
            return draft(*args, **kwargs)
        finally:
            drafting = False
            counts.draft_phases += 1
            counts.draft_phases_in_graphs += counts.replays["draft"] > before

    def replay(graph: Any) -> Any:
        counts.replays["draft" if drafting else "target"] += 1
        return run_graph(graph)

    runner.execute_model = execute_model
    if drafter is not None:
        draft, drafter.propose = drafter.propose, propose
    if graph_class is not None:
        run_graph = graph_class.replay  # type: ignore[attr-defined]
        graph_class.replay = replay  # type: ignore[attr-defined]
    try:
        yield counts
    finally:
        # Both were set on the instance, above the class's own methods.
        del runner.execute_model
        if drafter is not None:
            del drafter.propose
        if graph_class is not None:
            graph_class.replay = run_graph  # type: ignore[attr-defined]
