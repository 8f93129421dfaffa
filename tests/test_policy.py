"""The rule for tests that this host cannot run: skipped with the reason, and failed in CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = {
    "network": ("", "def test(vllm_tree):\n    vllm_tree('0.33.0').read('vllm/envs.py')\n"),
    "engine": (
        "import sys\nsys.modules['vllm'] = None\n",
        "import pytest\n@pytest.mark.engine\ndef test():\n    pass\n",
    ),
}


@pytest.mark.parametrize("ci", [False, True])
@pytest.mark.parametrize(
    ("need", "reason", "in_ci"),
    [("network", "no usable answer", "1 failed"), ("engine", "no vLLM is installed", "1 error")],
)
def test_missing_need(
    tmp_path: Path, pytestconfig: pytest.Config, ci: bool, need: str, reason: str, in_ci: str
) -> None:
    before, test = TESTS[need]
    conftest = (pytestconfig.rootpath / "tests" / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest + before)
    (tmp_path / "test_it.py").write_text(test)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    network\n    engine\n    gpu\n")
    settings = {"CI": "true" if ci else "", "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_CONFIG_FILE": os.devnull}
    environ = os.environ | settings | {"VLLM_HWPLUGIN_CACHE_DIR": str(tmp_path / "cache")}
    environ["PYTHONPATH"] = os.pathsep.join([str(pytestconfig.rootpath), environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", "."],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (in_ci if ci else "1 skipped") in done.stdout
    assert reason in done.stdout
    assert (done.returncode == 0) == (not ci)
