"""A start takes a parsed catalogue from the cache, and never an answer that is not that of the files as they are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from .madeup import GATES, Project

# What a start made of the catalogue, and how many TOML files it had the real parser read.
START = """
    import json, sys
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    parsed = []
    loads = tomllib.loads
    tomllib.loads = lambda text: (parsed.append(text), loads(text))[1]
    record = install()
    answer = {name: [item["state"], item["reason"]] for name, item in record.features.items()}
    print(json.dumps([len(parsed), answer, record.error]))
"""
LIVE = ["live", ""]


def start(project: Project, *code: str, **variables: str) -> tuple[int, dict[str, list[str]], str | None]:
    parsed, answer, error = json.loads(project.run(*code, START, **variables).splitlines()[-1])
    return parsed, answer, error


def kept(project: Project) -> Path:
    (file,) = project.cache.glob("catalogue/*")
    return file


@pytest.fixture
def warm(patched: Project) -> Project:
    """Two features, and a cache that a start has used."""
    patched.feature("other", {"vllm/v1/beta.py": [("double(double(value))", "double(value)")]}, gate=GATES[1])
    assert start(patched) == (2, {"made-up": LIVE, "other": LIVE}, None)
    return patched


def test_a_warm_start_parses_no_toml(warm: Project) -> None:
    assert start(warm) == (0, {"made-up": LIVE, "other": LIVE}, None)
    loaded = "print([name for name in ('tomllib', 'tomli') if name in sys.modules])"
    assert warm.run("assert install().live", loaded) == "[]\n"


def edit_in_place(project: Project) -> None:
    """Nothing but the text tells: not the size, nor a time."""
    file = project.patches / "other" / "patch.toml"
    before = file.stat()
    text = file.read_text()
    assert "<0.34.0" in text
    file.write_text(text.replace("<0.34.0", "<0.30.0"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def add(project: Project) -> None:
    project.feature("third", {"vllm/v1/pack/inner.py": [("'inner'", "'x'")]}, gate=GATES[2])


def remove(project: Project) -> None:
    for file in (project.patches / "other").iterdir():
        file.unlink()
    (project.patches / "other").rmdir()


def exchange(project: Project) -> None:
    """The same texts, in each other's folders."""
    one, two = (project.patches / name / "patch.toml" for name in ("made-up", "other"))
    first, second = one.read_text(), two.read_text()
    one.write_text(second.replace('id = "other"', 'id = "made-up"'))
    two.write_text(first.replace('id = "made-up"', 'id = "other"'))


@pytest.mark.parametrize(
    ("change", "states"),
    [
        (edit_in_place, {"made-up": "live", "other": "refused"}),
        (add, {"made-up": "live", "other": "live", "third": "live"}),
        (remove, {"made-up": "live"}),
        (exchange, {"made-up": "off", "other": "live"}),
    ],
)
def test_a_changed_catalogue_is_read_anew(
    warm: Project, change: Callable[[Project], None], states: dict[str, str]
) -> None:
    variables = {GATES[1]: "off"} if change is exchange else {}
    change(warm)
    for parsed in (len(states), 0):
        count, answer, error = start(warm, **variables)
        assert (count, {name: state for name, (state, _) in answer.items()}, error) == (parsed, states, None)


def test_a_changed_diff_is_read_anew(warm: Project) -> None:
    warm.feature("other", {"vllm/v1/beta.py": [("double(double(value))", "value")]}, gate=GATES[1])
    assert warm.run("install()", "import vllm.v1.beta as beta; print(beta.quadruple(1))").strip() == "1"


@pytest.mark.parametrize("other", ["sys.version += ' built anew'", "_toml.__version__ = '9.9.9'"])
def test_another_release_of_python_or_of_the_plugin_reads_it_anew(warm: Project, other: str) -> None:
    code = f"from vllm_hwplugin.patching import _toml\n{other}\n"
    assert start(warm, code)[0] == 2
    assert start(warm, code)[0] == 0
    assert start(warm)[0] == 2


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def alter(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"<0.34.0", b"<0.30.0"))


def empty(file: Path) -> None:
    file.write_bytes(b"")


def widen(file: Path) -> None:
    file.chmod(0o660)


def widen_folder(file: Path) -> None:
    file.parent.chmod(0o770)


