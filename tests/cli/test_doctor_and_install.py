# SPDX-License-Identifier: Apache-2.0
"""``doctor`` foretells what ``install()`` does: both in the same environments, on a made-up package."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..patching.madeup import EDITS, GATES, Project, make_project

BASE, NEEDS, OTHER = "base", "needs", "other"
GATE, NEEDS_GATE, OTHER_GATE = GATES

ENVIRONMENTS: dict[str, dict[str, str]] = {
    "default": {},
    "strict": {"VLLM_HWPLUGIN_STRICT": "1"},
    "on": {GATE: "on"},
    "another on": {OTHER_GATE: "on"},
    "off": {GATE: "off"},
    "off, strict": {GATE: "off", "VLLM_HWPLUGIN_STRICT": "1"},
    "off, and what requires it on": {GATE: "off", NEEDS_GATE: "on"},
    "tried": {"VLLM_HWPLUGIN_TRY_UNLISTED": "1"},
    "tried, strict": {"VLLM_HWPLUGIN_TRY_UNLISTED": "1", "VLLM_HWPLUGIN_STRICT": "1"},
    "switched off": {"VLLM_HWPLUGIN": "0", GATE: "on", "VLLM_HWPLUGIN_STRICT": "1"},
    "bad value": {"VLLM_HWPLUGIN_SLP": "perhaps"},
    "bad value, on": {"VLLM_HWPLUGIN_SLP": "perhaps", GATE: "on"},
    "bad strictness": {"VLLM_HWPLUGIN_STRICT": "perhaps"},
}

BOTH = """
    import logging
    logging.disable()
    from vllm_hwplugin.cli import _diagnosis

    def outcome():
        found = _diagnosis.diagnose(catalog=_catalog.load_catalog(Path(PATCHES)))
        doctor = {
            "exit": found.exit_code, "problems": found.problems, "warnings": found.warnings,
            "states": {row.id: row.state for row in found.features},
        }
        try:
            entry = install()
        except Exception as error:
            return doctor | {"install": f"stops: {error}"}
        states = {name: item["state"] for name, item in entry.features.items()}
        return doctor | {"install": "does nothing" if entry.error else "works", "installed": states}
"""


def _drift(project: Project) -> None:
    project.write("vllm/v1/alpha.py", project.read("vllm/v1/alpha.py").replace("value * 2", "value*2"))


def _tear(project: Project) -> None:
    (project.site / "vllm/v1/alpha.py").write_bytes(b"# \xe9\n")


def _age(project: Project) -> None:
    project.write("vllm/_version.py", "__version__ = version = '0.99.0'\n")
    project.write("vllm/v1/beta.py", "# newer\n" + project.read("vllm/v1/beta.py"))


def _forget_version(project: Project) -> None:
    (project.site / "vllm/_version.py").write_bytes(b"# \xe9\n")


@pytest.mark.parametrize("change", [None, _drift, _tear, _age, _forget_version])
def test_doctor_says_what_install_does(tmp_path: Path, change: Callable[[Project], None] | None) -> None:
    project = make_project(tmp_path)
    project.feature(BASE, EDITS, gate=GATE)
    project.feature(NEEDS, {"vllm/v1/pack/inner.py": [("'inner'", "'x'")]}, gate=NEEDS_GATE, requires=[BASE])
    project.feature(OTHER, {"vllm/v1/beta.py": [("double(double(value))", "double(value)")]}, gate=OTHER_GATE)
    if change is not None:
        change(project)
    answers = project.outcomes(f"PATCHES = {str(project.patches)!r}\n" + textwrap.dedent(BOTH), ENVIRONMENTS)
    seen = set()
    for name, answer in answers.items():
        seen.add(answer["install"].partition(":")[0])
        _agree(name, answer)
    # The environments are worth walking only as long as they differ.
    assert len(seen) > 1


def _agree(name: str, answer: dict[str, Any]) -> None:
    works = answer["install"] == "works"
    assert answer["exit"] == (0 if works else 1), (name, answer)
    if not works:
        return
    if answer["installed"]:
        assert answer["states"] == answer["installed"], (name, answer)
    for feature, state in answer["states"].items():
        said = any(line.startswith(f"{feature} is not live") for line in answer["warnings"])
        assert said == (state == "refused"), (name, feature, answer)
