# SPDX-License-Identifier: Apache-2.0
"""The engine of a child that makes it by ``LLM``, and what the child says of its start and its end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ._answer import Answer
from ._inside import ready_facts


@contextmanager
def engine(options: Mapping[str, Any], answer: Answer) -> Iterator[Any]:
    """An ``LLM`` with these options, which ``answer`` calls ready, and done where nothing was raised."""
    started = time.perf_counter()

    from vllm import LLM

    llm = LLM(**options)
    answer.say("ready", seconds=time.perf_counter() - started, pid=os.getpid(), **ready_facts(llm))
    yield llm
    # With multiprocessing on, an engine core that is not told outlives this process.
    llm.llm_engine.engine_core.shutdown()
    answer.say("done")
