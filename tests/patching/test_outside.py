# SPDX-License-Identifier: Apache-2.0
"""Catalogues from outside, in fresh processes with a made-up vLLM and a made-up library (see ``madeup.py``)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_hwplugin import __version__
from vllm_hwplugin.patching import PatchingError, load_catalogue
from vllm_hwplugin.patching.outside import Found, find_outside, load_outside

from .madeup import GATES, Project

FOLDERS = "VLLM_HWPLUGIN_PATCHES"
FIX = "VLLM_HWPLUGIN_PATCH_ACME_FIX"
LIBRARY = {
    "acme_lib/__init__.py": "",
    "acme_lib/core.py": """
        def answer():
            return "stock"
        """,
}
LIBRARY_EDIT = {"acme_lib/core.py": [('"stock"', '"patched"')]}
STEP = {"vllm/v1/alpha.py": [("return value + 1", "return value + 100")]}
ANSWER = "import acme_lib.core; print(acme_lib.core.answer())"


@pytest.fixture
def acme(project: Project) -> Project:
    """With a catalogue `acme` (not named in any environment yet), whose feature changes a library of another name."""
    project.distribution("Acme.Lib", "2.1.0", LIBRARY)
    catalogue = project.catalogue("acme")
    project.feature(
        "fix", LIBRARY_EDIT, gate=None, catalogue=catalogue, versions=">=2,<3", more='distribution = "acme-lib"'
    )
    return project


def folders(project: Project, *names: str) -> dict[str, str]:
    return {FOLDERS: os.pathsep.join(str(project.folder / name) for name in names)}


def found(project: Project, *names: str) -> Found:
    return find_outside([str(project.folder / name) for name in names], load_catalogue(project.patches))


STATE = """
entry = install()
import json, multiprocessing, subprocess
import vllm.envs, acme_lib.core
from vllm.v1.alpha import Runner
_runtime._register_with_vllm()
def use(queue):
    from vllm.v1.alpha import Runner
    queue.put([acme_lib.core.answer(), Runner().step(1)])
queue = multiprocessing.get_context("fork").SimpleQueue()
child = multiprocessing.get_context("fork").Process(target=use, args=(queue,))
child.start(); child.join()
print(json.dumps({
    "states": {name: item["state"] for name, item in entry.features.items()},
    "here": [acme_lib.core.answer(), Runner().step(1)], "forked": queue.get(),
    "origin": acme_lib.core.__file__, "factors": vllm.envs.compile_factors(), "fingerprint": entry.fingerprint,
}))
"""


def test_features_from_outside_are_live_in_every_process_and_in_the_compile_key(acme: Project) -> None:
    acme.feature("own", {"vllm/v1/alpha.py": [("return value * 2", "return value * 3")]})
    acme.feature("step", STEP, gate="ACME_STEP", catalogue=acme.folder / "acme", requires=["vllm-hwplugin/own", "fix"])
    before = {file: file.read_bytes() for file in acme.site.rglob("*.py")}
    cold, warm = (json.loads(acme.run(STATE, **folders(acme, "acme"))) for _ in range(2))
    assert cold == warm
    assert {file: file.read_bytes() for file in acme.site.rglob("*.py")} == before
    assert not list(acme.site.rglob("core.*.pyc"))
    assert cold["states"] == {"own": "live", "acme/fix": "live", "acme/step": "live"}
    assert cold["here"] == cold["forked"] == ["patched", 101]
    assert Path(cold["origin"]).is_relative_to(acme.cache)
    assert cold["factors"][FIX] == cold["factors"]["ACME_STEP"] == "auto"
    assert cold["factors"]["VLLM_HWPLUGIN_FINGERPRINT"] == f"{cold['fingerprint']} {__version__}"
    # The gate of one takes the other along, which requires it, and changes the key.
    without = json.loads(acme.run(STATE, **folders(acme, "acme"), **{FIX: "off"}))
    assert without["states"] == {"own": "live", "acme/fix": "off", "acme/step": "off"}
    assert without["here"] == ["stock", 2]
    assert without["factors"][FIX] == "off"
    assert without["fingerprint"] != cold["fingerprint"]
    # Without the catalogue there is nothing of it.
    assert json.loads(acme.run(STATE))["states"] == {"own": "live"}


PLATFORMS = """
from vllm_hwplugin.cli import _diagnosis
import vllm.platforms

def outcome():
    features = install().features
    rows = _diagnosis.diagnose(catalogue=_catalogue.load_catalogue(Path(PATCHES))).features
    return [{name: [item["state"], item["reason"]] for name, item in features.items()},
            {row.id: row.state for row in rows}]
