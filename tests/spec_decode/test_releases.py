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

from vllm_hwplugin.versions import SUPPORTED

from ..conftest import CHECKSUMS, cannot_run
from ..releases import DOES_NOT_IMPORT, NEWEST
from .stand_in import UnknownName

ROOT = Path(__file__).parents[2]
#: Others import names that only the installed vLLM needs to have.
STEPPED = [str(file) for file in Path(__file__).parent.rglob("test_*.py") if "mark.each_vllm" in file.read_text()]
#: Releases before it ask stand-ins for what these do not have.
OLDEST = "0.28.0"
#: The newest first. The others are there with `--all-versions`, in few walks each.
OLDER = SUPPORTED[SUPPORTED.index(OLDEST) : -1][::-1] if CHECKSUMS else ()
RELEASES = [NEWEST, *(pytest.param(version, marks=pytest.mark.slow) for version in OLDER)]


@pytest.mark.network
@pytest.mark.parametrize("version", RELEASES)
def test_each_release_steps(version: str) -> None:
    walks = "fixed" if version == NEWEST else "few"
    options = ("--vllm", version, "-m", "each_vllm", "--hypothesis-profile", walks, "-n", "0", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-q", *options, *STEPPED]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if run.returncode == DOES_NOT_IMPORT:
        reason = run.stderr.strip().splitlines()[-1]
        cannot_run(reason) if version == NEWEST else pytest.skip(reason)
    if run.returncode:
        pytest.fail(run.stdout + run.stderr, pytrace=False)
    # What a new release asks of the stand-ins.
    for asked in sorted(set(re.findall(f"{UnknownName.__name__}: (.*)", run.stdout))):
        warnings.warn(f"vLLM {version}: {asked}", UnknownName, stacklevel=1)
