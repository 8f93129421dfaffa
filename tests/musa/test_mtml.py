# SPDX-License-Identifier: Apache-2.0
"""Facts about the GPUs, from a stand-in of pymtml."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest

from ..platforms import standins
from ..platforms.realvllm import own


@pytest.fixture
def mtml(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    library = standins.pymtml()
    monkeypatch.setitem(sys.modules, "pymtml", library)
    yield own("vllm_hwplugin.musa._mtml")
    assert library.open == 1, "the library was shut down, or never started"


def test_threads_share_one_library(mtml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first question of each of several threads, at once: a second start, or an end in between, is an error."""
    library = sys.modules["pymtml"]
    start, asked = library.mtmlLibraryInit, threading.Barrier(4)

    def slow() -> None:
        time.sleep(0.05)
        start()

    monkeypatch.setattr(library, "mtmlLibraryInit", slow)

    def ask(index: int) -> str:
        asked.wait()
        return str(mtml.uuid(index))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, [0, 1, 2, 0])) == ["uuid-0", "uuid-1", "uuid-2", "uuid-0"]
