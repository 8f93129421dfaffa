"""The catalogue is read as it is written down, or refused with the file and the way out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.patching import load_catalogue
from vllm_hwplugin.patching.texts import CatalogueError, DiffError

from .texts import ALPHA, GATE, make_diff

TOML = f"""\
id = "one"
title = " a title "
gate = "{GATE}"
what = \"\"\"
several
lines\"\"\"
origin = "an upstream change"
removal = "when it is upstream"
requires = []
versions = ">=0.24.0,<0.34.0"
[[not_needed]]
versions = "<0.24.0"
reason = "no such fault"
"""

Write = Callable[..., Path]


def test_a_feature_declares_its_gate(write: Write) -> None:
    more = 'help = "what"\ndefault = "off"\ncompile_key = false\naliases = ["VLLM_MUSA_IT"]\nsince = "0.9.0"'
    (gate,) = load_catalogue(write(("requires = []", more))).gates
    assert (gate.name, gate.kind, gate.default, gate.help) == (GATE, "switch", "off", "Feature one: what")
    assert (gate.affects, gate.since, [alias.name for alias in gate.aliases]) == (
        ("patches",),
        "0.9.0",
        ["VLLM_MUSA_IT"],
    )
    write(name="two")
    assert [gate.help for gate in load_catalogue(write(name="three")).gates] == ["Feature one, three, two: what"]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write one more feature into a catalogue, with pairs of texts to replace in its `patch.toml`."""

    def write(*changes: tuple[str, str], name: str = "one") -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        text = TOML.replace('id = "one"', f'id = "{name}"')
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (folder / "patch.toml").write_text(text)
        (folder / "old.diff").write_text(make_diff(ALPHA, ALPHA + "old\n"))
        new = make_diff(ALPHA, "new\n" + ALPHA)
        (folder / "new.diff").write_text(new.replace(" @@\n", " @@ >=0.30\n"))
        return tmp_path

    return write


def test_fields(write: Write) -> None:
    (feature,) = load_catalogue(write()).features
    assert (feature.id, feature.title, feature.gate, feature.what) == ("one", "a title", GATE, "several\nlines")
    assert (feature.origin, feature.removal, feature.requires) == ("an upstream change", "when it is upstream", ())
    assert [str(item.versions) for item in feature.not_needed] == ["<0.24.0"]
    assert str(feature.versions) == ">=0.24.0,<0.34.0"
    assert [file.origin for file in feature.files] == ["one/new.diff", "one/old.diff"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id = "one"', 'id = "eins"', "id is 'eins', expected the folder's name 'one'"),
        (GATE, "VLLM_HWPLUGIN_STRICT", "'VLLM_HWPLUGIN_STRICT' is no name for a switch"),
        ("requires = []", "compile_key = 1", "compile_key is 1, expected true or false"),
        ("requires = []", 'default = "yes"', "default is 'yes', expected auto, on, off"),
        ("requires = []", 'requires = ["two"]', "requires 'two', which is no feature here"),
        ("requires = []", "require = []", "unknown key 'require'; expected aliases, compile_key,"),
        ("requires = []", "requires = [", "not TOML"),
        (
            'reason = "no such fault"',
            'reason = "no such fault"\nrequires = []',
            "[[not_needed]]: unknown key 'requires'; expected reason,",
        ),
        ('"<0.24.0"', '"<<0.24.0"', "versions '<<0.24.0' is no PEP 440 specifier"),
        ('"<0.24.0"', '"<=0.24.0"', "the ranges '>=0.24.0,<0.34.0' and '<=0.24.0' both cover vLLM 0.24.0"),
        ("[[not_needed]]", "[not_needed]", "expected [[not_needed]] tables"),
    ],
)
def test_refused(write: Write, old: str, new: str, message: str) -> None:
    """One line that names the file."""
    folder = write((old, new))
    with pytest.raises(CatalogueError, match=re.escape(message)) as caught:
        load_catalogue(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable(tmp_path: Path, write: Write) -> None:
    with pytest.raises(CatalogueError, match=r"absent: the folder of patches can't be read .*; reinstall"):
        load_catalogue(tmp_path / "absent")
    (write() / "one" / "old.diff").write_bytes(b"\xff\xfe")
    with pytest.raises(DiffError, match=r"one/old\.diff: not UTF-8"):
        load_catalogue(tmp_path)
    (tmp_path / "one" / "old.diff").unlink()
    (tmp_path / "one" / "new.diff").unlink()
    with pytest.raises(CatalogueError, match=r"one: has no \.diff file, so it changes nothing"):
        load_catalogue(tmp_path)
    (tmp_path / "one" / "patch.toml").unlink()
    with pytest.raises(CatalogueError, match=r"one.patch\.toml: can't be read \(No such file"):
        load_catalogue(tmp_path)


def test_own_catalogue_has_a_word_on_every_version() -> None:
    """Each supported version has hunks, or a reason why it needs none."""
    catalogue = load_catalogue()
    assert catalogue.features
    for feature in catalogue.features:
        for version in SUPPORTED:
            assert feature.versions.covers(version) != (feature.not_needed_for(version) is not None), version
            assert not feature.versions.covers(version) or feature.files_for(version), version
