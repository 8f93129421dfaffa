# SPDX-License-Identifier: Apache-2.0
"""Run a soak's engines: the loads, and the one that reads their texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from ._job import Event
from ._launch import Ended, ended_by_sigterm
from ._session import Session
from .soak import MODULE, SoakJob, Text, texts_of


@dataclass
class Soaked:
    """What came of a soak.

    Attributes:
        ended: side -> its engine.
        texts: side -> what it answered, of engines that have not failed.
        judge: the engine that read the texts; None where there were none.
        gaps: text -> what the judge found, see ``_soak_engine``.
    """

    ended: dict[str, Ended] = field(default_factory=dict)
    texts: dict[str, list[Text]] = field(default_factory=dict)
    judge: Ended | None = None
    gaps: dict[Text, list[float]] = field(default_factory=dict)


def run_soak(
    jobs: Mapping[str, SoakJob],
    judge: SoakJob,
    *,
    at_once: bool,
    timeout: float,
    under: tuple[str, ...] = (),
    on_event: Callable[[str, Event], None] = lambda name, event: None,
) -> Soaked:
    """Run the loads, and have their texts read.

    Args:
        jobs: side -> its load.
        judge: who reads the texts.
        at_once: all engines at the same time, the judge's too; else one after the other.
        timeout: seconds for one engine, its start included.
        under: a command that runs Python, for the loads alone.
        on_event: called with the name of an engine's job and what it says.
    """
    found = Soaked()
    with ended_by_sigterm(), ExitStack() as stack:
        deadlines: dict[str, float] = {}

        def begun(job: SoakJob, under: tuple[str, ...] = ()) -> Session:
            deadlines[job.label] = time.monotonic() + timeout
            return stack.enter_context(Session(MODULE, job, lambda event: on_event(job.label, event), under=under))

        def left(label: str) -> float:
            return max(0.0, deadlines[label] - time.monotonic())

        def finish(side: str, session: Session) -> None:
            session.wait_for("soaked", left(side))
            session.wait_for_end(left(side))
            found.ended[side] = session.ended()

        reader = begun(judge) if at_once else None
        running: dict[str, Session] = {}
        for side, job in jobs.items():
            running[side] = begun(job, under)
            if not at_once:
                finish(side, running[side])
        if at_once:
            for side, session in running.items():
                finish(side, session)
        for side, ended in found.ended.items():
            if ended.error is None:
                (soaked,) = [event for event in ended.events if event["event"] == "soaked"]
                found.texts[side] = texts_of(soaked)
        # The sides mostly agree: each text is read once.
        different = list(dict.fromkeys(text for several in found.texts.values() for text in several))
        if different:
            reader = reader or begun(judge)
            reader.wait_for("ready", left(judge.label))
            asked = {"texts": [[text.prompt, text.tokens] for text in different]}
            reader.ask(asked, "judged", left(judge.label))
            reader.wait_for_end()
            found.judge = reader.ended()
            for event in found.judge.events:
                if event["event"] == "judged":
                    found.gaps = dict(zip(different, event["gaps"], strict=True))
    return found
