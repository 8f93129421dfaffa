# SPDX-License-Identifier: Apache-2.0
"""The table of docs/failures.md, walked: every row under every column, in processes of their own."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

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


PAGE = Path(__file__).parents[1] / "docs" / "failures.md"
# What fails, and what that does by default, where the feature's gate says `on`, and in strict mode.
ROWS = re.findall(r"^\| (.+) \| ([\w ]+) \| ([\w -]+) \| ([\w ]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
SCENARIOS = PATCHES | OTHERS


def test_every_row_can_be_brought_about() -> None:
    assert {name: [what for what, *_ in ROWS if name in what] for name in SCENARIOS} == {
        name: [what] for name, (what, *_) in zip(SCENARIOS, ROWS, strict=True)
    }


CASES = [
    pytest.param(row[1:], scenario, id=f"{name} {number}" if number else name)
    for (name, scenarios), row in zip(SCENARIOS.items(), ROWS, strict=False)
    for number, scenario in enumerate(scenarios)
]


@pytest.mark.parametrize(("outcomes", "scenario"), CASES)
def test_a_failure_does_what_the_table_says(outcomes: tuple[str, str, str], scenario: Scenario, tmp_path: Path) -> None:
    project = make_project(tmp_path)
    scenario.change(project)
    places = {"CACHE": str(project.cache), "SECOND": str(project.folder / "second")}
    code = "\n".join([*(f"{name} = {value!r}" for name, value in places.items()), scenario.attempt, OUTCOME])
    variables = dict(scenario.variables)
    for name in {"TMPDIR", "VLLM_HWPLUGIN_PATCHES"} & variables.keys():
        variables[name] = str(project.folder / variables[name])
    demands = ({}, {scenario.gate: "on"}, {"VLLM_HWPLUGIN_STRICT": "1"})
    columns = dict(zip(("auto", "on", "strict"), demands, strict=True))
    expected = {name: outcome for name, outcome in zip(columns, outcomes, strict=True) if outcome != "-"}
    found = project.outcomes(code, {name: variables | columns[name] for name in expected})
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
    # The line that says what is patched in is always there.
    said = [text for _, text in answer["lines"] if not text.startswith("patched in on ")]
    return "said" if said or lines else "nothing"
