# SPDX-License-Identifier: Apache-2.0
"""How far changes of vLLM carry: `python -m benchmarks.import_share [--json FILE]`.

Every change is real: what one release of vLLM changed in one Python file, as a diff from the release before it. Two
sets, neither of which anybody has chosen change by change:

* "fixes": every file that a release changed which only mends the one before it (0.20.1, 0.25.1, ...), but for the
  generated `vllm/_version.py`. Such a change holds a fix or two, like the pull requests that people carry.
* "releases": of every supported release, the files that the project's own patches touch. They are among those that
  change most, and what a release changes in one of them is the work of weeks: the hardest that an import can meet.

Each is imported, as `vllm-hwplugin patches import` does it, to each supported version, where it

* "applies": every hunk, exactly;
* is "upstream": the version has it already; or
* is refused ("conflict"): a hunk fits nowhere, or could mean two places, or there is no such file.

The share that applied is of the versions before the one that the diff was made from: later ones than that have the
change, as it was or changed again. Checked at the same time, and the end of the command where it is not so:

* on the release that the diff was made from, the import gives the very text of the next release;
* that next release is told to have the change;
* the diffs that `import` would write, read as any process of vLLM reads them, give what the import gave, on every
  version that they are for.
"""

from __future__ import annotations

import argparse
import difflib
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from vllm_hwplugin.patching import (
    SUPPORTED,
    Catalogue,
    Feature,
    Source,
    load_catalogue,
    make_plan,
    parse_diff,
    split_lines,
)
from vllm_hwplugin.versions import Versions
from vllm_hwplugin_lab.bench import provenance, results_text
from vllm_hwplugin_workshop.authoring import (
    Carried,
    Outcome,
    Written,
    blob_name,
    carry_all,
    read_change,
    render,
    written,
)
from vllm_hwplugin_workshop.sources import Index, IndexSource, ReadSource, read_ahead

