"""A change on several versions: where it may be made, and the diffs that are made of it, as the engine reads them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from vllm_hwplugin.base.versions import Versions
from vllm_hwplugin.patching import Catalogue, Feature, make_plan
from vllm_hwplugin.patching.texts import Text, parse_diff
from vllm_hwplugin_workshop.authoring import Carried, Outcome, carry, carry_all, read_change, render, written

from .made import PATH, Memory, git_diff

# The same function again and again, as in much of vLLM: a line of context, or three, do not tell one from another.
BODY = "    def f(self):\n        a = 0\n        b = 0\n        x = 1\n        return x\n"
BODY += "\n    def g(self):\n        c = 0\n        return c\n\n\n"
TWINS = "".join(f"class {name}:\n{BODY}" for name in "ABC")
CHANGED_A = TWINS.replace("return x\n", "return x + 1\n", 1)
CHANGED_B = f"class A:\n{BODY}" + TWINS.partition(BODY)[2].replace("return x\n", "return x + 1\n", 1)


def versions(**texts: str) -> list[Memory]:
    return [Memory(name.removeprefix("v").replace("_", "."), {PATH: text}) for name, text in texts.items()]


def outcomes(carried: Sequence[Carried]) -> dict[str, str]:
    return {item.version: item.outcome.value for item in carried}


def as_processes_do(carried: Sequence[Carried], sources: Sequence[Memory]) -> dict[str, Mapping[str, str]]:
    """What a process of each version would run, of the diffs that are made: read from their text, and planned."""
    made = written([item for item in carried if item.outcome is Outcome.APPLIES])
    feature = Feature(
        *("made", "made", "VLLM_HWPLUGIN_PATCH_MADE", "made", "made", "made"),
        requires=(),
        versions=Versions(made.versions),
        not_needed=(),
        files=tuple(diff for name, diffs in made.diffs.items() for diff in parse_diff(render(diffs), name)),
    )
    return {
        source.version: {path: file.text for path, file in make_plan(Catalogue((feature,)), source, {}).files.items()}
        for source in sources
        if any(item.version == source.version and item.outcome is Outcome.APPLIES for item in carried)
    }


def ranges(carried: Sequence[Carried]) -> tuple[str, dict[str, list[str | None]]]:
    """What the feature would be for, and each hunk of its files."""
    made = written([item for item in carried if item.outcome is Outcome.APPLIES])
    return made.versions, {
        name: [hunk.versions and str(hunk.versions) for diff in diffs for hunk in diff.hunks]
        for name, diffs in made.diffs.items()
    }


def results(carried: Sequence[Carried]) -> dict[str, Mapping[str, str]]:
    return {
        item.version: {path: edited.result for path, edited in item.files.items()}
        for item in carried
        if item.outcome is Outcome.APPLIES
    }


@pytest.mark.parametrize("changed", [CHANGED_A, CHANGED_B])
def test_of_two_places_the_base_says_which(changed: str) -> None:
    """Without git's name of the text, the same diff could mean either function, and is refused."""
    (source,) = versions(v0_30_0=TWINS)
    named = read_change(git_diff(TWINS, changed, context=1), "it")
    assert carry(named, source).files[PATH].result == changed
    unnamed = carry(read_change(git_diff(TWINS, changed, context=1, named=False), "it"), source)
    assert unnamed.outcome is Outcome.CONFLICT
    assert [item.verdict.status for item in unnamed.rejected] == ["ambiguous"]


def test_only_what_each_file_needs_is_made_twice() -> None:
    """And a version in the midst that the change does not fit is in no range."""
    old = "".join(f"a = {n}\n" for n in range(20))
    after = old.replace("a = 10\n", "a = 100\n")
    other = "vllm/core/alpha.py"
    change = read_change(git_diff(old, after) + git_diff(old, after, other), "it")
    sources = [
        Memory("0.27.0", {PATH: old, other: old}),
        Memory("0.28.0", {PATH: old, other: after}),
        Memory("0.29.0", {PATH: "gone = 1\n", other: old}),
        Memory("0.30.0", {PATH: old + "b = 1\n", other: old}),
    ]
    carried = carry_all(change, sources)
    assert outcomes(carried) == {
        "0.27.0": "applies",
        "0.28.0": "conflict",
        "0.29.0": "conflict",
        "0.30.0": "applies",
    }
    assert carried[1].reason == "1 of 2 hunks are in this vLLM already, and the rest are not"
    expected = {"core-alpha.diff": [None], "v1-alpha.diff": [None]}
    assert ranges(carried) == (">=0.27,<0.27.1 || >=0.30,<0.31", expected)


def test_a_version_after_one_that_has_the_change_is_left_to_people() -> None:
    """vLLM has moved the new lines elsewhere, say: made once more, they would be there twice."""
    old = "".join(f"a = {number}\n" for number in range(20))
    new = old.replace("a = 10\n", "a = 10\nadded = 1\n")
    sources = versions(v0_30_0="# older\n" + old, v0_31_0="# has it\n" + new, v0_32_0=old + "added = 1\n")
    change = read_change(git_diff(old, new), "it")
    carried = carry_all(change, sources)
    assert outcomes(carried) == {"0.30.0": "applies", "0.31.0": "upstream", "0.32.0": "conflict"}
    assert "vLLM 0.31.0 has the change already" in carried[2].reason
    # The text that the diff was made from is meant, whatever others have.
    assert outcomes(carry_all(change, versions(v0_31_0="# has it\n" + new, v0_32_0=old)))["0.32.0"] == "applies"


def test_what_would_be_no_python_is_refused() -> None:
    old = "def f():\n    return 1\n\n\na = 1\n"
    change = read_change(git_diff(old, old.replace("    return 1\n", "    return (1\n")), "it")
    carried = carry(change, Memory("0.30.0", {PATH: old}))
    assert carried.outcome is Outcome.CONFLICT
    assert "would be no Python" in carried.reason


@pytest.mark.parametrize("seed", range(200))
def test_random_changes_of_repetitive_texts(seed: int) -> None:
    """Few different lines, so that nearly every context is there twice: what is made is right, or it is not made."""
    rng = random.Random(seed)
    lines = [f"a = {rng.randrange(2)}\n" for _ in range(rng.randrange(2, 60))]
    new = list(lines)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(new) + 1)
        new[at : at + rng.randrange(3)] = [f"a = {rng.randrange(3)}\n" for _ in range(rng.randrange(3))]
    before, after = "".join(lines), "".join(new)
    if rng.random() < 0.3:
        after = after.removesuffix("\n")
    if before == after:
        return
    sources = versions(v0_29_0="top = 1\n" + before, v0_30_0=before, v0_31_0=before + "end = 1\n")
    carried = carry_all(read_change(git_diff(before, after), "it"), sources)
    assert carried[1].outcome is Outcome.APPLIES
    assert carried[1].files[PATH].result == after
    # Both lines of each header are those of the texts, as `diff -u` counts them.
    for diffs in written([carried[1]]).diffs.values():
        for hunk in diffs[0].hunks:
            for text, begin, block in (
                (before, hunk.source_start, hunk.before),
                (after, hunk.target_start, hunk.after),
            ):
                assert Text(text).has(block, begin - bool(block)) or not block
    for item, right in ((carried[0], "top = 1\n" + after), (carried[2], after + "end = 1\n")):
        if item.outcome is Outcome.APPLIES and after.endswith("\n"):
            assert item.files[PATH].result == right
    assert as_processes_do(carried, sources) == results(carried)
