# SPDX-License-Identifier: Apache-2.0
"""Count a model runner's steps by batch size, its draft phases, and its replayed CUDA graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ._inside import drafting_of, replaying

_TARGET, _DRAFT = "target", "draft"
#: Parts of a step, in their order.
PARTS = ("inputs", _TARGET, "sampling", _DRAFT)


@dataclass
class Counts:
    """Counts while :func:`watched` is entered.

    Attributes:
        steps: Passes of the target over at least one token.
        batch_sizes: Requests of a step -> number of steps.
        mixed_steps: Steps in which some requests began and others continued.
        draft_phases: Calls of ``propose``, of the drafter or of the plugin's graphs.
        draft_phases_in_graphs: Draft phases that replayed a CUDA graph.
        replays: Replayed CUDA graphs by part of the step: ``draft`` in a draft phase, ``inputs`` and ``sampling`` in
            the plugin's methods for these, else ``target``.
    """

    steps: int = 0
    batch_sizes: Counter[int] = field(default_factory=Counter)
    mixed_steps: int = 0
    draft_phases: int = 0
    draft_phases_in_graphs: int = 0
    replays: Counter[str] = field(default_factory=Counter)

    def facts(self) -> dict[str, Any]:
        """Return the counts for a results file."""
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
        graph_class: ``torch.cuda.CUDAGraph``, whose ``replay`` all graphs call; None: no GPU.
    """
    counts = Counts()
    current = _TARGET
    run_step, drafting = runner.execute_model, drafting_of(runner)

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        size, new = len(scheduler_output.num_scheduled_tokens), len(scheduler_output.scheduled_new_reqs)
        if size:  # otherwise vLLM only reports ended requests
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
            # On the instance, which hides the class's method.
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
