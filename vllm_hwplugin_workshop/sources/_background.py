# SPDX-License-Identifier: Apache-2.0
"""Work in threads that nobody has to wait for.

The threads of ``concurrent.futures`` are joined when Python ends, so that one of them in a silent server's hands keeps
the whole process, also after Ctrl-C. Those here end with the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


def run_all(
    work: Callable[[In], Out],
    items: Sequence[In],
    threads: int,
    *,
    patience: float,
    on_wait: Callable[[list[In]], None],
    on_done: Callable[[], None] = lambda: None,
) -> list[Out]:
    """``[work(item) for item in items]``, a few at a time.

    Args:
        threads: at most so many at a time.
        patience: seconds.
        on_wait: called in this thread with the items that are not done, each time that none was for ``patience``.
        on_done: called in this thread for each item that is done.

    Raises:
        Exception: what ``work`` raises; the rest is then left.
    """
    waiting: SimpleQueue[int] = SimpleQueue()
    finished: SimpleQueue[tuple[int, Out | None, BaseException | None]] = SimpleQueue()
    for number in range(len(items)):
        waiting.put(number)

    def run() -> None:
        while True:
            try:
                number = waiting.get_nowait()
            except Empty:
                return
            try:
                finished.put((number, work(items[number]), None))
            except BaseException as error:
                finished.put((number, None, error))

    for _ in range(min(threads, len(items))):
        threading.Thread(target=run, daemon=True).start()
    results: dict[int, Out] = {}
    while len(results) < len(items):
        try:
            news = finished.get(timeout=patience)
        except Empty:
            news = None
        if news is None:
            on_wait([item for number, item in enumerate(items) if number not in results])
            continue
        number, result, error = news
        if error is not None:
            raise error
        results[number] = result  # type: ignore[assignment]
        on_done()
    return [results[number] for number in range(len(items))]


def within(seconds: float, work: Callable[[], Out]) -> Out:
    """``work()``, given up after so many seconds.

    Raises:
        TimeoutError: it was.
        Exception: what ``work`` raises.
    """

    def give_up(items: list[None]) -> None:
        raise TimeoutError(f"it was not whole after {seconds:.0f} s")

    (result,) = run_all(lambda _: work(), [None], 1, patience=seconds, on_wait=give_up)
    return result
