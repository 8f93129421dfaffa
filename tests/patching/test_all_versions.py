"""The real catalogue on the real text of every supported vLLM: what the drift check says, asserted."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from vllm_hwplugin.patching import (
    SUPPORTED,
    Catalog,
    Source,
    Status,
    default_folder,
    evaluate,
    evaluate_together,
    load_catalog,
    make_plan,
    render_diff,
)

from ..conftest import versions

every_version = pytest.mark.parametrize("version", versions("vllm/"))
EXPECTED = {Status.APPLIES, Status.UPSTREAM, Status.NOT_NEEDED}


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


@every_version
def test_every_feature_has_a_good_verdict(vllm_tree: Callable[[str], Source], catalog: Catalog, version: str) -> None:
    source = vllm_tree(version)
    judged, conflicts = evaluate_together(catalog, source)
    verdicts = {verdict.feature: verdict for verdict in judged}
    assert {name: item.reason for name, item in verdicts.items() if item.status not in EXPECTED} == {}
    assert conflicts == []


@pytest.mark.slow
def test_every_variant_still_changes_something(vllm_tree: Callable[[str], Source], catalog: Catalog) -> None:
    """One that is upstream, or not needed, wherever it was written for has become dead text."""
    for feature in catalog.features:
        for variant in feature.variants:
            sources = [vllm_tree(version) for version in variant.versions.supported()]
            found = {evaluate(feature, source).status for source in sources}
            assert Status.APPLIES in found, f"{feature.id}: {variant.versions}"


@every_version
def test_the_plan_is_whole_and_compiles(vllm_tree: Callable[[str], Source], catalog: Catalog, version: str) -> None:
    source = vllm_tree(version)
    plan = make_plan(catalog, source, {feature.gate: "on" for feature in catalog.features})
    assert plan.errors == ()
    live = {name for name, item in plan.features.items() if item.state == "live"}
    assert live == {name for file in plan.files.values() for name in file.features}
    for path, file in plan.files.items():
        assert file.text != source.read(path)
        compile(file.text, path, "exec", dont_inherit=True)
    # A process reads the diffs of its own version only, which must settle the same.
    assert make_plan(load_catalog(version=version), source, {}).files == plan.files


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@every_version
def test_git_makes_the_same_text(
    vllm_tree: Callable[[str], Source], catalog: Catalog, version: str, tmp_path: Path
) -> None:
    """What `patches diff` prints for review leads, by another program, to what a process runs."""
    source = vllm_tree(version)
    for feature in catalog.features:
        if evaluate(feature, source).status is not Status.APPLIES:
            continue
        folder = tmp_path / feature.id
        # On its own, so that no other feature's lines are in the text.
        files = make_plan(Catalog((feature._replace(requires=()),)), source, {}).files
        for path in files:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes((source.read(path) or "").encode())
        subprocess.run(["git", "init", "-q", "."], cwd=folder, check=True)
        command = ["git", "-c", "core.autocrlf=false", "apply", "--whitespace=nowarn", "-"]
        subprocess.run(command, cwd=folder, input=render_diff(feature, source).encode(), check=True)
        for path, file in files.items():
            assert (folder / path).read_bytes().decode() == file.text, path


def test_every_variant_covers_consecutive_supported_versions(catalog: Catalog) -> None:
    """A range with a hole, or with nothing in it, is a slip in a `patch.toml`."""
    for feature in catalog.features:
        assert feature.variants, feature.id
        for item in (*feature.variants, *feature.not_needed):
            covered = [SUPPORTED.index(version) for version in item.versions.supported()]
            assert covered, f"{feature.id}: {item.versions} covers no supported version"
            assert all(other == one + 1 for one, other in pairwise(covered)), f"{feature.id}: {item.versions}"


def test_neighbouring_variants_differ(catalog: Catalog) -> None:
    """Two with the same diffs side by side are one."""
    for feature in catalog.features:
        in_order = sorted(feature.variants, key=lambda item: SUPPORTED.index(item.versions.supported()[0]))
        for one, other in pairwise(in_order):
            assert one.files != other.files, f"{feature.id}: '{one.versions}' and '{other.versions}' are the same diffs"


def test_every_diff_is_used(catalog: Catalog) -> None:
    for feature in catalog.features:
        used = {diff.origin for variant in feature.variants for diff in variant.files}
        found = {f"{feature.id}/{item.name}" for item in (default_folder() / feature.id).iterdir()}
        assert used == found - {f"{feature.id}/patch.toml"}
