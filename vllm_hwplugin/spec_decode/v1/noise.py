# SPDX-License-Identifier: Apache-2.0
"""Draw random numbers for graphs before a replay, as vLLM would, into tensors that the graph reads.

A graph that draws by itself also draws for its padding, and knows no request's own generator. So its numbers, and all
later draws, would differ from unpatched vLLM's. Here each draw is a launch in front of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class _Draw:
    """One of vLLM's draws.

    Attributes:
        numbers: [max_num_reqs * rows, ...], what the graphs read.
        rows: rows per request.
        exponential: exponentially distributed; else uniformly.
    """

    numbers: torch.Tensor
    rows: int
    exponential: bool

    def fill(self, first: int, last: int, generator: torch.Generator | None = None) -> None:
        """Draw the numbers of the requests from `first` to `last`."""
        part = self.numbers[first * self.rows : last * self.rows]
        if self.exponential:
            part.exponential_(generator=generator)
        else:
            part.uniform_(generator=generator)


class Noise:
    """The numbers that one part of a step draws, in vLLM's order."""

    def __init__(self, max_num_reqs: int):
        self._max_num_reqs = max_num_reqs
        self._draws: list[_Draw] = []
        self._num_reqs = self._first = 0
        self._next = 0

    def begin(self, num_reqs: int, first: int = 0) -> None:
        """Start at the first draw, for `num_reqs` requests from `first` on."""
        self._num_reqs, self._first, self._next = num_reqs, first, 0

    @contextmanager
    def read(self) -> Iterator[None]:
        """Replace vLLM's draws with these numbers inside the context."""
        with _Reading(self):
            yield

    def numbers(self, like: torch.Tensor, *, exponential: bool) -> torch.Tensor:
        """Return the next draw's numbers, in the shape and type of `like`."""
        rows = like.shape[0] // self._num_reqs
        if self._next == len(self._draws):
            numbers = like.new_ones((self._max_num_reqs * rows, *like.shape[1:]))
            self._draws.append(_Draw(numbers, rows, exponential))
        draw = self._draws[self._next]
        self._next += 1
        return draw.numbers[self._first * rows :][: like.shape[0]]

    def draw(self, count: int, generators: Mapping[int, torch.Generator]) -> None:
        """Draw for the first `count` requests, with `generators` of seeded requests."""
        for index, draw in enumerate(self._draws):
            # vLLM's sampler of single tokens, which comes first, leaves out numbers that nobody reads.
            if index > 0 or len(generators) != count:
                draw.fill(0, count)
            for request, generator in generators.items():
                draw.fill(request, request + 1, generator)


class _Reading(TorchFunctionMode):  # type: ignore[misc]
    def __init__(self, noise: Noise):
        super().__init__()
        self._noise = noise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # By name: a layer between torch and another vendor's device has its own functions under torch's names.
        name = getattr(func, "__name__", None)
        if name == "exponential_":
            out = args[0]
            return out.copy_(self._noise.numbers(out, exponential=True))
        if name == "rand":
            out = torch.empty(*args, **(kwargs or {}))
            return out.copy_(self._noise.numbers(out, exponential=False))
        return func(*args, **(kwargs or {}))
