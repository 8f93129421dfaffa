"""From somebody's diff to a catalogue that the engine reads: import, edit, save and check, in that order."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.program import program
from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.patching import Catalogue, make_plan, outside
from vllm_hwplugin.patching.texts import Plan
from vllm_hwplugin_workshop.cli import drift, patches_check, patches_edit, patches_import
from vllm_hwplugin_workshop.sources import Index, PipConfig, TreeSource

from ..authoring.made import git_diff
from ..conftest import PackageServer

PATH = "vllm/v1/add.py"
OLD = "import os\n\n\ndef add(a, b):\n    # Both numbers.\n    total = a + b\n    return total\n"
NEW = OLD.replace("    return total\n", "    return int(total)\n")
# Later versions say it in another way, and the last one says it right.
OTHER = OLD.replace("    total = a + b\n    return total\n", "    return sum((a, b))\n")
RIGHT = OTHER.replace("sum((a, b))", "int(sum((a, b)))")
TEXTS = {"0.30.0": OLD, "0.31.0": "# newer\n" + OLD, "0.32.0": OTHER, "0.33.0": NEW}


def run(*arguments: str, **more: Any) -> Any:
    return program("patches", *arguments, **more)


def imported(*arguments: str) -> tuple[int, dict[str, str]]:
    """The exit status of `import`, and what it says of each version."""
    result = run("import", *arguments)
    return result.exit_code, dict(re.findall(r"^vllm (\S+): ([^:\n]*)", result.stdout, re.MULTILINE))


def held() -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in Path("mine").rglob("*") if file.is_file()}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads the user's cache, asks a package index, or writes anywhere else."""
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for module in (patches_import, patches_edit, patches_check):
        monkeypatch.setattr(module, "Index", lambda: Index(PipConfig(index_url="http://127.0.0.1:9/simple"), retries=0))
    return tmp_path


@pytest.fixture
def trees(here: Path) -> list[str]:
    """The options that name the made-up versions."""
    for version, text in TEXTS.items():
        (here / version / "vllm/v1").mkdir(parents=True)
        (here / version / PATH).write_text(text)
    return [word for version in TEXTS for word in ("--vllm", tree(version))]


@pytest.fixture
def change(here: Path) -> Path:
    file = here / "change.patch"
    diff = git_diff(OLD, NEW, PATH) + git_diff("a = 1\n", "a = 2\n", "tests/test_add.py")
    subject = b"Subject: [PATCH] [Bugfix] Add whole numbers (#77)"
    file.write_bytes(b"From %s Mon Sep 17 00:00:00 2001\n%s\n\nThey were not.\n---\n%s" % (b"1" * 40, subject, diff))
    return file


def tree(version: str) -> str:
    return f"./{version}@{version}"


def plan(version: str) -> Plan:
    """What a process of that version would run."""
    features = outside.load_outside(Path("mine")).features
    return make_plan(Catalogue(features), TreeSource(Path(version), version), {})


