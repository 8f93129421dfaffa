# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for CUDA's streams and events, with which a copy on a second stream is under way until it is waited for.

The first stream does at once what it is given. So whoever writes there to what is still to be copied, without a wait,
has the copy show it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode


class Stream:
    """`torch.cuda.Stream`."""

    current: ClassVar[Stream]

    def __init__(self, *_: Any, **__: Any) -> None:
        self._under_way: list[Callable[[], Any]] = []
        self.launched = 0

    def launch(self, copy: Callable[[], Any]) -> None:
        self._under_way.append(copy)
        self.launched += 1

    def synchronize(self, launched: int | None = None) -> None:
        """Have done what was launched, or so many of it since the beginning."""
        later = 0 if launched is None else self.launched - launched
        while len(self._under_way) > later:
            self._under_way.pop(0)()

    def wait_stream(self, other: Stream) -> None:
        other.synchronize()

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._recorded: tuple[Stream, int] | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or Stream.current
        self._recorded = stream, stream.launched

    def synchronize(self) -> None:
        if self._recorded is not None:
            stream, launched = self._recorded
            stream.synchronize(launched)

    wait = synchronize


class _Copies(TorchFunctionMode):
    """Leaves copies that nobody waits for to the current stream."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # There is no other memory than the host's.
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if kwargs.get("non_blocking") and Stream.current is not _first:
            if func is torch.Tensor.copy_:
                Stream.current.launch(torch.inference_mode()(lambda: args[0].copy_(args[1])))
                return args[0]
            if func is torch.Tensor.to:
                return copied(args[0])
        return func(*args, **kwargs)


@contextlib.contextmanager
def _on(stream: Stream | None) -> Iterator[None]:
    before, Stream.current = Stream.current, stream or Stream.current
    try:
        with _Copies():
            yield
    finally:
        Stream.current = before


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that the current stream makes."""
    made = torch.full_like(tensor, -77)
    copy = torch.inference_mode()(lambda: made.copy_(tensor))
    if Stream.current is _first:
        copy()
    else:
        Stream.current.launch(copy)
    return made


_first = Stream()


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch give out these."""
    monkeypatch.setattr(Stream, "current", _first, raising=False)
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "stream": _on,
        "current_stream": lambda *_: Stream.current,
        "set_stream": lambda stream: setattr(Stream, "current", stream),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda *_: 0)
    # The second up to 0.24.
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (0, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 0))
    # There is no other memory than the host's.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor.clone())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
