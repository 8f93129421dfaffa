# SPDX-License-Identifier: Apache-2.0
"""``doctor`` foretells what ``install()`` does: both in the same environments, on a made-up package."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..patching.madeup import EDITS, GATES, OTHER_EDITS, Project, make_project

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
    "bad switch": {GATE: "perhaps"},
    "bad switch, strict": {GATE: "perhaps", "VLLM_HWPLUGIN_STRICT": "1"},
    "bad switch, another on": {GATE: "perhaps", OTHER_GATE: "on"},
    "bad strictness": {"VLLM_HWPLUGIN_STRICT": "perhaps"},
}
FIX = "VLLM_HWPLUGIN_PATCH_ACME_FIX"
OUTSIDE: dict[str, dict[str, str]] = {
    **{name: ENVIRONMENTS[name] for name in ("default", "strict", "off", "switched off", "bad value")},
    "outside on": {FIX: "on"},
    "outside off": {FIX: "off"},
    "outside off, strict": {FIX: "off", "VLLM_HWPLUGIN_STRICT": "1"},
    "outside bad value": {FIX: "perhaps"},
    "outside misspelt": {f"{FIX}ED": "on"},
    "outside on, switched off": {FIX: "on", "VLLM_HWPLUGIN": "0"},
}

BOTH = """
    import logging
    logging.disable()
    from vllm_hwplugin.cli import _diagnosis

    def outcome():
        found = _diagnosis.diagnose(catalogue=_catalogue.load_catalogue(Path(PATCHES)))
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


def _age(project: Project) -> None:
    project.age()
    project.write("vllm/v1/beta.py", "# newer\n" + project.read("vllm/v1/beta.py"))


def _spoil(project: Project) -> None:
    diff = project.patches / BASE / "edit.diff"
    diff.write_text(diff.read_text().replace("+    return mul(", "+    return mul(("))


@pytest.mark.parametrize("change", [None, Project.drift, Project.tear, _age, Project.forget_version, _spoil])
def test_doctor_says_what_install_does(tmp_path: Path, change: Callable[[Project], None] | None) -> None:
    project = make_project(tmp_path)
    project.feature(BASE, EDITS, gate=GATE)
    project.feature(NEEDS, {"vllm/v1/pack/inner.py": [("'inner'", "'x'")]}, gate=NEEDS_GATE, requires=[BASE])
    project.feature(OTHER, OTHER_EDITS, gate=OTHER_GATE)
    if change is not None:
        change(project)
    answers = project.outcomes(f"PATCHES = {str(project.patches)!r}\n" + textwrap.dedent(BOTH), ENVIRONMENTS)
    seen = set()
    for name, answer in answers.items():
        seen.add(answer["install"].partition(":")[0])
        _agree(name, answer)
    # The environments are worth walking only as long as they differ.
    assert len(seen) > 1


def _fits(project: Project) -> None:
    """As it was made."""


def _uninstall(project: Project) -> None:
    (project.site / "acme_lib-1.0.dist-info").rename(project.site / "gone")


def _open_to_all(project: Project) -> None:
    (project.folder / "acme").chmod(0o777)


def _empty(project: Project) -> None:
    (project.folder / "acme" / "fix" / "edit.diff").write_text("")


@pytest.mark.parametrize("change", [_fits, _uninstall, _open_to_all, _empty])
def test_doctor_says_what_install_does_with_a_catalogue_from_outside(
    tmp_path: Path, change: Callable[[Project], None]
) -> None:
    project = make_project(tmp_path)
    project.feature(BASE, EDITS, gate=GATE)
    project.distribution("acme-lib", "1.0", {"acme_lib/__init__.py": "", "acme_lib/core.py": "VALUE = 1\n"})
    edits, more = {"acme_lib/core.py": [("VALUE = 1", "VALUE = 2")]}, 'distribution = "acme-lib"'
    catalogue = project.catalogue("acme")
    requires = [f"vllm-hwplugin/{BASE}"]
    project.feature("fix", edits, gate=None, requires=requires, catalogue=catalogue, versions="==1.0", more=more)
    change(project)
    named = {"VLLM_HWPLUGIN_PATCHES": str(catalogue)}
    environments = {name: variables | named for name, variables in OUTSIDE.items()}
    answers = project.outcomes(f"PATCHES = {str(project.patches)!r}\n" + textwrap.dedent(BOTH), environments)
    for name, answer in answers.items():
        _agree(name, answer)
    assert answers["default"]["states"][BASE] == "live"
    assert answers["outside on"]["install"].startswith("works" if change is _fits else "stops")
    assert answers["outside misspelt"]["install"].startswith("stops")


def _agree(name: str, answer: dict[str, Any]) -> None:
    works = answer["install"] == "works"
    states = answer.get("installed", {}).values()
    idle = "refused" in states and "live" not in states
    assert answer["exit"] == (0 if works and not idle else 1), (name, answer)
    if not works:
        return
    if answer["installed"]:
        assert answer["states"] == answer["installed"], (name, answer)
    for feature, state in answer["states"].items():
        subjects = (re.split(" (?:is|are) not patched in, ", line)[0] for line in answer["warnings"])
        said = any(feature in subject.split(", ") for subject in subjects)
        assert said == (state == "refused"), (name, feature, answer)
