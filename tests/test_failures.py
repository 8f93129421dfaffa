# SPDX-License-Identifier: Apache-2.0
"""docs/failures.md: every row under every column, each in a new process; and `doctor` foretells what a process does."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from .failure_scenarios import INSTALL, PATCHES, Scenario
from .failure_scenarios_others import OTHERS
from .patching.madeup import make_project

# The outcome of a scenario: the error that ends the process, or log lines and states.
OUTCOME = """
import logging

class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []
    def emit(self, entry):
        self.lines.append([entry.levelno, entry.getMessage()])

def outcome():
    if ATTEMPT_IS_INSTALL:
        from vllm_hwplugin.cli._diagnosis import diagnose
        found = diagnose(catalogue=_catalogue.load_catalogue(_catalogue.default_folder()))
        doctor = {"exit": found.exit_code, "states": {row.id: row.state for row in found.features}}
        return attempted() | {"doctor": doctor | {"warnings": found.warnings}}
    return attempted()

def attempted():
    log, lines = logging.getLogger("vllm.hwplugin"), Lines()
    log.addHandler(lines)
    log.propagate = False
    log.setLevel(logging.INFO)
    try:
        states = attempt()
    except Exception as error:
        return {"stops": f"{type(error).__name__}: {error}"}
    # Outside of `try`: a mistake in the scenario is no failure of the process.
    affected, others = states
    return {"stops": None, "lines": lines.lines, "affected": affected, "others": others}
"""


PAGE = Path(__file__).parents[1] / "docs" / "failures.md"
# A row has the failure, and its outcomes by default, with the feature's switch at `on`, and in strict mode.
ROWS = re.findall(r"^\| (.+) \| ([\w ]+) \| ([\w -]+) \| ([\w ]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
SCENARIOS = PATCHES | OTHERS


def test_every_row_has_a_scenario() -> None:
    assert {name: [failure for failure, *_ in ROWS if name in failure] for name in SCENARIOS} == {
        name: [failure] for name, (failure, *_) in zip(SCENARIOS, ROWS, strict=True)
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
    constants = {"CACHE": str(project.cache), "SECOND": str(project.folder / "second"), "AFFECTED": scenario.affected}
    constants["ATTEMPT_IS_INSTALL"] = foretold = scenario.attempt == INSTALL
    code = "\n".join([*(f"{name} = {value!r}" for name, value in constants.items()), scenario.attempt, OUTCOME])
    variables = dict(scenario.variables)
    for name in {"TMPDIR", "VLLM_HWPLUGIN_PATCHES"} & variables.keys():
        variables[name] = str(project.folder / variables[name])
    demands = ({}, {scenario.gate: "on"}, {"VLLM_HWPLUGIN_STRICT": "1"})
    columns = dict(zip(("auto", "on", "strict"), demands, strict=True))
    expected = {name: outcome for name, outcome in zip(columns, outcomes, strict=True) if outcome != "-"}
    # No column of the page, but doctor and a process agree on them.
    further = FURTHER | {"off": {scenario.gate: "off"}} if foretold else {}
    demanded = {name: columns[name] for name in expected} | further
    outcomes_of = project.outcomes(code, {name: variables | demands for name, demands in demanded.items()})
    assert {name: in_words(outcomes_of[name]) for name in expected} == expected, outcomes_of
    for name, outcome in outcomes_of.items():
        if foretold:
            _check_doctor(name, outcome)


#: Further environments in which doctor foretells what a process does.
FURTHER: dict[str, dict[str, str]] = {
    "tried": {"VLLM_HWPLUGIN_TRY_UNLISTED": "1"},
    "switched off": {"VLLM_HWPLUGIN": "0", "VLLM_HWPLUGIN_STRICT": "1"},
    "bad strictness": {"VLLM_HWPLUGIN_STRICT": "perhaps"},
}


def _check_doctor(name: str, outcome: dict[str, Any]) -> None:
    doctor = outcome["doctor"]
    if outcome["stops"] is not None:
        assert doctor["exit"] == 1, (name, outcome)
        return
    states = outcome["affected"] | outcome["others"]
    # Where no plan can be made a process knows of no feature.
    states = {feature: state for feature, state in states.items() if state != "none"}
    assert doctor["exit"] == ("live" not in states.values() and name != "switched off"), (name, outcome)
    for feature, state in states.items():
        assert doctor["states"][feature] == state, (name, outcome)
        subjects = (re.split(" (?:is|are) not patched in, ", line)[0] for line in doctor["warnings"])
        said = any(feature in subject.split(", ") for subject in subjects)
        assert said == (state == "refused"), (name, feature, outcome)


def in_words(outcome: dict[str, Any]) -> str:
    """Return the outcome in the page's words."""
    if outcome["stops"] is not None:
        return "stops"
    warnings = [text for level, text in outcome["lines"] if level >= logging.WARNING]
    affected, others = set(outcome["affected"].values()), set(outcome["others"].values())
    if warnings and affected and "live" not in affected:
        if len(others) > 1:
            return "half off"
        return "off" if others == {"live"} else "all off"
    # Every start logs the features that are patched in.
    further = [text for _, text in outcome["lines"] if not text.startswith("patched in on ")]
    return "logged" if further else "nothing"
