# SPDX-License-Identifier: Apache-2.0
"""The GitHub Action and the pre-commit hook that other repositories use: their scripts, run as they stand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomllib

from tests.cpu_seconds import patience

from ..conftest import ADD, NORM, PackageServer

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[3]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())


@pytest.fixture
def repository(
    tmp_path: Path, server: PackageServer, write_wheel: Callable[..., Path], add_feature: Callable[..., None]
) -> Path:
    """Somebody's repository with a catalogue that fits vLLM 0.33.0, on an index that has this and 0.34.0rc1."""
    folder = tmp_path / "repository"
    catalogue = folder / "our patches"
    catalogue.mkdir(parents=True)
    (catalogue / "catalogue.toml").write_text('name = "acme"\n')
    add_feature(catalogue, "total", "ACME_TOTAL", "total = 0", "total = 1", versions=">=0.33,<0.34")
    files = {"vllm/__init__.py": "", "vllm/v1/add.py": ADD, "vllm/v1/norm.py": NORM}
    server.add(write_wheel(tmp_path / "wheels", "0.33.0", files))
    server.add(write_wheel(tmp_path / "wheels", "0.34.0rc1", files))
    return folder


def run(script: str, repository: Path, server: PackageServer, **variables: str) -> subprocess.CompletedProcess[str]:
    """As a runner does: bash with `-e`, in the checkout, with the program on its path."""
    tools = repository.parent / "bin"
    tools.mkdir(exist_ok=True)
    (tools / "vllm-hwplugin").write_text(f'#!/bin/sh\nexec {sys.executable} -m vllm_hwplugin "$@"\n')
    (tools / "vllm-hwplugin").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM", "PIP_"))}
    environ = kept | {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PIP_INDEX_URL": server.url,
        "PIP_EXTRA_INDEX_URL": "",
        "VLLM_HWPLUGIN_CACHE_DIR": str(repository.parent / "cache"),
        **variables,
    }
    command = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", script]
    return subprocess.run(command, cwd=repository, env=environ, capture_output=True, text=True, timeout=patience(120))


def act(repository: Path, server: PackageServer, **inputs: str) -> tuple[int, dict[str, Any] | None, str]:
    """Exit status, report and summary of the action's check, with its defaults where nothing is given."""
    (step,) = (step for step in ACTION["runs"]["steps"] if step.get("id") == "drift")
    given = {name: item["default"] for name, item in ACTION["inputs"].items()} | {"catalogue": "our patches", **inputs}
    assert given.keys() == ACTION["inputs"].keys()
    variables = {name: given[text.split(".")[1].split()[0]] for name, text in step["env"].items()}
    temporary = repository.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    places = {name: str(temporary / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    done = run(step["run"], repository, server, RUNNER_TEMP=str(temporary), **variables, **places)
    # Whatever the program prints stands between these two.
    first, *printed = done.stdout.splitlines()
    token = first.removeprefix("::stop-commands::")
    own = printed[printed.index(f"::{token}::") + 1 :]
    assert len(token) == 32
    assert [line.partition("::could not tell")[1] for line in own] == ["::could not tell"] * (done.returncode == 2)
    output = dict(line.split("=") for line in Path(places["GITHUB_OUTPUT"]).read_text().splitlines())
    report, summary = Path(output["report"]), Path(places["GITHUB_STEP_SUMMARY"])
    text = summary.read_text() if summary.exists() else done.stderr
    return done.returncode, json.loads(report.read_text()) if report.exists() else None, text


@pytest.mark.slow
def test_the_action_is_green_until_a_release_comes_that_does_not_fit(
    repository: Path, server: PackageServer, write_wheel: Callable[..., Path]
) -> None:
    status, report, summary = act(repository, server)
    assert status == 0, summary
    assert report is not None
    assert [target["version"] for target in report["targets"]] == ["0.33.0", "0.34.0rc1"]
    assert "- 0.33.0: applies" in summary
    newer = {"vllm/__init__.py": "", "vllm/v1/add.py": ADD.replace("total = 0", "total = 0.0"), "vllm/v1/norm.py": NORM}
    server.add(write_wheel(repository.parent / "wheels", "0.34.0", newer))
    status, report, summary = act(repository, server)
    assert status == 1
    assert "- 0.34.0: unlisted (the patch does not list it; what is for 0.33.0 would not apply" in summary
    assert act(repository, server, next="false")[0] == 0
    for between in ("  ", "\n"):
        assert act(repository, server, next="false", all="false", targets=f"0.33.0{between}0.34.0rc1")[0] == 1
    server.status = 500
    status, report, _ = act(repository, server)
    assert (status, report) == (2, None)


def test_an_input_is_never_a_part_of_the_scripts() -> None:
    for step in ACTION["runs"]["steps"]:
        assert "inputs." not in step.get("run", "")


def test_the_hook_installs_what_the_extra_names() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert HOOK["additional_dependencies"] == extras["workshop"]