"""


def test_a_feature_of_another_platform_or_without_its_package_is_not_needed(acme: Project) -> None:
    acme.write("vllm/platforms/__init__.py", "from acme_npu.platform import NPU\ncurrent_platform = NPU()\n")
    files = {"acme_npu/__init__.py": "", "acme_npu/platform.py": 'class NPU:\n    device_name = "npu"\n'}
    acme.distribution("acme-npu", "0.26.1+cn", files, "[vllm.platform_plugins]\nacme = acme_npu.platform:register\n")
    conditions = {
        "by-device": 'platform = ["cuda", "NPU"]',
        "by-plugin": 'platform = ["acme"]\nwith = "acme-npu>=0.26,<0.27"',
        "elsewhere": 'platform = ["cuda", "musa"]',
        "newer": 'with = "acme-npu>=0.27"',
        "without": 'with = "acme-other"',
    }
    folder = acme.folder / "acme"
    for name, more in conditions.items():
        acme.feature(name, STEP, gate=f"ACME_{name.upper()}".replace("-", "_"), catalogue=folder, more=more)
    acme.feature("follows", STEP, gate="ACME_FOLLOWS", catalogue=folder, requires=["elsewhere"])
    code = f"PATCHES = {str(acme.patches)!r}\n{PLATFORMS}"
    # The first two change the same line, so each has its turn.
    variables = folders(acme, "acme")
    turns = {"device": variables, "plugin": variables | {"ACME_BY_DEVICE": "off"}}
    answers = acme.outcomes(code, turns)
    states, doctor = answers["plugin"]
    assert states["acme/by-plugin"] == ["live", ""]
    elsewhere = "it is for platform cuda or musa, and this is acme or npu"
    assert states["acme/elsewhere"] == ["not-needed", elsewhere]
    follows = f"it requires acme/elsewhere, which is not needed here ({elsewhere})"
    assert states["acme/follows"] == ["not-needed", follows]
    assert states["acme/newer"] == ["refused", "it needs acme-npu>=0.27, and acme-npu 0.26.1+cn is installed"]
    assert states["acme/without"] == ["not-needed", "it needs acme-other, and no acme-other is installed"]
    # Doctor imports no plugin, so it knows a platform by its entry point.
    assert doctor == {name: state for name, (state, _) in states.items()}
    assert answers["device"][0]["acme/by-device"] == ["live", ""]
    # A strict start ends only for what this host needs.
    strict = variables | {"ACME_BY_PLUGIN": "off", "VLLM_HWPLUGIN_STRICT": "1"}
    assert (
        "STRICT=1, but acme/newer cannot be patched"
        in acme.start("import vllm.platforms", "install()", **strict).stderr
    )
    acme.run("import vllm.platforms", "install()", **strict, ACME_NEWER="off")


def test_a_package_is_found_by_its_entry_point_and_never_imported(acme: Project) -> None:
    package = "acme_patches/carried"
    acme.distribution(
        "acme-patches",
        "1.0",
        {"acme_patches/__init__.py": "raise AssertionError('imported')\n"},
        f"[vllm_hwplugin.patches]\nacme = {package.replace('/', '.')}\n",
    )
    (acme.folder / "acme").rename(acme.site / package)
    assert acme.run("assert install().live == ('acme/fix',), install()", ANSWER) == "patched\n"
    # An interactive Python has the working directory on its path as an empty text.
    here = f"import os\nos.chdir({str(acme.site)!r})\nsys.path[:] = ['' if p == os.getcwd() else p for p in sys.path]\n"
    assert acme.run(here, "print(*install().live)") == "acme/fix\n"
    # Its gate is an ordinary one, and there may be folders beside it.
    acme.feature("step", STEP, gate=None, catalogue=acme.catalogue("other"), requires=["vllm-hwplugin/no-such"])
    program = "entry = install(); print({name: item['state'] for name, item in entry.features.items()})"
    states = acme.run(program, **folders(acme, "other"), **{FIX: "off"})
    assert states == str({str(acme.folder / "other"): "refused", "acme/fix": "off"}) + "\n"


def newer(project: Project) -> None:
    (project.site / "Acme.Lib-2.1.0.dist-info" / "METADATA").write_text("Name: Acme.Lib\nVersion: 3.0\n")


def not_its_own(project: Project) -> None:
    """The file is there, and of nobody's or another's."""
    (project.site / "Acme.Lib-2.1.0.dist-info" / "RECORD").write_text("acme_lib/__init__.py,,\n")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (newer, "acme-lib 3.0 is not a version it was made for"),
        (not_its_own, "acme-lib has no acme_lib/core.py"),
    ],
)
def test_what_does_not_fit_is_off_and_says_why(acme: Project, change: Callable[[Project], None], reason: str) -> None:
    change(acme)
    show = (
        "entry = install()\nimport acme_lib.core\nprint(acme_lib.core.answer(), entry.features['acme/fix']['reason'])"
    )
    done = acme.start(show, **folders(acme, "acme"))
    assert done.stdout.startswith("stock ")
    assert reason in done.stdout
    assert reason in done.stderr, "no line in the log"


def test_the_earlier_of_two_that_conflict_is_live(acme: Project) -> None:
    """The project's own come first, then the catalogues as they are named."""
    acme.feature("own", {"vllm/v1/alpha.py": [("return value * 2", "return value * 3")]})
    for name, text in (("one", "return value * 4"), ("two", "return value * 5")):
        edits = {"vllm/v1/alpha.py": [("return value * 2", text)]}
        acme.feature("double", edits, gate=None, catalogue=acme.catalogue(name))
    show = "entry = install()\nfrom vllm.v1.alpha import double\nprint(double(1), *entry.live)"
    assert acme.run(show, **folders(acme, "two", "one")) == "3 own\n"
    assert acme.run(show, **folders(acme, "two", "one"), **{GATES[0]: "off"}) == "5 two/double\n"
    done = acme.start(show, **folders(acme, "two", "one"), VLLM_HWPLUGIN_PATCH_ONE_DOUBLE="on")
    assert done.returncode != 0
    assert "own and one/double both change vllm/v1/alpha.py" in done.stderr


