"""The hint for a hunk that is not found: the right place, what differs there, and quickly."""

from __future__ import annotations

import time

import pytest

from tests.cpu_seconds import slowness
from vllm_hwplugin_workshop.nearest import LONGEST_COMPARED, nearest

LINES = [f"    value_{number} = compute({number})\n" if number % 3 else "\n" for number in range(6000)]


@pytest.mark.parametrize(
    ("block", "line", "similarity"),
    [
        ([*LINES[4000:4004], "changed\n", *LINES[4005:4010]], 4001, 0.9),
        # Upstream added two lines inside, and took one away.
        ([*LINES[4000:4003], *LINES[4005:4010]], 4001, 16 / 18),
        ([*LINES[4000:4003], "gone\n", *LINES[4003:4010]], 4001, 20 / 21),
        # All of it is inside one more `if`: equal but for the indentation, blank lines aside.
        (["    " + line if line.strip() else line for line in LINES[4000:4009]], 4001, (3 / 9 + 1) / 2),
    ],
    ids=["changed", "added", "removed", "indented"],
)
def test_place_and_similarity(block: list[str], line: int, similarity: float) -> None:
    found = nearest(LINES, block, stated=10)
    assert found is not None
    assert (found.line, found.similarity) == (line, pytest.approx(similarity))


def test_diff_shows_the_difference_only() -> None:
    block = [*LINES[4000:4004], "changed\n", *LINES[4005:4010]]
    found = nearest(LINES, block, stated=10)
    assert found is not None
    shown = [line for line in found.diff.splitlines()[3:] if not line.startswith(" ")]
    assert shown == ["-changed", "+" + LINES[4004].rstrip("\n")]


def test_equal_places_the_nearest_to_the_stated_line_is_meant() -> None:
    lines = ["a\n", "b\n", "c\n", *LINES[:50], "a\n", "b\n", "c\n", *LINES[50:90], "a\n", "b\n", "c\n"]
    found = nearest(lines, ["a\n", "x\n", "c\n"], stated=60)
    assert found is not None
    assert found.line == 54


def test_rare_lines_count_most() -> None:
    """Upstream spread the block's own lines, and two common ones still stand side by side all over the file."""
    common = ["pass\n", "return\n"]
    lines = [*common * 20, "one\n", "new\n", "two\n", "new\n", "three\n", *common * 20]
    found = nearest(lines, ["one\n", "two\n", "three\n", *common], stated=0)
    assert found is not None
    assert found.line == 41


def test_line_ends_are_visible() -> None:
    """Else the two sides of the difference would read the same."""
    found = nearest(["a\r\n", "b\r\n", "c"], ["a\n", "b\n", "c\n"], stated=0)
    assert found is not None
    assert "-a\n" in found.diff
    assert "+a\\r\n" in found.diff
    assert "+c\\ no newline\n" in found.diff


@pytest.mark.parametrize("block", [["nothing\n", "like it\n"], ["\n", "\n"]])
def test_nothing_alike(block: list[str]) -> None:
    """Blank lines are everywhere, so they say nothing."""
    assert nearest(LINES, block, stated=0) is None


def test_quick_on_a_large_file() -> None:
    """The largest module of vLLM has 7,300 lines; a changed tree may need this for dozens of hunks."""
    lines = [f"x{number % 40}\n" for number in range(7500)]
    block = [f"x{number % 40}\n" if number % 7 else "y\n" for number in range(60)]
    start = time.process_time()
    assert nearest(lines, block, stated=5000) is not None
    assert time.process_time() - start < max(1, slowness())


@pytest.mark.parametrize("length", [LONGEST_COMPARED, 4000])
def test_equal_lines_without_end_take_no_time(length: int) -> None:
    start = time.process_time()
    assert nearest(["x\n"] * 60_000, ["x\n"] * length, stated=0) is None
    assert time.process_time() - start < max(1, slowness())


def test_a_hunk_is_compared_up_to_a_length() -> None:
    lines = [f"line {number}\n" for number in range(7000)]
    start = time.process_time()
    for length, is_compared in ((LONGEST_COMPARED, True), (LONGEST_COMPARED + 1, False), (3000, False)):
        block = [line if number % 3 else "other\n" for number, line in enumerate(lines[100 : 100 + length])]
        assert (nearest(lines, block, stated=0) is not None) == is_compared
    assert time.process_time() - start < 2 * max(1, slowness())
