"""A vLLM that no patch lists yet, and builds between releases: the day of a release, played again."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.program import program
from tests.workshop.cut import LAST, NEWEST, cut_catalogue, work
from vllm_hwplugin.patching import Catalogue, load_catalogue, make_plan
from vllm_hwplugin.patching.texts import Source, Status, default_folder
from vllm_hwplugin_workshop.cli import drift
from vllm_hwplugin_workshop.cli._drift_report import check, exit_status

# Where no hunk for the release before fitted.
WORK = work()
ADD = "vllm/v1/add.py"


@pytest.fixture(scope="session")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cut_catalogue(tmp_path_factory.mktemp("cut") / "patches")


@pytest.fixture
def newest(vllm_tree: Callable[[str], Source], cut: Path, tmp_path: Path) -> Path:
    """A folder with the newest release, as far as the catalogue looks at it, that does not say its version."""
    source = vllm_tree(NEWEST)
    for path in {path for feature in load_catalogue(cut).features for path in feature.paths}:
        if (text := source.read(path)) is not None:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_bytes(text.encode())
    return tmp_path


def test_ahead_names_the_work_of_a_release_and_nothing_else(
    cut: Path, newest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drift, "load_catalogue", lambda: load_catalogue(cut))
    result = program("drift", "--ahead", str(newest), "--json", "-")
    (target,) = json.loads(result.stdout)["targets"]
    assert (result.exit_code, target["version"], target["last"]) == (1, None, LAST)
    verdicts = {item["feature"]: item for item in target["features"]}
    assert {name for name, item in verdicts.items() if not item["expected"]} == WORK
    # Not offered where the last release does not need them, whether or not that range has an end.
    for name in ("v2-graph-addresses", "v2-capture-metadata", "backport-dp-drafter"):
        assert verdicts[name]["status"] == "not-needed"
        assert f"so it is in {LAST}, and this version is not reviewed" in verdicts[name]["reason"]
    texts = json.loads((default_folder() / "texts.json").read_text())
    used = {item.path for one in load_catalogue(cut).features if one.versions.covers(LAST) for item in one.texts}
    assert {item["path"] for item in target["relied_on"]} == {path for path in used if NEWEST in texts[path]}
    counted = {item["path"]: item["changed"] for item in target["relied_on"]}
    shown = program("drift", "--ahead", str(newest), "--quiet", "--show").stdout
    headings = [line for line in shown.splitlines() if not line.startswith(" ")]
    assert {line.split(": ")[1] for line in headings} == {*WORK, *(f"read {path}" for path in counted)}
    for heading, path in ((line, path) for line in headings for path in counted if f": read {path}: " in line):
        diff = shown.partition(f"{heading}\n")[2].partition("\nvllm ")[0].splitlines()
        added, removed = (sum(line.startswith(f"  {sign}") for line in diff) for sign in "+-")
        assert f": {counted[path]} since {LAST}" in heading
        assert counted[path] == f"+{added} -{removed}" != "+0 -0"


def test_carry_writes_what_people_have_written(cut: Path, newest: Path, tmp_path: Path) -> None:
    """Byte by byte, but for the features that need somebody."""
    catalogue = tmp_path / "carried"
    shutil.copytree(cut, catalogue)
    command = ("patches", "carry", NEWEST, "--from", f"{newest}@{NEWEST}", "--catalogue", str(catalogue))
    result = program(*command)
    assert result.exit_code == 1
    assert {line.split(": ")[1] for line in result.stdout.splitlines() if line.startswith("to do")} == WORK
    written = {file.relative_to(catalogue): file.read_bytes() for file in catalogue.rglob("*") if file.is_file()}
    right = {
        file.relative_to(default_folder()): file.read_bytes() for file in default_folder().rglob("*") if file.is_file()
    }
    assert {name for name in written.keys() | right.keys() if written.get(name) != right.get(name)} <= {
        path for path in right if path.parts[0] in WORK
    }
    # What is left is named again, and nothing is written twice.
    assert program(*command).stdout.splitlines() == [
        line for line in result.stdout.splitlines() if line.startswith("to do")
    ]
    assert all((catalogue / name).read_bytes() == data for name, data in written.items())


def test_carry_takes_hunks_whose_ranges_end_along(small_catalogue: Path, small_tree: Callable[[], Path]) -> None:
    """As `==0.32.0` behind a hunk; an older hunk of the same lines stays what it was for."""
    folder = small_catalogue / "graphs"
    diff = folder / "graphs.diff"
    heading, _, hunk = diff.read_text().partition("@@")
    hunk = re.sub("^(.* @@)", rf"@@\1 >=0.30,<{NEWEST}", hunk)
    diff.write_text(f"{heading}{hunk}{heading}{hunk.replace(f'>=0.30,<{NEWEST}', '<0.30').replace('b + a', 'a')}")
    toml = folder / "patch.toml"
    toml.write_text(toml.read_text().replace("<0.34.0", f"<{NEWEST}"))
    tree = f"{small_tree()}@{NEWEST}"
    assert program("patches", "carry", NEWEST, "--from", tree, "--catalogue", str(small_catalogue)).exit_code == 0
    for version, result in ((NEWEST, "b + a"), (LAST, "b + a"), ("0.29.0", "return a\n")):
        source = drift.open_target(f"{small_tree()}@{version}", drift.Index())
        assert result in make_plan(load_catalogue(small_catalogue), source, {}).files[ADD].text


@pytest.mark.parametrize("ends", [">=0.26.0,<0.34.0", ">=0.26.0"])
def test_a_later_version_inherits_what_is_not_needed(
    small_tree: Callable[[], Path], add_feature: Callable[..., None], tmp_path: Path, ends: str
) -> None:
    """Also in a process, where `VLLM_HWPLUGIN_TRY_UNLISTED` would else offer hunks for a vLLM without the fault."""
    gate = "VLLM_HWPLUGIN_DRAFT_FULL_GRAPH"
    extra = f'[[not_needed]]\nversions = "{ends}"\nreason = "mended"\n'
    add_feature(tmp_path / "patches", "old", gate, "a + b", "b + a", versions=">=0.20,<0.26", extra=extra)
    catalogue = load_catalogue(tmp_path / "patches")
    tree = drift.open_target(f"{small_tree()}@0.34.1.dev3", drift.Index())
    report = check(catalogue, "main", tree, ahead=True)
    assert ([item.status for item in report.verdicts], exit_status([report])) == ([Status.NOT_NEEDED], 0)
    assert make_plan(catalogue, tree, {}, try_unlisted=True).features["old"].state == "not-needed"


def test_only_the_newest_hunks_are_offered(small_catalogue: Path, small_tree: Callable[[], Path]) -> None:
    """That those of an older vLLM fit says nothing of what it has become."""
    diff = small_catalogue / "graphs/graphs.diff"
    heading, _, hunk = diff.read_text().partition("@@")
    first = re.sub("^(.* @@)", r"@@\1 <0.33", hunk)
    diff.write_text(f"{heading}{first}{heading}{first.replace('<0.33', '>=0.33').replace('total', 'sum')}")
    tree = drift.open_target(f"{small_tree()}", drift.Index(), ahead=True)
    report = check(load_catalogue(small_catalogue), "main", tree, ahead=True)
    assert (report.fitting, exit_status([report])) == ({"context"}, 1)


class Build:
    """A release under the name of a build between two."""

    label = "a nightly"

    def __init__(self, source: Source, version: str) -> None:
        self.version, self.read = version, source.read


@pytest.mark.parametrize(
    ("version", "release", "there"),
    [
        ("0.26.1rc1.dev251", "0.27.0", {"backport-mtp-embeddings", "backport-reasoning-end", "backport-vacated-row"}),
        ("0.26.1rc1.dev251", "0.26.0", set()),
        ("0.27.2rc1.dev110+g0a1b2c3d4", "0.28.0", {"backport-nan-logits"}),
    ],
)
def test_a_build_between_releases_is_asked_for_the_result(
    vllm_tree: Callable[[str], Any], version: str, release: str, there: set[str]
) -> None:
    """It may have what vLLM wrote in place of a backport, which is not drift."""
    names = {"backport-mtp-embeddings", "backport-reasoning-end", "backport-vacated-row", "backport-nan-logits"}
    chosen = Catalogue(tuple(one for one in load_catalogue().features if one.id in names))
    report = check(load_catalogue(), version, Build(vllm_tree(release), version), chosen, released=vllm_tree)
    assert {item.feature for item in report.verdicts if item.status is Status.UPSTREAM} == there
    # What it does not have is still offered.
    assert all(item.status is not Status.UNLISTED or item.feature in report.fitting for item in report.verdicts)
