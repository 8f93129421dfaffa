"""The real catalogue on the real text of every supported vLLM: what the drift check says, asserted."""

from __future__ import annotations

import ast
import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.patching import Catalogue, load_catalogue, make_plan
from vllm_hwplugin.patching._swap import changed_bodies
from vllm_hwplugin.patching.texts import Plan, Source, Status
from vllm_hwplugin_workshop.verdicts import evaluate, render_diff

from ..conftest import versions

CATALOGUE = load_catalogue()
# Imported before the plugin: wherever vLLM starts; the others by the program `vllm` of 0.33.
EARLY = {"vllm.v1.structured_output", "vllm.model_executor.layers.utils", "vllm.v1.core.sched.scheduler"}


@pytest.fixture(scope="module")
def plan_of(vllm_tree: Callable[[str], Source]) -> Callable[[str], Plan]:
    """`plan_of("0.33.0")`: the plan of all features on that vLLM, made once."""
    choices = {feature.gate: "on" for feature in CATALOGUE.features}
    return functools.cache(lambda version: make_plan(CATALOGUE, vllm_tree(version), choices))


@pytest.mark.slow
def test_every_hunk_still_changes_something(plan_of: Callable[[str], Plan]) -> None:
    """A hunk that is upstream, or not needed, wherever it was written for is dead text."""
    live = {
        (name, hunk.origin, hunk.hunk_index)
        for version in SUPPORTED
        for name, feature in plan_of(version).features.items()
        if feature.state == "live" and feature.verdict is not None
        for hunk in feature.verdict.hunks
    }
    assert live == {
        (feature.id, file.origin, hunk.number)
        for feature in CATALOGUE.features
        for file in feature.files
        for hunk in file.hunks
    }


@pytest.mark.parametrize("version", versions("vllm/"))
def test_the_plan_is_whole_and_compiles_and_early_modules_need_new_bodies_only(
    vllm_tree: Callable[[str], Source], plan_of: Callable[[str], Plan], version: str
) -> None:
    source, plan = vllm_tree(version), plan_of(version)
    assert plan.errors == ()
    live = {name for name, item in plan.features.items() if item.state == "live"}
    assert live == {name for file in plan.files.values() for name in file.features}
    early = set()
    for path, file in plan.files.items():
        before = source.read(path) or ""
        assert file.text != before
        compile(file.text, path, "exec", dont_inherit=True)
        # What DFlash forces was perhaps imported past the finder.
        if file.module in EARLY or any(name.startswith(("dflash-", "draft-")) for name in file.features):
            early.add(file.module)
            assert changed_bodies(ast.parse(before), ast.parse(file.text)), path
    assert early > {"vllm.v1.spec_decode.dflash"}


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("version", versions("vllm/", each_text=False))
def test_git_makes_the_same_text(vllm_tree: Callable[[str], Source], version: str, tmp_path: Path) -> None:
    """What `patches diff` prints for review leads, by another program, to what a process runs."""
    source = vllm_tree(version)
    for feature in CATALOGUE.features:
        if evaluate(feature, source).status is not Status.APPLIES:
            continue
        folder = tmp_path / feature.id
        # On its own, so that no other feature's lines are in the text.
        files = make_plan(Catalogue((feature._replace(requires=()),)), source, {}).files
        for path in files:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes((source.read(path) or "").encode())
        # Without a repository around it, `git apply` is an ordinary program that patches.
        command = ["git", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", "-"]
        environ = {"GIT_CEILING_DIRECTORIES": str(folder.parent), "PATH": os.environ["PATH"]}
        subprocess.run(command, cwd=folder, input=render_diff(feature, source).encode(), check=True, env=environ)
        for path, file in files.items():
            assert (folder / path).read_bytes().decode() == file.text, path
