"""The hint for a hunk that is not found: the right place, what differs there, and quickly."""

from __future__ import annotations

import pytest

from vllm_hwplugin_workshop.nearest import nearest

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


@pytest.mark.parametrize("block", [["nothing\n", "like it\n"], ["\n", "\n"]])
def test_nothing_alike(block: list[str]) -> None:
    """Blank lines are everywhere, so they say nothing."""
    assert nearest(LINES, block, stated=0) is None
