"""Real changes of vLLM: what is imported, written and read again gives upstream's own text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.patching import Catalogue, make_plan, outside
from vllm_hwplugin.patching.texts import Source
from vllm_hwplugin_workshop.authoring import About, Outcome, carry_all, create, read_change, written

from .made import git_diff

#: A file of vLLM, what changed it, from which release to the next, and the first release that takes the change.
CHANGES = [
    ("vllm/config/vllm.py", "0.20.0", "0.20.1", "0.20.0"),
    ("vllm/compilation/passes/fusion/allreduce_rms_fusion.py", "0.25.0", "0.25.1", "0.20.0"),
    ("vllm/v1/spec_decode/llm_base_proposer.py", "0.25.1", "0.26.0", "0.21.0"),
    ("vllm/v1/spec_decode/llm_base_proposer.py", "0.27.1", "0.28.0", "0.25.0"),
    ("vllm/v1/attention/selector.py", "0.30.0", "0.31.0", "0.26.0"),
    ("vllm/v1/worker/gpu/spec_decode/eagle/speculator.py", "0.31.0", "0.32.0", "0.23.0"),
]


@pytest.mark.parametrize(("path", "old", "new", "first"), CHANGES)
def test_import_gives_upstreams_text(
    vllm_tree: Callable[[str], Source], tmp_path: Path, path: str, old: str, new: str, first: str
) -> None:
    before, after = vllm_tree(old).read(path), vllm_tree(new).read(path)
    assert before is not None
    assert after is not None
    change = read_change(git_diff(before, after, path), "upstream.diff")
    carried = carry_all(change, [vllm_tree(version) for version in SUPPORTED], hints=False)
    good = [each for each in carried if each.outcome is Outcome.APPLIES]
    assert [each.version for each in good] == list(SUPPORTED[SUPPORTED.index(first) : SUPPORTED.index(old) + 1])
    (tmp_path / "catalogue.toml").write_text('name = "mine"\n')
    upstream = [each.version for each in carried if each.outcome is Outcome.UPSTREAM]
    create(tmp_path / "it", About("it", "it", "vLLM", "never"), written(good), upstream)

    for each in carried:
        # As a process of that version reads and plans it.
        features = outside.load_outside(tmp_path).features
        plan = make_plan(Catalogue(features), vllm_tree(each.version), {})
        state = plan.features["mine/it"].state
        if each.outcome is Outcome.APPLIES:
            assert state == "live", plan.features["mine/it"].reason
            assert plan.files[path].text == each.files[path].result
        else:
            assert state == ("not-needed" if each.outcome is Outcome.UPSTREAM else "refused")
        if each.version == old:
            assert plan.files[path].text == after
        elif each.outcome is Outcome.APPLIES:
            # What the version has of its own is still there: the lines that differ are the change's and no others.
            assert _changed(vllm_tree(each.version).read(path) or "", plan.files[path].text) == _changed(before, after)


def _changed(before: str, after: str) -> tuple[Counter[str], Counter[str]]:
    """The lines that are there less often, and those that are there more often."""
    one, other = Counter(before.splitlines()), Counter(after.splitlines())
    return one - other, other - one
