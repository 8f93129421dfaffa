"""Hunks are found exactly or not at all, and change nothing but their own lines."""

from __future__ import annotations

import random

import pytest

from vllm_hwplugin.patching._apply import Text, locate, split_lines
from vllm_hwplugin_workshop.nearest import nearest

from .texts import ALPHA, apply, file_diff, statuses

MIDDLE = file_diff(ALPHA, ALPHA.replace("line 10\n", "line ten\n"))
TWICE = file_diff(ALPHA, ALPHA.replace("line 3\n", "line three\n").replace("line 15\n", "line fifteen\n"))


@pytest.mark.parametrize(
    ("old", "new"),
    [("line 9\n", "line  9\n"), ("line 9\n", "line 9\r\n"), ("line 10\n", "line 010\n"), ("line 12\n", "")],
)
def test_any_other_context_or_removed_line_is_drift(old: str, new: str) -> None:
    """No fuzz: not for a space, not for a line end, not at the edge of the context."""
    text = ALPHA.replace(old, new)
    ((verdict, place),) = locate(MIDDLE, Text(text), nearest)
    assert (verdict.status, place) == ("drifted", None)
    assert verdict.expected == tuple(f"line {number}" for number in range(7, 14))
    assert verdict.nearest is not None
    assert verdict.nearest.line == 7


def test_ambiguous_names_every_place() -> None:
    text = "new\n" + ALPHA + ALPHA
    ((verdict, place),) = locate(MIDDLE, Text(text))
    assert (verdict.status, verdict.found_at, place) == ("ambiguous", (8, 28), None)


def test_order_of_a_files_hunks_is_kept() -> None:
    """Upstream swapped two blocks: each hunk is found, but where the diff has them the other way round."""
    lines = split_lines(ALPHA)
    (_, place), (second, other) = locate(TWICE, Text("".join(lines[10:] + lines[:10])))
    assert (place, second.status, other) == (10, "drifted", None)
    assert second.nearest is not None
    assert (second.nearest.line, second.nearest.diff) == (2, "")


def test_hunks_that_run_into_one_another_are_refused() -> None:
    """Upstream took away all between them: what follows the one hunk is not what the diff shows."""
    text = "a\nb\nsame\n1\n2\n3\nsame\ny\nz\n"
    diff = file_diff(text, text.replace("b\n", "B\n").replace("y\n", "Y\n"), context=1)
    assert statuses(diff, text) == ["exact", "exact"]
    assert statuses(diff, text.replace("1\n2\n3\nsame\n", "")) == ["exact", "drifted"]


@pytest.mark.parametrize(
    "new",
    [
        ALPHA.replace("line 10\n", "line ten\n"),
        ALPHA.replace("line 10\n", ""),
        ALPHA.replace("line 10\n", "line 10\nand a half\n"),
        "top\n" + ALPHA,
        ALPHA + "bottom\n",
        ALPHA.removesuffix("\n"),
    ],
    ids=["changed", "removed", "added", "added at the top", "added at the bottom", "newline removed"],
)
def test_upstream_already(new: str) -> None:
    """The text after the change is there: never applied a second time, though the context may still be found."""
    diff = file_diff(ALPHA, new)
    assert apply(diff, ALPHA) == new
    assert statuses(diff, new) == ["upstream"]
    assert statuses(diff, "moved\n" * 3 + new) == ["upstream"]


@pytest.mark.parametrize(
    ("new", "edited"),
    [
        (ALPHA.removesuffix("line 20\n"), ALPHA.replace("line 20\n", "line twenty\n")),
        (ALPHA.removeprefix("line 1\n"), ALPHA.replace("line 1\n", "line one\n")),
    ],
    ids=["bottom", "top"],
)
def test_removed_at_the_edge_of_the_file(new: str, edited: str) -> None:
    """Only the edge itself shows that the line is gone: its neighbours are there too where it was edited."""
    diff = file_diff(ALPHA, new)
    assert apply(diff, ALPHA) == new
    assert statuses(diff, new) == ["upstream"]
    assert statuses(diff, edited) == ["drifted"]


def test_present_here_and_missing_there_is_ambiguous() -> None:
    """One of two places has the added line: which one the diff means, nobody can say."""
    diff = file_diff(ALPHA, "top\n" + ALPHA)
    text = "x\ntop\n" + ALPHA + "y\n" + ALPHA
    ((verdict, place),) = locate(diff, Text(text))
    assert (verdict.status, verdict.found_at, place) == ("ambiguous", (3, 24), None)


TWINS = "".join(f"def {name}():\n    one = 1\n    two = 2\n    return one\n\n\n" for name in "ab")


@pytest.mark.parametrize("line", ["    one = 1\n", ""], ids=["changed", "removed"])
def test_a_place_whose_twin_has_the_change_is_not_the_one(line: str) -> None:
    """A version that has it in the first of two like functions leaves the second as the only place of the context."""
    changed = TWINS.replace("    two = 2\n", line, 1)
    diff = file_diff(TWINS, changed, context=1)
    for text, found_at in ((changed, (2, 7 + bool(line))), ("x\n" + changed, (3, 8 + bool(line)))):
        ((verdict, place),) = locate(diff, Text(text))
        assert (verdict.status, verdict.found_at, place) == ("ambiguous", found_at, None)


def _random_text(rng: random.Random, size: int) -> list[str]:
    # Few different lines, so that many places look alike.
    words = ["x = 1", "", "    return", "def f():", ")", "x = 1\r", "é\u2028", "\x0c"]
    return [rng.choice(words) if rng.random() < 0.3 else f"v{rng.randrange(400)} = {rng.random()}" for _ in range(size)]


def _generated(count: int) -> list[tuple[str, str]]:
    rng = random.Random(20)
    pairs = []
    for _ in range(count):
        old = _random_text(rng, rng.randrange(0, 60))
        new = list(old)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(new) + 1)
            new[at : at + rng.randrange(0, 4)] = _random_text(rng, rng.randrange(0, 4))
        before = "\n".join(old) + rng.choice(["", "\n"])
        after = "\n".join(new) + rng.choice(["", "\n"])
        if before != after:
            pairs.append((before, after))
    return pairs


def test_generated_diffs_round_trip() -> None:
    """Whatever difflib finds between two texts leads from the one to the other, and is seen as upstream afterwards."""
    upstream = 0
    for before, after in _generated(1500):
        diff = file_diff(before, after)
        assert apply(diff, before) == after
        # Applied to the result, it may at most be refused: a second application would show here.
        assert apply(diff, after) is None
        upstream += set(statuses(diff, after)) == {"upstream"}
    assert upstream > 1000
