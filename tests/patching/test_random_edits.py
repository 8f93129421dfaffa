"""Someone edits one line of the real vLLM: each feature is applied with that edit in place, or refused as a whole.

What must come out is made without the engine's own positions of edits: the text that the live features make of the
untouched file, with the same edit put at the line to which the hunks before it have moved it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from vllm_hwplugin.patching import Catalogue, Hunk, Plan, Source, load_catalogue, make_plan
from vllm_hwplugin.patching._apply import split_lines

EDITS_PER_MODULE = 40
NEW = "    edited = True  # in no file of vLLM\n"


@dataclass(frozen=True)
class LineEdit:
    """Change line `at` (from 0), delete it, or insert a line before it."""

    kind: str
    at: int

    def of(self, lines: list[str], moved: int = 0) -> str:
        at = self.at + moved
        kept = at if self.kind == "insert" else at + 1
        return "".join([*lines[:at], *([] if self.kind == "delete" else [NEW]), *lines[kept:]])


@dataclass(frozen=True)
class Spot:
    """A hunk on the untouched text: lines `start` to `end` (from 0, end excluded)."""

    feature: str
    hunk: Hunk
    start: int

    @property
    def end(self) -> int:
        return self.start + self.hunk.source_length

    def broken_by(self, edit: LineEdit) -> bool:
        """An insertion breaks a hunk between two of its lines, not above or below them."""
        return (self.start < edit.at if edit.kind == "insert" else self.start <= edit.at) and edit.at < self.end


@dataclass(frozen=True)
class Edited:
    """A source with one other file."""

    source: Source
    path: str
    text: str

    @property
    def label(self) -> str:
        return f"{self.source.label}, {self.path} edited"

    @property
    def version(self) -> str:
        return self.source.version

    def read(self, path: str) -> str | None:
        return self.text if path == self.path else self.source.read(path)


def spots_in(plan: Plan, path: str, lines: list[str]) -> list[Spot]:
    spots = []
    for name, item in plan.features.items():
        if item.state != "live" or item.verdict is None:
            continue
        hunks = [(diff.path, hunk) for diff in item.feature.files_for(plan.version) for hunk in diff.hunks]
        for (place, hunk), verdict in zip(hunks, item.verdict.hunks, strict=True):
            if place == path:
                spot = Spot(name, hunk, hunk.source_start - 1 + verdict.offset)
                assert tuple(lines[spot.start : spot.end]) == hunk.before
                spots.append(spot)
    return spots


def random_edit(rng: random.Random, lines: list[str], spots: list[Spot]) -> LineEdit:
    """Most of them in a hunk or right beside it, where they matter."""
    spot = rng.choice(spots)
    near = rng.random() < 0.7
    at = rng.randrange(max(spot.start - 1, 0), min(spot.end + 1, len(lines))) if near else rng.randrange(len(lines))
    # Of two equal lines in a row nobody can tell which one was deleted.
    alone = lines[at] not in (*lines[max(at - 1, 0) : at], *lines[at + 1 : at + 2])
    return LineEdit(rng.choice(["change", "insert", "delete"] if alone else ["change", "insert"]), at)


def texts(plan: Plan) -> dict[str, str]:
    return {path: file.text for path, file in plan.files.items()}


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.20.2", "0.26.0", "0.33.0"])
def test_applied_with_the_edit_or_refused(vllm_tree: Callable[[str], Source], version: str) -> None:
    source, catalogue = vllm_tree(version), load_catalogue()
    stock = make_plan(catalogue, source, {})
    all_live = frozenset(name for name, item in stock.features.items() if item.state == "live")
    assert set(stock.files) == {
        diff.path for name in all_live for diff in stock.features[name].feature.files_for(version)
    }
    untouched = {all_live: texts(stock)}
    for path in stock.files:
        lines = split_lines(source.read(path) or "")
        spots = spots_in(stock, path, lines)
        rng = random.Random(f"{version} {path}")
        refused = 0
        for _ in range(EDITS_PER_MODULE):
            edit = random_edit(rng, lines, spots)
            plan = make_plan(catalogue, Edited(source, path, edit.of(lines)), {})
            broken = [spot for spot in spots if spot.broken_by(edit)]
            live = all_live - with_dependents(catalogue, {spot.feature for spot in broken})
            if live not in untouched:
                # What this version does not need is not switched off: it satisfies those that require it.
                off = {item.gate: "off" for item in catalogue.features if item.id in all_live - live}
                untouched[live] = texts(make_plan(catalogue, source, off))
            check_states(plan, stock, broken, live, f"{path}: {edit}")
            expected = dict(untouched[live])
            if path in expected:
                above = [spot.hunk for spot in spots if spot.feature in live and spot.end <= edit.at]
                moved = sum(hunk.target_length - hunk.source_length for hunk in above)
                expected[path] = edit.of(split_lines(expected[path]), moved)
            assert texts(plan) == expected, f"{path}: {edit}"
            refused += bool(broken)
        # Both happened often enough to mean something.
        assert EDITS_PER_MODULE * 0.2 < refused < EDITS_PER_MODULE * 0.8, (path, refused)


def with_dependents(catalogue: Catalogue, names: set[str]) -> frozenset[str]:
    """The catalogue has requirements first, so that one pass finds them all."""
    lost = set(names)
    for feature in catalogue.features:
        if lost & set(feature.requires):
            lost.add(feature.id)
    return frozenset(lost)


def check_states(plan: Plan, stock: Plan, broken: list[Spot], live: frozenset[str], where: str) -> None:
    """Exactly the features whose text was edited are off, and those that require them; each says why."""
    named = {spot.feature: f"hunk {spot.hunk.number} of " for spot in broken}
    for name, item in plan.features.items():
        if name in live:
            assert item.state == "live", f"{where}: {item.reason}"
        elif name in named:
            assert item.state == "refused", where
            assert f"{named[name]}{where.partition(':')[0]}" in item.reason, f"{where}: {item.reason}"
        elif stock.features[name].state == "live":
            assert item.state == "refused", where
            assert "it requires" in item.reason, f"{where}: {item.reason}"
        else:
            assert (item.state, item.reason) == (stock.features[name].state, stock.features[name].reason), where