def test_import_edit_save_check(trees: list[str], change: Path) -> None:
    """The story of a change that fits two versions, is in a third, and has to be made by hand for the one between."""
    assert imported(str(change), "--into", "mine", *trees) == (
        1,
        {"0.30.0": "exact", "0.31.0": "moved by 1 line", "0.32.0": "does not fit", "0.33.0": "upstream"},
    )
    (feature,) = outside.load_outside(Path("mine")).features
    assert (feature.id, feature.title) == ("mine/add-whole-numbers", "Add whole numbers")
    assert (feature.what, feature.origin) == ("They were not.", "vLLM PR 77")
    assert str(feature.versions) == ">=0.30,<0.32"
    assert [(file.path, [hunk.versions for hunk in file.hunks]) for file in feature.files] == [(PATH, [None])]
    assert plan("0.30.0").files[PATH].text == NEW
    assert plan("0.31.0").files[PATH].text == "# newer\n" + NEW
    assert plan("0.33.0").features[feature.id].state == "not-needed"

    result = run("edit", "mine/add-whole-numbers", "--vllm", tree("0.32.0"))
    assert result.exit_code == 1, result.output
    work = Path("add-whole-numbers-0.32.0")
    assert (work / PATH).read_text() == OTHER
    assert "+    return int(total)" in (work / "rejected.txt").read_text()
    (work / PATH).write_text(RIGHT)
    assert run("save", str(work)).exit_code == 2
    assert outside.load_outside(Path("mine")).features == (feature,)
    (work / "rejected.txt").unlink()
    result = run("save", str(work))
    assert result.exit_code == 0, result.output
    assert plan("0.32.0").files[PATH].text == RIGHT
    for version, text in (("0.30.0", NEW), ("0.31.0", "# newer\n" + NEW)):
        assert plan(version).files[PATH].text == text
    assert plan("0.33.0").features[feature.id].state == "not-needed"
    for arguments in (trees, ["--form"]):
        assert run("check", "mine", *arguments).exit_code == 0


def test_an_upstream_fix_is_green_on_its_first_day(
    here: Path, change: Path, server: PackageServer, write_wheel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a range that ends before the fix; later versions have the fixed lines in another form."""
    for module in (patches_import, drift):
        monkeypatch.setattr(module, "Index", lambda: Index(server.config, retries=0))
    texts = dict.fromkeys(SUPPORTED, OTHER) | {"0.30.0": OLD, "0.31.0": OLD, "0.32.0": NEW}
    for version, text in texts.items():
        server.add(write_wheel(here / "wheels", version, {"vllm/__init__.py": "", PATH: text}))
    arguments = (str(change), "--into", "mine", "--versions")
    assert imported(*arguments, ">=0.30,<0.32") == (0, {"0.30.0": "exact", "0.31.0": "exact"})
    (feature,) = outside.load_outside(Path("mine")).features
    assert (str(feature.versions), str(feature.not_needed[0].versions)) == (">=0.30,<0.32", ">=0.32")
    result = program("drift", "--catalogue", "mine", "--all", "--next")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (
        0,
        "vllm 0.33.0: mine/add-whole-numbers: not needed (vLLM has the change from 0.32.0 on)",
    )
    shutil.rmtree("mine")
    assert imported(*arguments, ">=0.30")[1]["0.33.0"] == "upstream"
    # A catalogue that says nothing of its range's end is told what to write.
    file = Path("mine/add-whole-numbers/patch.toml")
    file.write_text(file.read_text().partition("\n[[not_needed]]")[0])
    result = program("drift", "--catalogue", "mine", "--next")
    assert result.exit_code == 1
    assert 'vLLM 0.32.0 has the change: add [[not_needed]] with versions = ">=0.32.0"' in result.stdout
    # Where the lines that the change is for are back, a person has to look.
    server.add(write_wheel(here / "wheels", "0.33.0", {"vllm/__init__.py": "", PATH: "# back\n" + OLD}, build="2"))
    shutil.rmtree("mine")
    status, said = imported(*arguments, ">=0.30")
    assert (status, said["0.33.0"]) == (1, "does not fit")
    (feature,) = outside.load_outside(Path("mine")).features
    assert str(feature.not_needed[0].versions) == ">=0.32,<0.33"


def test_a_change_that_fits_no_version_begins_in_a_work_tree(trees: list[str], change: Path) -> None:
    """Such as an upstream pull request's, whose main branch has moved on."""
    result = run("import", str(change), "--into", "mine", "--vllm", tree("0.32.0"))
    assert result.exit_code == 1, result.output
    assert not Path("mine").exists()
    arguments = ("edit", "mine/add-whole-numbers", "--vllm", tree("0.32.0"), "--change", str(change), "--into", "work")
    assert run(*arguments).exit_code == 1
    (Path("work") / PATH).write_text(RIGHT)
    (Path("work") / "rejected.txt").unlink()
    result = run("save", "work")
    assert result.exit_code == 0, result.output
    (feature,) = outside.load_outside(Path("mine")).features
    assert (feature.title, feature.origin) == ("Add whole numbers", "vLLM PR 77")
    assert plan("0.32.0").files[PATH].text == RIGHT


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (PATH, "def f(:\n"),
        (PATH, None),
        (PATH, OLD),
        ("vllm/new.py", "a = 1\n"),
        ("edit.json", "{}"),
    ],
    ids=["no Python", "gone", "nothing changed", "a new file", "no note"],
)
def test_what_cannot_be_saved(trees: list[str], change: Path, path: str, text: str | None) -> None:
    run("import", str(change), "--into", "mine", *trees[:4])
    before = held()
    assert run("edit", "mine/add-whole-numbers", "--vllm", tree("0.30.0"), "--into", "work").exit_code == 0
    file = Path("work", path)
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    result = run("save", "work")
    # The line names the place.
    assert (result.exit_code, result.stderr.count("\n"), "work" in result.stderr) == (2, 1, True)
    assert held() == before


