"""Laws of the plan, for any few features of any few edits: what is live is whole, disjoint and nobody else's business.

What must come out is made without the engine: each edit is put on the lines of the untouched file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from vllm_hwplugin.patching import Catalogue, Feature, make_plan
from vllm_hwplugin.patching.texts import Plan

from .texts import OTHER, PATH, Memory, feature, file_diff

LENGTH = 16
# A file, what becomes of a line of it, and which line (from 0).
Edit = tuple[str, str, int]
# Of each feature its edits, and how many lines of context its diffs have.
Drawn = Sequence[tuple[list[Edit], int]]
PRISTINE = {path: [f"{path} {number}\n" for number in range(LENGTH)] for path in (PATH, OTHER)}


class Run(NamedTuple):
    """Lines `start` to `end` (from 0, end excluded; equal for an insertion) of a file become others."""

    path: str
    start: int
    end: int
    lines: tuple[str, ...]

    def meets(self, other: Run) -> bool:
        """Whether both change a line, or one adds lines right where the other changes or adds some."""
        if self.path != other.path:
            return False
        if self.start == self.end or other.start == other.end:
            return self.start <= other.end and other.start <= self.end
        return self.start < other.end and other.start < self.end


def runs_of(edits: Iterable[Edit], name: str) -> list[Run]:
    """Edits as runs of lines: those of neighbouring lines are one."""
    found: list[Run] = []
    for path, kind, at in sorted(edits, key=lambda item: (item[0], item[2])):
        lines = () if kind == "delete" else (f"{name} at {at}\n",)
        run = Run(path, at, at if kind == "insert" else at + 1, lines)
        last = found[-1] if found else None
        if last is not None and last.path == path and run.start <= last.end:
            found[-1] = Run(path, last.start, run.end, last.lines + run.lines)
        else:
            found.append(run)
    return found


def made(path: str, runs: Iterable[Run], strange: Iterable[int] = ()) -> str:
    """The file with these changes, and a line of somebody else before each of these lines."""
    kept = [[line] for line in PRISTINE[path]] + [[]]
    before: list[list[str]] = [[] for _ in kept]
    for at in strange:
        before[at].append(f"strange {at}\n")
    for run in runs:
        if run.path == path:
            before[run.start] += run.lines
            for at in range(run.start, run.end):
                kept[at] = []
    return "".join(line for new, old in zip(before, kept, strict=True) for line in (*new, *old))


EDIT = st.tuples(
    st.sampled_from((PATH, OTHER)), st.sampled_from(("change", "insert", "delete")), st.integers(0, LENGTH - 1)
)
EDITS = st.lists(EDIT, min_size=1, max_size=4, unique_by=lambda item: (item[0], item[2]))
FEATURES = st.lists(st.tuples(EDITS, st.integers(1, 3)), min_size=2, max_size=5)


def features_of(drawn: Drawn) -> dict[str, tuple[Feature, list[Run]]]:
    found = {}
    for number, (edits, context) in enumerate(drawn):
        name = f"f{number}"
        runs = runs_of(edits, name)
        diffs = [
            file_diff(made(path, ()), made(path, runs), path, context) for path in sorted({run.path for run in runs})
        ]
        found[name] = feature(*diffs, name=name, gate=name), runs
    return found


def texts(plan: Plan) -> dict[str, str]:
    return {path: file.text for path, file in plan.files.items()}


def live(plan: Plan) -> list[str]:
    return [name for name, item in plan.features.items() if item.state == "live"]


def plan_of(features: Iterable[Feature], strange: Iterable[int] = (), **choices: str) -> Plan:
    source = Memory({path: made(path, (), strange) for path in PRISTINE})
    return make_plan(Catalogue(tuple(features)), source, choices)


@given(FEATURES, st.lists(st.integers(1, LENGTH - 1), max_size=2, unique=True))
def test_what_is_live_fits_whole_and_meets_nothing_that_is_live(drawn: Drawn, strange: list[int]) -> None:
    features = features_of(drawn)
    expected: list[str] = []
    for name, (item, runs) in features.items():
        hunks = [hunk for diff in item.files for hunk in diff.hunks]
        broken = any(
            hunk.source_start - 1 < at < hunk.source_start - 1 + hunk.source_length for hunk in hunks for at in strange
        )
        others = [run for other in expected for run in features[other][1]]
        if not broken and not any(run.meets(other) for run in runs for other in others):
            expected.append(name)
    plan = plan_of((item for item, _ in features.values()), strange)
    assert live(plan) == expected
    runs = [run for name in expected for run in features[name][1]]
    changed = {run.path for run in runs}
    assert texts(plan) == {path: made(path, runs, strange) for path in changed}
    for path, file in plan.files.items():
        assert file.features == tuple(name for name in expected if any(run.path == path for run in features[name][1]))


@given(FEATURES, st.data())
def test_the_order_of_what_is_live_does_not_matter(drawn: Drawn, data: st.DataObject) -> None:
    features = features_of(drawn)
    plan = plan_of(item for item, _ in features.values())
    order = data.draw(st.permutations(live(plan)))
    again = plan_of(features[name][0] for name in order)
    assert live(again) == order
    assert (texts(again), again.fingerprint) == (texts(plan), plan.fingerprint)


@given(FEATURES, st.data())
def test_what_is_switched_off_leaves_the_others_as_without_it(drawn: Drawn, data: st.DataObject) -> None:
    features = features_of(drawn)
    name = data.draw(st.sampled_from(sorted(features)))
    off = plan_of((item for item, _ in features.values()), **{name: "off"})
    without = plan_of(item for other, (item, _) in features.items() if other != name)
    assert off.features[name].state == "off"
    assert (live(off), texts(off), off.fingerprint) == (live(without), texts(without), without.fingerprint)
