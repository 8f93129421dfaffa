# SPDX-License-Identifier: Apache-2.0
"""Catalogues from outside on the command line: `drift`, `patches` and `gates`, beside the small catalogue."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.program import program
from vllm_hwplugin.cli import _diagnosis
from vllm_hwplugin.patching import load_catalogue
from vllm_hwplugin_workshop.cli import catalogues, drift, patches, patches_diff
from vllm_hwplugin_workshop.sources import Index

from ..conftest import ADD, NORM, PackageServer

LIBRARY = "VALUE = 1\n\n\ndef answer():\n    return VALUE\n"
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, small_catalogue: Path, server: PackageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HWPLUGIN_CACHE_DIR", str(tmp_path / "cache"))
    for module in (drift, patches, catalogues):
        monkeypatch.setattr(module, "load_catalogue", lambda: load_catalogue(small_catalogue))
    for module in (drift, patches_diff):
        monkeypatch.setattr(module, "Index", lambda: Index(server.config, retries=0))


@pytest.fixture
def acme(tmp_path: Path, add_feature: Callable[..., None]) -> Path:
    """A catalogue with a feature for vLLM and one for a library."""
    folder = tmp_path / "acme"
    folder.mkdir()
    (folder / "catalogue.toml").write_text('name = "acme"\n')
    add_feature(folder, "total", "ACME_TOTAL", "total = 0", "total = 1", versions=">=0.32,<0.34")
    add_feature(
        folder,
        "answer",
        "ACME_ANSWER",
        "return VALUE",
        "return VALUE + 1",
        path="acme_lib/core.py",
        pristine=LIBRARY,
        versions=">=2,<3",
        extra='distribution = "Acme_Lib"',
    )
    return folder


@pytest.fixture
def publish(tmp_path: Path, server: PackageServer, write_wheel: Write) -> Callable[..., Path]:
    """`publish(version, add=...)` puts a wheel of the small vLLM on the index; of the library, with `library=`."""

    def made(version: str, add: str = ADD, library: str | None = None) -> Path:
        files = {"vllm/__init__.py": "", "vllm/v1/add.py": add, "vllm/v1/norm.py": NORM}
        if library is not None:
            files = {"acme_lib/core.py": library}
        project = "vllm" if library is None else "acme_lib"
        wheel = write_wheel(tmp_path / "wheels", version, files, project=project)
        server.add(wheel)
        return wheel

    return made


def run(*arguments: str) -> Any:
    return program(*arguments)


def lines(result: Any) -> list[str]:
    shown: list[str] = result.stdout.splitlines()
    return shown


def test_drift_of_one_catalogue(acme: Path, publish: Callable[..., Path]) -> None:
    """Named by its folder, whatever the environment has; what others change counts only in a conflict."""
    publish("0.33.0")
    publish("2.1", library="# one more line\n" + LIBRARY)
    result = run("drift", "--catalogue", str(acme), "0.33.0", "acme-lib==2.1")
    assert lines(result) == ["vllm 0.33.0: acme/total: exact", "acme-lib 2.1: acme/answer: moved by 1 line"]
    assert result.exit_code == 0
    assert "acme" not in run("drift", "0.33.0").output
    # The plugin's own feature `graphs` changes this line, and comes first in every process.
    file = acme / "total" / "total.diff"
    file.write_text(file.read_text().replace("-    total = 0\n+    total = 1\n", "     total = 0\n"))
    file.write_text(file.read_text().replace("     return a + b\n", "-    return a + b\n+    return a - b\n"))
    result = run("drift", "--catalogue", str(acme), "0.33.0")
    assert result.exit_code == 1
    assert "acme/total: conflict (changes the same lines of vllm/v1/add.py as graphs)" in result.output
    assert len(lines(result)) == 1


def test_drift_of_all_that_the_environment_has(
    acme: Path, publish: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish("0.33.0")
    monkeypatch.setenv("VLLM_HWPLUGIN_PATCHES", str(acme))
    result = run("drift", "0.33.0", str(publish("2.0", library=LIBRARY)))
    assert [line.partition(": ")[2] for line in lines(result)] == [
        "context: exact",
        "graphs: exact",
        "acme/total: exact",
        "acme/answer: exact",
    ]
    assert [line.split(": ")[1] for line in lines(run("drift", "--catalogue", "acme", "0.33.0"))] == ["acme/total"]
    assert len(lines(run("drift", "--catalogue", "vllm-hwplugin", "0.33.0"))) == 2
    assert run("drift", "--catalogue", "acne", "0.33.0").exit_code == 2
    monkeypatch.chdir(acme)
    assert run("drift", "--catalogue", "", "0.33.0").exit_code == 2
    # What is installed is asked by default; the library is not.
    result = run("drift", "--catalogue", "acme")
    assert "no acme-lib is installed" in result.stderr
    # A catalogue that a process would leave out could not be checked.
    acme.chmod(0o777)
    result = run("drift", "0.33.0")
    assert result.exit_code == 2
    assert f"{acme}" in result.stderr


def test_the_newest_release_and_pre_release_are_found_without_a_name(
    acme: Path, publish: Callable[..., Path], server: PackageServer
) -> None:
    command = ("drift", "--catalogue", str(acme), "--next", "--json", "-")

    def seen() -> tuple[int, dict[str, list[str]]]:
        result = run(*command)
        targets = json.loads(result.stdout)["targets"]
        return result.exit_code, {
            each["label"].rpartition("-cp")[0]: [item["status"] for item in each["features"]] for each in targets
        }

    publish("0.32.0")
    publish("0.33.0")
    publish("0.33.0rc2")
    publish("0.35.0.dev3")
    publish("2.1", library=LIBRARY)
    assert seen() == (0, {"vllm-0.33.0": ["applies"], "acme_lib-2.1": ["applies"]})
    # The patch does not list it, but what there is would fit: there is nothing to mend.
    publish("0.34.0rc1", add="# moved\n" + ADD)
    assert seen() == (0, {"vllm-0.33.0": ["applies"], "vllm-0.34.0rc1": ["unlisted"], "acme_lib-2.1": ["applies"]})
    assert run("drift", "--catalogue", str(acme), "0.34.0rc1").exit_code == 1, "asked for by name, it must be listed"
    assert run(*command[:-2], "0.34.0rc1").exit_code == 1, "also where it is the newest"
    # The day on which a release comes that does not fit.
    publish("3.0", library=LIBRARY.replace("return VALUE", "return int(VALUE)"))
    status, found = seen()
    assert status == 1
    assert found["acme_lib-3.0"] == ["unlisted"]
    text = run(*command[:-2]).output
    assert "acme-lib 3.0: acme/answer: unlisted" in text
    assert "would not apply: drifted (1 of 1 hunks)" in text
    assert "return int(VALUE)" in text
    server.status = 500
    assert run("drift", "--catalogue", str(acme), "--next").exit_code == 2


def test_all_are_the_releases_that_patches_are_for(acme: Path, publish: Callable[..., Path]) -> None:
    for version in ("0.31.0", "0.32.0", "0.33.0", "0.33.1", "0.33.2rc1", "0.34.0"):
        publish(version)
    for version in ("1.9", "2.0", "2.5"):
        publish(version, library=LIBRARY)
    result = run("drift", "--catalogue", str(acme), "--all")
    assert result.exit_code == 0, result.output
    assert [line.partition(":")[0] for line in lines(result)] == [
        "vllm 0.32.0",
        "vllm 0.33.0",
        "vllm 0.33.1",
        "acme-lib 2.0",
        "acme-lib 2.5",
    ]
    (acme / "answer" / "patch.toml").write_text((acme / "answer" / "patch.toml").read_text().replace(">=2", ">2.6"))
    result = run("drift", "--catalogue", str(acme), "--all")
    assert result.exit_code == 2
    assert "no release of acme-lib that a patch is for; they are for >2.6,<3" in result.output


def test_a_catalogue_that_is_left_out_is_a_problem_where_it_stops_a_process(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")

    def said(on: str, strict: str) -> list[str]:
        environ = {"VLLM_HWPLUGIN_PATCHES": nowhere, "VLLM_HWPLUGIN_CACHE_DIR": str(tmp_path / "cache")}
        found = _diagnosis.diagnose({**environ, "VLLM_HWPLUGIN": on, "VLLM_HWPLUGIN_STRICT": strict})
        lines = {"problem": found.problems, "warning": found.warnings}
        start = f"{nowhere} is not patched in, vLLM runs unpatched there: "
        return [kind for kind, some in lines.items() if any(line.startswith(start) for line in some)]

    # Strict mode has nothing to say to a process without the plugin.
    assert [said("1", "0"), said("1", "1"), said("0", "1")] == [["warning"], ["problem"], ["warning"]]