def test_a_change_is_not_saved_without_a_part_of_it(trees: list[str], change: Path) -> None:
    """A file that was removed from the work tree is no edit, and neither is what is left of the change."""
    run("import", str(change), "--into", "mine", *trees[:4])
    before = held()
    more = "vllm/v1/norm.py"
    Path(tree("0.30.0").partition("@")[0], more).write_text("a = 1\n")
    command = ("edit", "mine/add-whole-numbers", "--vllm", tree("0.30.0"), "--into", "work", "--file", more)
    assert run(*command).exit_code == 0
    Path("work", PATH).write_text(Path("work", PATH).read_text() + "# Ours.\n")
    Path("work", more).unlink()
    result = run("save", "work")
    assert (result.exit_code, f"work/{more}: " in result.stderr) == (2, True)
    assert held() == before


@pytest.mark.parametrize(
    ("held", "left"),
    [
        (">=0.33,<0.36", ["0.34.0", "0.35.2"]),
        (">=0.32.5,<0.33.9", ["0.32.5", "0.32.9"]),
        ("==0.*", ["0.20.0", "0.34.0", "0.99.0"]),
        ("!=0.31.0,<0.40", ["0.20.0", "0.34.0", "0.39.9"]),
        (">=0.33.0,<0.33.5", []),
    ],
)
def test_versions_that_were_not_edited_keep_what_they_had(
    trees: list[str], change: Path, held: str, left: list[str]
) -> None:
    """Also those that this release of the plugin does not know. And none gets the diffs that no range had it in."""
    run("import", str(change), "--into", "mine", *trees[:2])
    file = Path("mine/add-whole-numbers/patch.toml")
    file.write_text(re.sub(r"versions = .*", f'versions = "{held}"', file.read_text()))
    before = outside.load_outside(Path("mine")).features[0]
    Path("0.33.0", PATH).write_text(OLD)
    assert run("edit", "mine/add-whole-numbers", "--vllm", tree("0.33.0"), "--into", "work").exit_code == 0
    Path("work", PATH).write_text(RIGHT)
    result = run("save", "work")
    assert result.exit_code == 0, result.output
    after = outside.load_outside(Path("mine")).features[0]
    assert plan("0.33.0").files[PATH].text == RIGHT
    tried = [f"0.{minor}.{patch}" for minor in range(45) for patch in range(10)]
    assert {v for v in tried if after.versions.covers(v)} == {v for v in tried if before.versions.covers(v)}
    for version in left:
        one, other = (
            [(file.path, [hunk.lines for hunk in file.hunks]) for file in item.files_for(version)]
            for item in (after, before)
        )
        assert one == other, version


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("call", [1, 2])
def test_an_import_that_ends_half_way_leaves_the_catalogue_as_it_was(
    trees: list[str], change: Path, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException], call: int
) -> None:
    """A folder without its `patch.toml` would put every feature beside it out of force."""
    run("import", str(change), "--into", "mine", *trees[:2])
    before = sorted(Path("mine").rglob("*"))
    calls = iter(range(1, 9))
    write = Path.write_bytes

    def spoilt(file: Path, data: bytes) -> int:
        # What another process would see of the catalogue at this moment.
        assert len(outside.load_outside(Path("mine")).features) == 1
        if next(calls) == call:
            raise failure
        return write(file, data)

    monkeypatch.setattr(Path, "write_bytes", spoilt)
    assert run("import", str(change), "--into", "mine", "--id", "second", *trees[:2]).exit_code != 0
    assert sorted(Path("mine").rglob("*")) == before


