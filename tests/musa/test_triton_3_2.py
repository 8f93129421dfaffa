# SPDX-License-Identifier: Apache-2.0
"""vLLM's kernels in the front end of the public Triton 3.2.0: of MUSA's build of that version, what can be had here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import filelock
import platformdirs
import pytest

from ..conftest import cannot_run
from ..releases import package_of

pytestmark = [pytest.mark.engine, pytest.mark.network]

VERSION = "3.2.0"


@pytest.fixture(scope="module")
def triton_3_2() -> Path:
    """Its folder, from the package index or the user's cache of it."""
    folder = platformdirs.user_cache_path("vllm-hwplugin-tests") / f"triton-{VERSION}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_suffix(".lock")):
        if not (folder / "done").exists():
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
            if subprocess.run([*command, f"triton=={VERSION}"]).returncode:
                cannot_run(f"Triton {VERSION} cannot be had")
            (folder / "done").touch()
    return folder


#: What it says of those that it does not compile to what they mean: a sum of a mask has the mask's type.
NOT_COMPILED = {"next tokens of drafters": "uint32", "top-k and top-p": "parity"}


@pytest.mark.parametrize("version", ["0.20.2", "0.26.0"])
def test_kernels_that_triton_3_2_compiles(version: str, triton_3_2: Path, tmp_path: Path) -> None:
    (tmp_path / "vllm").symlink_to(package_of(version))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(triton_3_2), str(tmp_path))),
        "VLLM_HWPLUGIN": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    file = tmp_path / "found.json"
    command = [sys.executable, str(Path(__file__).with_name("ttir_child.py")), str(file)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(file.read_text())
    assert found.pop("triton") == VERSION
    assert {name for name, said in found.items() if said != "compiles"} == set(NOT_COMPILED)
    assert all(words in found[name] for name, words in NOT_COMPILED.items())
