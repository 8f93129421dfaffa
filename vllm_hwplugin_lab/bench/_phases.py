# SPDX-License-Identifier: Apache-2.0
"""The host's time of a step by vLLM's functions, without a profiler.

There is no list of names. All methods of this version's model runner, drafter, scheduler and helpers of the runner are
timed, and the functions that their modules define or import from vLLM. A timed call costs the host about a microsecond,
so sums are slightly more than in an engine that is not timed.
"""

from __future__ import annotations

import inspect
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ._inside import drafter_of

STEP = "step"
WAITING = "Future.result"
#: Modules whose classes and functions are timed.
_OURS = ("vllm.v1.", "vllm_hwplugin.spec_decode")

#: Names from the outermost function to the innermost.
Path = tuple[str, ...]
#: Depth, name, calls per step, and microseconds per step.
PhaseRow = tuple[int, str, float, float]


@dataclass
class Phases:
    """Times while :func:`timed` is entered.

    Attributes:
        seconds: Path -> its time in each step that has it, in the order of first calls.
        calls: Path -> its calls in all steps.
    """

    seconds: dict[Path, list[float]] = field(default_factory=dict)
    calls: Counter[Path] = field(default_factory=Counter)

    def add_step(self, taken: Mapping[Path, Sequence[float]]) -> None:
        """Add a step: path -> the time of each call."""
        for path, times in taken.items():
            self.seconds.setdefault(path, []).append(sum(times))
            self.calls[path] += len(times)

    def rows(self) -> list[PhaseRow]:
        """Return a row per path, each before the paths inside it.

        A row has the median over steps, which prompts and other rare steps do not change.
        """
        steps = self.calls[(STEP,)]
        order = {path: place for place, path in enumerate(self.seconds)}

        def place(path: Path) -> list[int]:
            return [order[path[: length + 1]] for length in range(len(path))]

        return [
            (
                len(path) - 1,
                path[-1],
                self.calls[path] / steps,
                statistics.median(self.seconds[path]) * len(self.seconds[path]) / steps * 1e6,
            )
            for path in sorted(self.seconds, key=place)
        ]


@contextmanager
def timed(core: Any, runner: Any) -> Iterator[Phases]:
    """Time the block in this process's ``EngineCore`` and model runner."""
    phases = Phases()
    looked_at = list(_owners(core, runner))
    taken: dict[Path, list[float]] = {}
    above: Path = ()
    thread = threading.get_ident()

    def timing(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal above
            # A step does not wait for other threads, and calls between steps are not part of one.
            if threading.get_ident() != thread or (not above and name != STEP):
                return original(*args, **kwargs)
            outside, above = above, (*above, name)
            times = taken.setdefault(above, [])  # before the call, so that outer paths come first
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                times.append(time.perf_counter() - started)
                above = outside
                if name == STEP:
                    phases.add_step(taken)
                    taken.clear()

        return call

    with ExitStack() as stack:
        for owner, name, shown in [
            (core, "step_fn", STEP),
            *_methods(looked_at),
            *_functions(looked_at),
            *_waiting(Future),
        ]:
            own, original = vars(owner), getattr(owner, name)
            # Deleting the instance's attribute reveals the class's.
            undo = (setattr, owner, name, original) if name in own else (delattr, owner, name)
            setattr(owner, name, timing(original, shown))
            stack.callback(*undo)
        yield phases


def _owners(core: Any, runner: Any) -> Iterator[Any]:
    """Yield the objects of a step: core, runner, drafter, and theirs."""
    drafter = drafter_of(runner)
    helpers = [value for owner in (runner, drafter) if owner is not None for value in vars(owner).values()]
    executor = getattr(core, "model_executor", None)
    worker = getattr(getattr(executor, "driver_worker", None), "worker", None)
    seen = set()
    for owner in (core, core.scheduler, executor, worker, runner, drafter, *helpers):
        if _kinds(owner) and _takes_attributes(owner) and id(owner) not in seen:
            seen.add(id(owner))
            yield owner


def _kinds(owner: Any) -> list[type]:
    return [kind for kind in type(owner).__mro__ if kind.__module__.startswith(_OURS)]


def _takes_attributes(owner: Any) -> bool:
    frozen = getattr(getattr(type(owner), "__dataclass_params__", None), "frozen", False)
    return hasattr(owner, "__dict__") and not frozen


def _methods(owners: Sequence[Any]) -> Iterator[tuple[Any, str, str]]:
    for owner in owners:
        for name in dict.fromkeys(name for kind in _kinds(owner) for name in vars(kind)):
            method = inspect.getattr_static(owner, name)
            if inspect.isfunction(method) and not name.startswith("__") and not inspect.isgeneratorfunction(method):
                yield owner, name, f"{type(owner).__name__}.{name}"


def _waiting(kind: type[Future[Any]]) -> Iterator[tuple[Any, str, str]]:
    """Yield ``result`` of every kind of future."""
    # A step waits there for the previous step; vLLM makes new futures in each.
    if "result" in vars(kind):
        yield kind, "result", WAITING
    for derived in kind.__subclasses__():
        yield from _waiting(derived)


def _functions(owners: Sequence[Any]) -> Iterator[tuple[Any, str, str]]:
    """Yield the functions that the modules of the owners' classes use."""
    for module in sorted({kind.__module__ for owner in owners for kind in _kinds(owner)}):
        for name, function in list(vars(sys.modules[module]).items()):
            if inspect.isfunction(function) and function.__module__.startswith(_OURS):
                yield sys.modules[module], name, name
