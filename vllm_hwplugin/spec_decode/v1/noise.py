# SPDX-License-Identifier: Apache-2.0
"""Draw random numbers for graphs before a replay, as vLLM would, into tensors that the graph reads.

A graph that draws by itself also draws for its padding, and knows no request's own generator. So its numbers, and all
later draws, would differ from unpatched vLLM's. Here each draw is a launch in front of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Noise:
    """The numbers that one part of a step draws, in vLLM's order."""

    def __init__(self, max_num_reqs: int):
        self._max_num_reqs = max_num_reqs
        # By draw: what the graphs read, [max_num_reqs * rows, ...], rows per request, and the method that draws.
        self._draws: list[tuple[torch.Tensor, int, str]] = []
        self._num_reqs = self._first = 0
        self._next = 0

    def begin(self, num_reqs: int, first: int = 0) -> None:
        """Start at the first draw, for `num_reqs` requests from `first` on."""
        self._num_reqs, self._first, self._next = num_reqs, first, 0

    def read(self) -> _Reading:
        """Return a context in which these numbers replace vLLM's draws."""
        return _Reading(self)

    def numbers(self, like: torch.Tensor, method: str) -> torch.Tensor:
        """Return the next draw's numbers, in the shape and type of `like`."""
        rows = like.shape[0] // self._num_reqs
        if self._next == len(self._draws):
            self._draws.append((like.new_ones((self._max_num_reqs * rows, *like.shape[1:])), rows, method))
        numbers, *_ = self._draws[self._next]
        self._next += 1
        return numbers[self._first * rows :][: like.shape[0]]

    def draw(self, count: int, generators: Mapping[int, torch.Generator]) -> None:
        """Draw for the first `count` requests, with `generators` of seeded requests."""
        for index, (numbers, rows, method) in enumerate(self._draws):
            # vLLM's sampler of single tokens, which comes first, leaves out numbers that nobody reads.
            if index > 0 or len(generators) != count:
                getattr(numbers[: count * rows], method)()
            for request, generator in generators.items():
                getattr(numbers[request * rows : (request + 1) * rows], method)(generator=generator)


class _Reading(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, noise: Noise):
        super().__init__()
        self._noise = noise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # By name: a layer between torch and another vendor's device has its own functions under torch's names.
        name = getattr(func, "__name__", None)
        if name == "exponential_":
            out = args[0]
            return out.copy_(self._noise.numbers(out, name))
        if name == "rand":
            out = torch.empty(*args, **(kwargs or {}))
            return out.copy_(self._noise.numbers(out, "uniform_"))
        return func(*args, **(kwargs or {}))
