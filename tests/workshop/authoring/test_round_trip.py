"""Real changes of vLLM: what is imported, written and read again gives upstream's own text, where the results say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_hwplugin.patching import SUPPORTED, Catalogue, Source, make_plan, outside
from vllm_hwplugin_lab.bench import read_results
from vllm_hwplugin_workshop.authoring import About, Outcome, carry_all, create, read_change, written

from .made import git_diff

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "import_share.json"
SETS: dict[str, Any] = read_results(RESULTS.read_text())["sets"]
# Those that several versions take, and a few of the others: the command that wrote the file looks at each one so.
CHANGES = [
    item
    for changes in (SETS["fixes"]["changes"], SETS["releases"]["changes"])
    for number, item in enumerate(changes)
    if item["hunks"] <= 4 and (number % 16 == 0 or len(item["applies"].split()) >= 5)
]


def test_enough_is_imported() -> None:
    assert len(CHANGES) >= 10
    assert {item["to"] for item in CHANGES} >= {"0.20.1", "0.25.1", "0.32.0"}


@pytest.mark.parametrize("item", CHANGES, ids=lambda item: f"{item['to']}-{Path(item['file']).stem}")
def test_import_gives_upstreams_text(vllm_tree: Callable[[str], Source], tmp_path: Path, item: dict[str, Any]) -> None:
    path = item["file"]
    before, after = vllm_tree(item["from"]).read(path), vllm_tree(item["to"]).read(path)
    assert before is not None
    assert after is not None
    change = read_change(git_diff(before, after, path), "upstream.diff")
    carried = carry_all(change, [vllm_tree(version) for version in SUPPORTED], hints=False)
    good = [each for each in carried if each.outcome is Outcome.APPLIES]
    assert [each.version for each in good] == item["applies"].split()
    (tmp_path / "catalogue.toml").write_text('name = "mine"\n')
    upstream = [each.version for each in carried if each.outcome is Outcome.UPSTREAM]
    create(tmp_path / "it", About("it", "it", "vLLM", "never"), written(good), upstream)

    for each in carried:
        # As a process of that version reads and plans it.
        features = outside.load_outside(tmp_path, version=each.version).features
        plan = make_plan(Catalogue(features), vllm_tree(each.version), {})
        state = plan.features["mine/it"].state
        if each.outcome is Outcome.APPLIES:
            assert state == "live", plan.features["mine/it"].reason
            assert plan.files[path].text == each.files[path].result
        else:
            assert state == ("not-needed" if each.outcome is Outcome.UPSTREAM else "refused")
        if each.version == item["from"]:
            assert plan.files[path].text == after
        elif each.outcome is Outcome.APPLIES:
            # What the version has of its own is still there: the lines that differ are the change's and no others.
            assert _changed(vllm_tree(each.version).read(path) or "", plan.files[path].text) == _changed(before, after)


def _changed(before: str, after: str) -> tuple[Counter[str], Counter[str]]:
    """The lines that are there less often, and those that are there more often."""
    one, other = Counter(before.splitlines()), Counter(after.splitlines())
    return one - other, other - one
