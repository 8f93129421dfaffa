"""The real catalogue on the real text of every supported vLLM: what the drift check says, asserted."""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.patching import Catalogue, load_catalogue, make_plan
from vllm_hwplugin.patching._swap import changed_bodies
from vllm_hwplugin.patching.texts import Source, Status
from vllm_hwplugin_workshop.verdicts import evaluate, evaluate_together, render_diff

from ..conftest import versions

every_version = pytest.mark.parametrize("version", versions("vllm/"))


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


@pytest.mark.slow
def test_every_hunk_still_changes_something(vllm_tree: Callable[[str], Source], catalogue: Catalogue) -> None:
    """One that is upstream, or not needed, wherever it was written for has become dead text."""
    made: set[tuple[str, str, int]] = set()
    for version in SUPPORTED:
        verdicts, _ = evaluate_together(catalogue, vllm_tree(version), hints=False)
        made |= {
            (item.feature, hunk.origin, hunk.hunk_index)
            for item in verdicts
            if item.status is Status.APPLIES
            for hunk in item.hunks
        }
    every = {
        (feature.id, file.origin, hunk.number)
        for feature in catalogue.features
        for file in feature.files
        for hunk in file.hunks
    }
    assert made == every


@every_version
def test_the_plan_is_whole_and_compiles(vllm_tree: Callable[[str], Source], catalogue: Catalogue, version: str) -> None:
    source = vllm_tree(version)
    plan = make_plan(catalogue, source, {feature.gate: "on" for feature in catalogue.features})
    assert plan.errors == ()
    live = {name for name, item in plan.features.items() if item.state == "live"}
    assert live == {name for file in plan.files.values() for name in file.features}
    for path, file in plan.files.items():
        assert file.text != source.read(path)
        compile(file.text, path, "exec", dont_inherit=True)


# Imported before the plugin wherever vLLM starts.
EARLY = {"vllm.v1.structured_output"}


@every_version
def test_what_is_imported_early_and_what_dflash_forces_needs_new_bodies_alone(
    vllm_tree: Callable[[str], Source], catalogue: Catalogue, version: str
) -> None:
    source = vllm_tree(version)
    plan = make_plan(catalogue, source, {feature.gate: "on" for feature in catalogue.features})
    asked = [
        file
        for file in plan.files.values()
        if file.module in EARLY or any(name.startswith(("dflash-", "draft-")) for name in file.features)
    ]
    assert {file.module for file in asked} > {"vllm.v1.spec_decode.dflash"}
    for file in asked:
        assert changed_bodies(ast.parse(source.read(file.path) or ""), ast.parse(file.text)), file.path


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("version", versions("vllm/", each_text=False))
def test_git_makes_the_same_text(
    vllm_tree: Callable[[str], Source], catalogue: Catalogue, version: str, tmp_path: Path
) -> None:
    """What `patches diff` prints for review leads, by another program, to what a process runs."""
    source = vllm_tree(version)
    for feature in catalogue.features:
        if evaluate(feature, source).status is not Status.APPLIES:
            continue
        folder = tmp_path / feature.id
        # On its own, so that no other feature's lines are in the text.
        files = make_plan(Catalogue((feature._replace(requires=()),)), source, {}).files
        for path in files:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes((source.read(path) or "").encode())
        subprocess.run(["git", "init", "-q", "."], cwd=folder, check=True)
        command = ["git", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", "-"]
        subprocess.run(command, cwd=folder, input=render_diff(feature, source).encode(), check=True)
        for path, file in files.items():
            assert (folder / path).read_bytes().decode() == file.text, path