def test_a_malformed_catalogue_is_left_out_alone(acme: Project) -> None:
    acme.feature("step", STEP, gate=None, catalogue=acme.catalogue("other"))
    file = acme.folder / "acme" / "fix" / "patch.toml"
    # A table that Python's parser cannot nest.
    file.write_text(file.read_text() + "x = " + "[" * 5000 + "]" * 5000)
    result = found(acme, "acme", "other")
    assert [each.manifest.name for each in result.catalogues] == ["other"]
    (trouble,) = result.troubles
    assert trouble.where == str(acme.folder / "acme")


@pytest.mark.parametrize("part", ["", "..", "fix", "catalogue.toml", "fix/patch.toml", "fix/edit.diff"])
def test_what_others_can_change_is_not_trusted(acme: Project, part: str) -> None:
    """Each part is judged; the table of what is trusted is in `test_cachedir.py`."""
    folder = acme.folder / "within" / "acme"
    folder.parent.mkdir()
    (acme.folder / "acme").rename(folder)
    assert not found(acme, "within/acme").troubles
    (folder / part).chmod(0o775)
    (trouble,) = found(acme, "within/acme").troubles
    assert os.path.normpath(folder / part) in trouble.reason


def test_a_link_to_a_file_is_not_followed_and_one_to_a_folder_is_judged(acme: Project) -> None:
    (acme.folder / "link").symlink_to(acme.folder / "acme")
    assert [each.manifest.folder for each in found(acme, "link", "acme").catalogues] == [acme.folder / "acme"]
    diff = acme.folder / "acme" / "fix" / "edit.diff"
    diff.rename(acme.folder / "elsewhere.diff")
    diff.symlink_to(acme.folder / "elsewhere.diff")
    (trouble,) = found(acme, "link").troubles
    assert "edit.diff" in trouble.reason


def test_names_that_are_taken(acme: Project) -> None:
    twin = acme.catalogue("acme", acme.folder / "twin")
    acme.feature("z", STEP, gate=None, catalogue=twin)
    same = acme.catalogue("acme-fix", acme.folder / "same")
    acme.feature("x", STEP, gate=FIX, catalogue=same)
    result = found(acme, "acme", "twin", "same")
    assert [each.manifest.name for each in result.catalogues] == ["acme"]
    assert [trouble.where for trouble in result.troubles] == [str(twin), str(same)]
    # And requirements lead to what comes before.
    acme.feature("y", STEP, gate=None, requires=["acme/fix"], catalogue=acme.catalogue("other"))
    assert not found(acme, "acme", "other").troubles
    (trouble,) = found(acme, "other", "acme").troubles
    assert "requires 'acme/fix', which neither the plugin" in trouble.reason
    # One catalogue that is named in two ways is no other.
    assert not found(acme, "acme", "twin/../acme").troubles
    # The one that is named first has it.
    assert [each.manifest.folder for each in found(acme, "twin", "acme").catalogues] == [twin]


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("catalogue.toml", '"acme"', '"vllm-hwplugin"', "the plugin's own"),
        ("fix/patch.toml", "requires = []", f'gate = "{GATES[0]}"', "is no name for a switch"),
        ("fix/patch.toml", "requires = []", 'requires = ["none"]', "requires 'acme/none', which is no feature here"),
        ("fix/patch.toml", "<3", "!=3", "has no end"),
        ("fix/patch.toml", "requires", f"{'a.' * 20_000}a = 1\nrequires", "bytes, expected at most 32768"),
        ("fix/patch.toml", '"acme-lib"', '"vllm_hwplugin"', "other than the plugin"),
        ("fix/edit.diff", "acme_lib/core.py", "vllm/core.py", "expected the same '....py'"),
    ],
)
def test_what_a_catalogue_may_not_say(acme: Project, file: str, old: str, new: str, message: str) -> None:
    path = acme.folder / "acme" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(PatchingError, match=re.escape(message)):
        load_outside(acme.folder / "acme")


def test_a_default_of_on_demands_the_feature_of_everybody(acme: Project) -> None:
    toml = acme.folder / "acme" / "fix" / "patch.toml"
    toml.write_text(toml.read_text().replace("requires = []", 'default = "on"'))
    acme.run("assert install().live == ('acme/fix',)", **folders(acme, "acme"))
    newer(acme)
    assert acme.start("install()", **folders(acme, "acme")).returncode != 0
    acme.run("assert not install().live", **folders(acme, "acme"), **{FIX: "auto"})
