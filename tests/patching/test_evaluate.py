"""Verdicts on a feature and a version, from text alone."""

from __future__ import annotations

import pytest

from vllm_hwplugin.base.versions import Versions
from vllm_hwplugin.patching import Catalogue, Feature
from vllm_hwplugin.patching._evaluate import Texts, fit
from vllm_hwplugin.patching.texts import Conflict, FileDiff, Status
from vllm_hwplugin_workshop.verdicts import evaluate, evaluate_together

from .texts import ALPHA, GATE_2, OTHER, PATH, Memory, feature, file_diff

CHANGED = ALPHA.replace("line 3\n", "line three\n").replace("line 15\n", "line fifteen\n")
BETA = ALPHA.replace("line", "row")
ONE = feature(file_diff(ALPHA, CHANGED), file_diff(BETA, BETA.replace("row 9\n", "row nine\n"), OTHER))


def changes(old: str, new: str, name: str = "two", text: str = ALPHA) -> Feature:
    return feature(file_diff(text, text.replace(old, new)), name=name, gate=GATE_2)


def conflicts_of(catalogue: Catalogue, source: Memory) -> list[Conflict]:
    verdicts, conflicts = evaluate_together(catalogue, source)
    assert verdicts == [evaluate(feature, source) for feature in catalogue.features]
    return conflicts


def test_half_a_change_that_is_there_already_does_not_apply() -> None:
    half = Memory({PATH: ALPHA.replace("line 3\n", "line three\n"), OTHER: BETA})
    assert evaluate(ONE, half).status is Status.DRIFTED
    assert fit(ONE, Texts(half)).edits == {}


@pytest.mark.parametrize(
    "version", ["0.19.1", "0.34.0", "0.33.0rc1", "0.33.1", "0.33.0.post1", "0.32.1.dev3+gabc", "x"]
)
def test_unlisted(version: str) -> None:
    """A release that was not there to be checked is unlisted though the range covers it, and so is a dev version."""
    source = Memory({PATH: ALPHA, OTHER: BETA}, version=version)
    assert evaluate(ONE, source).status is Status.UNLISTED
    assert fit(ONE, Texts(source)).edits == {}


def test_a_version_that_is_spelt_out_is_listed() -> None:
    own = feature(*ONE.files, versions="===0.32.1.dev3+gabc")
    assert evaluate(own, Memory({PATH: ALPHA, OTHER: BETA}, version="0.32.1.dev3+gabc")).status is Status.APPLIES


def of(diff: FileDiff, versions: str) -> FileDiff:
    return diff._replace(hunks=tuple(hunk._replace(versions=Versions(versions)) for hunk in diff.hunks))


RANGES = feature(
    of(file_diff(ALPHA, ALPHA.replace("line 3\n", "x\n")), "<0.24 || >=0.30,<0.31"),
    of(file_diff(ALPHA, ALPHA.replace("line 3\n", "y\n")), ">=0.24,<0.25"),
    of(file_diff(ALPHA + "end\n", ALPHA.replace("line 20\n", "z\n") + "end\n"), ">=0.25,<0.30 || >=0.31"),
    file_diff(BETA, BETA + "end\n", OTHER),
)


@pytest.mark.parametrize(("version", "line"), [("0.20.0", "x\n"), ("0.24.0", "y\n"), ("0.30.0", "x\n")])
def test_a_version_gets_its_hunks_and_those_without_a_range(version: str, line: str) -> None:
    result = fit(RANGES, Texts(Memory({PATH: ALPHA, OTHER: BETA}, version=version)))
    assert {path: [edit.lines for edit in edits] for path, edits in result.edits.items()} == {
        PATH: [(line,)],
        OTHER: [("end\n",)],
    }


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("0.40.0", "z\n"),
        ("0.34.0rc1", "z\n"),
        ("0.24.0rc1", "y\n"),
        ("0.24.1", "y\n"),
        ("0.31.0+cpu", "z\n"),
        ("dev", "z\n"),
    ],
)
def test_try_unlisted_takes_the_hunks_for_the_nearest_version(version: str, line: str) -> None:
    texts = Texts(Memory({PATH: "new\n" + ALPHA + "end\n", OTHER: BETA}, version=version))
    result = fit(RANGES, texts, try_unlisted=True)
    assert result.verdict.status is Status.APPLIES
    assert [edit.lines for edit in result.edits[PATH]] == [(line,)]


@pytest.mark.parametrize("version", ["0.33.1", "0.34.0"])
def test_try_unlisted_takes_no_others(version: str) -> None:
    """Older hunks would fit here."""
    result = fit(RANGES, Texts(Memory({PATH: ALPHA, OTHER: BETA}, version=version)), try_unlisted=True)
    assert (result.verdict.status, result.edits) == (Status.UNLISTED, {})


def test_conflict_names_both_the_file_and_the_lines() -> None:
    catalogue = Catalogue((changes("line 10\n", "ten\n", "a"), changes("line 9\nline 10\n", "nine\n", "b")))
    (conflict,) = conflicts_of(catalogue, Memory())
    assert conflict == Conflict(PATH, ("a", "b"), (9, 10))
    assert str(conflict) == f"a and b both change {PATH} at lines 9 to 10"