def give_away(file: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(file, 4321, 4321)


def link(file: Path) -> None:
    file.rename(file.with_name("other"))
    file.symlink_to("other")


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("harm", [cut, alter, empty, widen, widen_folder, give_away, link, pipe, folder, Path.unlink])
def test_what_cannot_be_trusted_is_parsed_anew(warm: Project, harm: Callable[[Path], None]) -> None:
    harm(kept(warm))
    assert start(warm) == (2, {"made-up": LIVE, "other": LIVE}, None)


def test_what_was_harmed_is_replaced(warm: Project) -> None:
    before = kept(warm).read_bytes()
    alter(kept(warm))
    assert start(warm)[0] == 2
    assert kept(warm).read_bytes() == before
    assert kept(warm).stat().st_mode & 0o777 == 0o600
    assert kept(warm).parent.stat().st_mode & 0o777 == 0o700


def test_what_was_kept_in_another_place_is_not_taken(warm: Project) -> None:
    """Its seal names the place, so that nothing can be put where something else is looked for."""
    file = kept(warm)
    good = file.read_bytes()
    other = Project(warm.folder / "other")
    other.patches.parent.mkdir()
    warm.patches.rename(other.patches)
    code = f"_catalogue.default_folder = lambda: Path({str(other.patches)!r})"
    assert start(warm, code)[0] == 2
    (theirs,) = set(warm.cache.glob("catalogue/*")) - {file}
    theirs.write_bytes(good)
    assert start(warm, code) == (2, {"made-up": LIVE, "other": LIVE}, None)
    assert start(warm, code)[0] == 0


@pytest.mark.parametrize("what", ["file", "folder of others"])
def test_a_catalogue_that_cannot_be_kept_stops_nothing_and_is_said(patched: Project, what: str) -> None:
    patched.cache.mkdir(mode=0o700)
    place = patched.cache / "catalogue"
    if what == "file":
        place.write_text("in the way")
    else:
        place.mkdir()
        place.chmod(0o777)
    shown = "import logging; logging.basicConfig(level=logging.DEBUG)"
    for _ in range(2):
        done = patched.start(shown, START)
        assert json.loads(done.stdout.splitlines()[-1]) == [1, {"made-up": LIVE}, None]
        assert f"the parsed catalogue is not kept, each start parses it: {place}" in done.stderr


def test_a_bad_file_is_named_at_every_start(warm: Project) -> None:
    file = warm.patches / "other" / "patch.toml"
    good = file.read_text()
    for bad, words in (("title = ", "not TOML"), ("title = 2026-01-01\n", "expected a text")):
        file.write_text(good.replace("title = ", f"{bad}#"))
        for _ in range(2):
            _, answer, error = start(warm)
            assert answer == {}
            assert str(file) in str(error)
            assert words in str(error)
    file.write_text(good)
    assert start(warm)[2] is None


def test_a_catalogue_from_outside_is_always_read(warm: Project) -> None:
    folder = warm.catalogue("mine")
    edits = {"vllm/v1/pack/inner.py": [("'inner'", "'x'")]}
    warm.feature("extra", edits, gate=None, catalogue=folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    named = {"VLLM_HWPLUGIN_PATCHES": str(folder)}
    # Its own two files, and none of the project's.
    assert start(warm, **named) == (2, {"made-up": LIVE, "other": LIVE, "mine/extra": LIVE}, None)
    warm.feature("extra", edits, gate=None, catalogue=folder, versions=">=0.20.0,<0.30.0")
    count, answer, _ = start(warm, **named)
    assert (count, answer["mine/extra"][0], answer["other"]) == (2, "refused", LIVE)


def test_no_diff_is_read_of_a_feature_that_is_off(warm: Project) -> None:
    (warm.patches / "other" / "edit.diff").write_text("malformed")
    _, answer, error = start(warm, **{GATES[1]: "off"})
    assert (answer, error) == ({"made-up": LIVE, "other": ["off", f"{GATES[1]}=off"]}, None)
    assert "other/edit.diff" in str(start(warm)[2])


def test_a_plan_is_the_same_with_a_used_cache_and_an_empty_one(warm: Project) -> None:
    code = "record = install(); print(record.fingerprint, _runtime.current_plan().features)"
    used = warm.run(code)
    kept(warm).unlink()
    assert warm.run(code) == used
    assert not used.startswith("none")