REPOSITORY = Path(__file__).resolve().parent.parent
GENERATED = {"vllm/_version.py"}
#: Of each change, in the file; the rest is in what they add up to.
KEPT = ("file", "from", "to", "hunks", "lines", "applies")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=REPOSITORY / "benchmarks" / "results" / "import_share.json")
    options = parser.parse_args()
    index = Index()
    opened = {version: IndexSource(version, index) for version in SUPPORTED}
    patched = {file.path for feature in load_catalogue().features for file in feature.files}
    fixed = {
        path for old, new in pairwise(opened.values()) if is_fix(new.version) for path in differing(old, new)
    } - GENERATED
    sources = [read_ahead(source, sorted(patched | fixed)) for source in opened.values()]
    sets = {
        "fixes": [
            measured(path, old, new, sources)
            for old, new in pairwise(sources)
            if is_fix(new.version)
            for path in sorted(fixed)
            if differ(path, old, new)
        ],
        "releases": [
            measured(path, old, new, sources)
            for old, new in pairwise(sources)
            for path in sorted(patched)
            if differ(path, old, new)
        ],
    }
    result = {
        "benchmark": "import_share",
        "python": platform.python_version(),
        **provenance(),
        "versions": list(SUPPORTED),
        "sets": {
            name: {**summary(changes), "changes": [{key: one[key] for key in KEPT} for one in changes]}
            for name, changes in sets.items()
        },
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(results_text(result))
    report(result, options.json)
    return 0


def differing(old: IndexSource, new: IndexSource) -> list[str]:
    """The Python files that both releases have, with other texts."""
    one, other = old.checksums(), new.checksums()
    return sorted(path for path in one.keys() & other.keys() if one[path] != other[path])


def differ(path: str, old: Source, new: Source) -> bool:
    one, other = old.read(path), new.read(path)
    return one is not None and other is not None and one != other


def is_fix(version: str) -> bool:
    """Whether a release mends the one before it."""
    return bool(Version(version).micro)


def git_diff(path: str, old: str, new: str) -> str:
    """What `git diff` writes of a file; the lines themselves are found by difflib."""
    lines = difflib.unified_diff(split_lines(old), split_lines(new), f"a/{path}", f"b/{path}")
    names = f"index {blob_name(old)[:10]}..{blob_name(new)[:10]} 100644\n"
    body = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return f"diff --git a/{path} b/{path}\n{names}{''.join(body)}"


def measured(path: str, old: Source, new: Source, sources: list[ReadSource]) -> dict[str, Any]:
    """One change on every version.

    Raises:
        SystemExit: the text that came out is not the next release's, that release is not told to have the change, or
            the diffs that would be written give something else.
    """
    before, after = old.read(path) or "", new.read(path) or ""
    name = f"{path} of {old.version} to {new.version}"
    change = read_change(git_diff(path, before, after).encode(), name)
    carried = {item.version: item for item in carry_all(change, sources, hints=False)}
    base = carried[old.version]
    if base.outcome is not Outcome.APPLIES or base.files[path].result != after:
        raise SystemExit(f"{name}: the import does not give the text of {new.version} ({base.reason})")
    if carried[new.version].outcome is not Outcome.UPSTREAM:
        raise SystemExit(f"{name}: {new.version} is not told to have the change")
    made = written([item for item in carried.values() if item.outcome is Outcome.APPLIES])
    feature = read_back(made)
    for source in sources:
        item = carried[source.version]
        if item.outcome is Outcome.APPLIES and not gives(feature, source, item):
            raise SystemExit(f"{name}: on {item.version} the diffs that were made do not give what the import gave")
    return {
        "file": path,
        "from": old.version,
        "to": new.version,
        "hunks": sum(len(step.diff.hunks) for step in change.steps),
        "lines": sum(sign != " " for step in change.steps for hunk in step.diff.hunks for sign, _ in hunk.lines),
        **{
            outcome.value: " ".join(version for version, item in carried.items() if item.outcome is outcome)
            for outcome in (Outcome.APPLIES, Outcome.UPSTREAM)
        },
        "conflict": {version: why(item) for version, item in carried.items() if item.outcome is Outcome.CONFLICT},
        "rejected": {version: len(item.rejected) for version, item in carried.items() if item.rejected},
    }


def read_back(made: Written) -> Feature:
    """The feature that `patches import` would write, read back from the text of its diffs."""
    return Feature(
        *("imported", "imported", "VLLM_HWPLUGIN_PATCH_IMPORTED", "imported", "imported", "imported"),
        requires=(),
        versions=Versions(made.versions),
        not_needed=(),
        files=tuple(diff for name, diffs in made.diffs.items() for diff in parse_diff(render(diffs), name)),
    )


def gives(feature: Feature, source: Source, carried: Carried) -> bool:
    plan = make_plan(Catalogue((feature,)), source, {})
    found = {path: file.text for path, file in plan.files.items()}
    return found == {path: edited.result for path, edited in carried.files.items()}


def why(item: Carried) -> str:
    statuses = Counter(rejected.verdict.status for rejected in item.rejected)
    told = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    return f"{item.reason} ({told})" if told and "missing" not in statuses else item.reason


def summary(changes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The share of changes that applied to releases before the one that they were made from.

    `by_distance` counts in supported releases back from that one, which is 0.
    """
    by_version: dict[str, list[Tried]] = {version: [] for version in SUPPORTED}
    by_distance: dict[int, list[Tried]] = {}
    for item in changes:
        base = SUPPORTED.index(item["from"])
        for number, version in enumerate(SUPPORTED[: base + 1]):
            outcome = "upstream" if version in item["upstream"].split() else "applies"
            outcome = "conflict" if version in item["conflict"] else outcome
            tried = Tried(outcome, item["hunks"], item["rejected"].get(version, 0))
            by_distance.setdefault(base - number, []).append(tried)
            if number < base:
                by_version[version].append(tried)
    return {
        "count": len(changes),
        "by_version": {version: share(tried) for version, tried in by_version.items() if tried},
        "by_distance": {str(distance): share(by_distance[distance]) for distance in sorted(by_distance)},
    }


class Tried(NamedTuple):
    """A change on one version."""

    outcome: str
    hunks: int
    rejected: int


def share(tried: Sequence[Tried]) -> dict[str, Any]:
    """Of changes, and of their hunks each by itself, where the version does not have the change already."""
    asked = [item for item in tried if item.outcome != "upstream"]
    applied = sum(item.outcome == "applies" for item in asked)
    hunks = sum(item.hunks for item in asked)
    placed = hunks - sum(item.rejected for item in asked)
    return {
        "asked": len(asked),
        "applied": applied,
        "share": round(applied / len(asked), 4) if asked else None,
        "hunks": hunks,
        "share_of_hunks": round(placed / hunks, 4) if hunks else None,
    }


def report(result: dict[str, Any], path: Path) -> None:
    print(f"changes that applied exactly to releases before them, commit {result['commit']}")
    for name, row in result["sets"].items():
        print(f"{name}: {row['count']} changes")
        for kind, heading in (("by_version", "to vLLM"), ("by_distance", "releases back")):
            for key, item in row[kind].items():
                if item["asked"]:
                    told = f"{item['share']:>5.0%}   ({item['applied']} of {item['asked']})"
                    print(f"  {heading} {key:<8}{told}, of {item['hunks']} hunks {item['share_of_hunks']:.0%}")
    print(f"details in {path}")


if __name__ == "__main__":
    sys.exit(main())
