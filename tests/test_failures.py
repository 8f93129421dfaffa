# SPDX-License-Identifier: Apache-2.0
"""The table of docs/failures.md, walked: every row under every column, in processes of their own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from . import failures
from .failure_scenarios import PATCHES, Scenario
from .failure_scenarios_others import OTHERS
from .patching.madeup import make_project

# What a scenario comes to: the error that ends the process, or what the log and the states say.
OUTCOME = """
import logging

class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []
    def emit(self, entry):
        self.lines.append([entry.levelno, entry.getMessage()])

def outcome():
    log, lines = logging.getLogger("vllm.hwplugin"), Lines()
    log.addHandler(lines)
    log.propagate = False
    log.setLevel(logging.INFO)
    try:
        found = attempt()
    except Exception as error:
        return {"stops": f"{type(error).__name__}: {error}"}
    # Not above: a slip of the scenario is no failure of the process.
    concerned, others = found
    return {"stops": None, "lines": lines.lines, "concerned": concerned, "others": others}
"""


SCENARIOS = PATCHES | OTHERS


def test_every_row_can_be_brought_about() -> None:
    assert list(SCENARIOS) == [failure.id for failure in failures.FAILURES]


def test_the_page_is_up_to_date() -> None:
    assert failures.PAGE.read_text(encoding="utf-8") == failures.markdown(), "run `make docs`"


CASES = [
    pytest.param(failure, scenario, id=f"{failure.id} {number}" if number else failure.id)
    for failure in failures.FAILURES
    for number, scenario in enumerate(SCENARIOS[failure.id])
]


@pytest.mark.parametrize(("failure", "scenario"), CASES)
def test_a_failure_does_what_the_table_says(failure: failures.Failure, scenario: Scenario, tmp_path: Path) -> None:
    project = make_project(tmp_path)
    scenario.change(project)
    places = {"CACHE": str(project.cache), "SECOND": str(project.folder / "second")}
    code = "\n".join([*(f"{name} = {value!r}" for name, value in places.items()), scenario.attempt, OUTCOME])
    variables = dict(scenario.variables)
    for name in {"TMPDIR", "VLLM_HWPLUGIN_PATCHES"} & variables.keys():
        variables[name] = str(project.folder / variables[name])
    columns = {"auto": variables, "strict": {**variables, "VLLM_HWPLUGIN_STRICT": "1"}}
    expected = {"auto": failure.auto, "strict": failure.strict}
    if failure.on is not None:
        columns["on"], expected["on"] = {**variables, scenario.gate: "on"}, failure.on
    found = project.outcomes(code, columns)
    assert {name: judge(answer) for name, answer in found.items()} == expected, found


def judge(answer: dict[str, Any]) -> str:
    """The outcome in the table's words."""
    if answer["stops"] is not None:
        return "stops"
    lines = [text for level, text in answer["lines"] if level >= logging.WARNING]
    concerned, others = set(answer["concerned"].values()), set(answer["others"].values())
    if lines and concerned and "live" not in concerned:
        if len(others) > 1:
            return "half off"
        return "off" if others == {"live"} else "all off"
    # The line that says what is live is always there.
    said = [text for _, text in answer["lines"] if not text.startswith("vllm-hwplugin ")]
    return "said" if said or lines else "nothing"
