# SPDX-License-Identifier: Apache-2.0
"""Tests that step vLLM's own runner, with each release whose Python imports with the torch that is installed.

`python -m pytest --vllm 0.33.0 FILE` runs such a test by itself.
"""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.patching import find_installed, load_catalogue

from ..conftest import CHECKSUMS, cannot_run
from ..releases import DOES_NOT_IMPORT, NEWEST
from .stand_in import UnknownName

FEATURES = {feature.id: feature for feature in load_catalogue().features}
ROOT = Path(__file__).parents[2]
#: By file, the feature that it is about. Others import names that only the installed vLLM needs to have.
STEPPED = {
    str(file): found[1]
    for file in Path(__file__).parent.rglob("test_*.py")
    if (found := re.search(r'mark\.each_vllm\("(.+)"\)', file.read_text()))
}
LAST = list({version.rpartition(".")[0]: version for version in SUPPORTED}.values())
RUNNERS = ("vllm/v1/worker/gpu_model_runner.py", "vllm/v1/worker/gpu/model_runner.py")


def hunks_of(version: str) -> frozenset[tuple[str, int]]:
    """Return which hunks of the runners a release has, of the features that are stepped."""
    files = [(name, file) for name in STEPPED.values() for file in FEATURES[name].files if file.path in RUNNERS]
    return frozenset(
        (name, number)
        for name, file in files
        for number, hunk in enumerate(file.hunks)
        if FEATURES[name].versions.covers(version) and (hunk.versions is None or hunk.versions.covers(version))
    )


#: The newest first. With `--all-versions` also the first minor version of those that have the same hunks, in few walks
#: each; the installed one steps in this process.
CHOSEN = list({hunks_of(version): version for version in LAST[::-1]}.values())[::-1]
OLDER = [version for version in CHOSEN[-2::-1] if version != find_installed().version] if CHECKSUMS else []
RELEASES = [NEWEST, *(pytest.param(version, marks=pytest.mark.slow) for version in OLDER)]


def files_of(version: str) -> list[str]:
    """Return the files to run: of an older release the order machines, and what no chosen version before it has."""
    covered = [file for file, feature in STEPPED.items() if FEATURES[feature].versions.covers(version)]
    if version == NEWEST:
        return covered
    before = CHOSEN[max(0, CHOSEN.index(version) - 1)]
    new = (file for file in covered if not FEATURES[STEPPED[file]].versions.covers(before))
    return sorted({*(file for file in covered if Path(file).name == "test_order_of_calls.py"), *new})


@pytest.mark.network
@pytest.mark.parametrize("version", RELEASES)
def test_each_release_steps(version: str) -> None:
    walks = "fixed" if version == NEWEST else "few"
    run = pytest_with(version, "-m", "each_vllm", "--hypothesis-profile", walks, *files_of(version))
    # What a new release asks of the stand-ins.
    for asked in sorted(set(re.findall(f"{UnknownName.__name__}: (.*)", run))):
        warnings.warn(f"vLLM {version}: {asked}", UnknownName, stacklevel=1)


@pytest.mark.network
@pytest.mark.slow
def test_v1_drafts_in_graphs_on_the_newest() -> None:
    """As on the installed vLLM."""
    pytest_with(NEWEST, str(Path(__file__).parent / "v1"))


def pytest_with(version: str, *arguments: str) -> str:
    """Return what these tests print with a release that they have to pass with."""
    options = ("--vllm", version, "-n", "0", "-p", "no:cacheprovider", *arguments)
    command = [sys.executable, "-m", "pytest", "-q", "--tb", "short", *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode == DOES_NOT_IMPORT:
        cannot_run(run.stderr.strip().splitlines()[-1])
    if run.returncode:
        pytest.fail(run.stdout + run.stderr, pytrace=False)
    return run.stdout