def test_a_feature_is_replaced_as_a_whole(trees: list[str], change: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full before the new one has its name leaves the one that was there."""
    run("import", str(change), "--into", "mine", *trees[:2])
    before = held()
    run("edit", "mine/add-whole-numbers", "--vllm", tree("0.30.0"), "--into", "work")
    Path("work", PATH).write_text(NEW + "# more\n")
    rename = Path.rename

    def full(file: Path, target: Path) -> Path:
        if file.name.endswith(".new"):
            raise OSError("no room")
        return rename(file, target)

    monkeypatch.setattr(Path, "rename", full)
    assert (run("save", "work").exit_code, held()) == (2, before)


def test_check_finds_what_a_process_would_meet(trees: list[str], change: Path, here: Path) -> None:
    run("import", str(change), "--into", "mine", *trees[:4])
    first = Path("mine/add-whole-numbers")
    # Another feature of the same lines, for one version more.
    second = Path("mine/twice")
    second.mkdir()
    text = (first / "v1-add.diff").read_text()
    (second / "it.diff").write_text(text.replace("+    return int(total)", "+    return (total"))
    (second / "patch.toml").write_text(
        'id = "twice"\ntitle = "It"\nwhat = "It"\norigin = "us"\nremoval = "never"\nversions = ">=0.30.0,<0.33.0"\n'
    )
    result = run("check", "mine", *trees[:6])
    assert result.exit_code == 1
    found = re.findall(r"^(\S+) on vLLM (\S+): (.*)", result.stdout, re.MULTILINE)
    names = ["mine/add-whole-numbers", "mine/twice"]
    conflicts = [(name, version) for version in ("0.30.0", "0.31.0") for name in names]
    assert [(name, version) for name, version, what in found if what.startswith("conflict")] == conflicts
    assert [(name, version) for name, version, what in found if what.startswith("drifted")] == [(names[1], "0.32.0")]
    shutil.rmtree(first)
    assert "no Python" in run("check", "mine", *trees[:2]).stdout
    # What a process would leave out, and what is not there.
    (second / "it.diff").write_text(re.sub(r",\d \+", ",9 +", text))
    assert run("check", "mine", "--form").exit_code == 1
    (here / "empty").mkdir()
    assert [run("check", name).exit_code for name in ("empty", "nowhere")] == [1, 2]


def mail(subject: str, diff: bytes, commit: str = "1" * 40) -> bytes:
    head = f"From {commit} Mon Sep 17 00:00:00 2001\nFrom: J <j@example.org>\n"
    head += f"Subject: [PATCH] {subject}\n\nBecause.\n---\n"
    return head.encode() + diff + b"-- \n2.43.0\n\n"


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("v1/add.py", ()),
        ("add.py", ("--prefix", "vllm/v1")),
        ("usr/lib/python3.12/dist-packages/vllm/v1/add.py", ()),
    ],
    ids=["inside the package", "a named folder", "site-packages"],
)
def test_a_diff_that_was_made_elsewhere_than_above_the_package(
    trees: list[str], path: str, options: tuple[str, ...]
) -> None:
    Path("it.diff").write_bytes(git_diff(OLD, NEW, path))
    result = run("import", "it.diff", "--id", "add", "--into", "mine", *options, *trees[:4])
    assert result.exit_code == 0, result.output
    assert ("paths begin inside the package: vllm/ was put in front of them" in result.stdout) == (path == "v1/add.py")
    assert plan("0.30.0").files[PATH].text == NEW


def test_a_path_that_is_not_in_the_package_either(trees: list[str]) -> None:
    Path("it.diff").write_bytes(git_diff(OLD, NEW, "tests/add.py"))
    result = run("import", "it.diff", *trees[:4])
    assert (result.exit_code, "nothing to carry in tests/add.py (outside vllm/" in result.stderr) == (2, True)


def test_a_hunk_that_fits_with_less_context_is_reported_and_taken_on_request(trees: list[str]) -> None:
    """The line three above the change differs from version to version."""
    texts = {"0.30.0": OLD, "0.31.0": OLD.replace("def add(a, b):", "def add(a, b=0):")}
    for version, text in texts.items():
        Path(version, PATH).write_text(text)
    Path("it.diff").write_bytes(git_diff(OLD, NEW, PATH))
    arguments = ("import", "it.diff", "--id", "add", *trees[:4])
    result = run(*arguments)
    assert "vllm 0.31.0: does not fit: 1 of 1 hunks do not fit; the change fits with 2 lines" in result.stdout
    assert "(--context 2)" in result.stdout
    assert re.search(r"hunk 1 of it.diff: drifted; nearest: .*; fits with 2 lines of context", result.stdout)
    assert result.exit_code == 1
    assert run(*arguments, "--into", "mine", "--context", "1").exit_code == 0
    for version, text in texts.items():
        assert plan(version).files[PATH].text == text.replace("    return total\n", "    return int(total)\n")
    # So it is one hunk for both.
    (feature,) = outside.load_outside(Path("mine")).features
    assert [hunk.versions for file in feature.files for hunk in file.hunks] == [None]


SECOND = NEW.replace("import os\n", "import os\nimport sys\n")
OVER = NEW.replace("int(total)", "round(total)")


def test_a_series_becomes_features_that_require_the_one_before(trees: list[str]) -> None:
    """The second mail's text is the first one's result."""
    series = mail("Add whole numbers", git_diff(OLD, NEW, PATH), "0" * 40) + mail(
        "Import sys (#78)", git_diff(NEW, SECOND, PATH)
    )
    Path("series.mbox").write_bytes(series)
    result = run("import", "series.mbox", "--into", "mine", *trees[:4])
    assert result.exit_code == 0, result.output
    first, second = outside.load_outside(Path("mine")).features
    assert (first.id, first.requires) == ("mine/add-whole-numbers", ())
    assert (second.id, second.requires) == ("mine/import-sys", ("mine/add-whole-numbers",))
    # The first has no commit's name.
    assert (first.origin, second.origin) == ("series.mbox", "vLLM PR 78")
    assert plan("0.30.0").files[PATH].text == SECOND
    assert run("check", "mine", *trees[:4]).exit_code == 0


def test_a_series_over_the_same_lines_is_one_feature(trees: list[str]) -> None:
    series = mail("Add whole numbers", git_diff(OLD, NEW, PATH)) + mail("Round them", git_diff(NEW, OVER, PATH))
    Path("series.mbox").write_bytes(series)
    result = run("import", "series.mbox", "--into", "mine", *trees[:4])
    assert result.exit_code == 1
    assert "it changes lines of an earlier change of the series: make one feature of all (--one)" in result.stdout
    shutil.rmtree("mine")
    assert run("import", "series.mbox", "--into", "mine", "--one", *trees[:4]).exit_code == 0
    (feature,) = outside.load_outside(Path("mine")).features
    assert "Round them" in feature.what
    assert plan("0.31.0").files[PATH].text == "# newer\n" + OVER
