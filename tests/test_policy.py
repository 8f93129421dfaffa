"""The rules for tests: which `make test` leaves out, what becomes of one that a host cannot run, what they may take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import conftest
from .conftest import versions

BEFORE = "import sys\nsys.modules['vllm'] = None\n"
TESTS = """
import pytest

def test_network(vllm_tree):
    vllm_tree('0.33.0').read('vllm/envs.py')

@pytest.mark.engine
def test_engine():
    pass
"""


def run(
    folder: Path, config: pytest.Config, before: str, tests: str, *options: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run tests with the conftest.py of these, and a text behind it."""
    (folder / "conftest.py").write_text((config.rootpath / "tests" / "conftest.py").read_text() + before)
    (folder / "test_it.py").write_text(tests)
    markers = "".join(f"\n    {name}" for name in ("network", "engine", "musa_sim", "smoke", "slow", "gpu"))
    (folder / "pytest.ini").write_text(f"[pytest]\nmarkers ={markers}\n")
    path = os.pathsep.join([str(config.rootpath), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", *options, "."],
        cwd=folder,
        env=os.environ | variables | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("ci", "outcome"), [("", "2 skipped"), ("true", "1 failed, 1 error")])
def test_missing_need(tmp_path: Path, pytestconfig: pytest.Config, ci: str, outcome: str) -> None:
    settings = {"CI": ci, "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_CONFIG_FILE": os.devnull}
    done = run(tmp_path, pytestconfig, BEFORE, TESTS, **settings, VLLM_HWPLUGIN_CACHE_DIR=str(tmp_path / "cache"))
    for words in (outcome, "no usable answer", "no vLLM is installed"):
        assert words in done.stdout
    assert (done.returncode == 0) == (not ci)


def test_versions_whose_files_are_the_same_are_tested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read, other = "vllm/v1/worker/a.py", "vllm/b.py"
    few = ["0.20.0", "0.20.1", "0.21.0", "0.22.0", "0.26.0", "0.33.0"]
    assert versions(read, among=few) == ["0.20.0", "0.26.0", "0.33.0"]
    # 0.22.0 is not known.
    known = {"0.20.0": [1, 1], "0.20.1": [1, 2], "0.21.0": [2, 3], "0.26.0": [3, 4], "0.33.0": [3, 5]}
    checksums = {version: dict(zip((read, other), of, strict=True)) for version, of in known.items()}
    monkeypatch.setattr(conftest, "CHECKSUMS", checksums)
    found = versions("vllm/v1/", among=few)
    assert [one if isinstance(one, str) else (*one.values, one.marks[0].name) for one in found] == [
        "0.20.0",
        ("0.21.0", "slow"),
        ("0.22.0", "slow"),
        "0.26.0",
        "0.33.0",
    ]
