# SPDX-License-Identifier: Apache-2.0
"""How far changes of vLLM carry: `python benchmarks/import_share.py [--json FILE]`.

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

The share that applied is of the versions before the one that brought the change: later ones have it by definition, as
it was or changed again. Checked at the same time, and the end of the command where it is not so:

* on the release that the diff was made from, the import gives the very text of the next release;
* that next release is told to have the change;
* the diffs that `import` would write, read as any process of vLLM reads them, give what the import gave, on every
  version that they are for.
"""

from __future__ import annotations

import argparse
import difflib
import json
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from packaging.version import Version

from vllm_hwplugin.authoring import Carried, Change, Outcome, blob_name, carry_all, make_variants, read_change, render
from vllm_hwplugin.cli.sources import Index, IndexSource
from vllm_hwplugin.patching import (
    SUPPORTED,
    Catalog,
    Feature,
    FileDiff,
    Source,
    Variant,
    load_catalog,
    make_plan,
    parse_diff,
    split_lines,
)
from vllm_hwplugin.versions import Versions

REPOSITORY = Path(__file__).resolve().parent.parent


class Kept:
    """A version's files, each fetched once."""

    def __init__(self, source: Source) -> None:
        self.version, self.label = source.version, source.label
        self._source = source
        self._texts: dict[str, str | None] = {}

    def read(self, path: str) -> str | None:
        if path not in self._texts:
            self._texts[path] = self._source.read(path)
        return self._texts[path]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=REPOSITORY / "benchmarks" / "results" / "import_share.json")
    options = parser.parse_args()
    index = Index()
    opened = [IndexSource(version, index) for version in SUPPORTED]
    try:
        sources = [Kept(source) for source in opened]
        paths = sorted(
            {file.path for feature in load_catalog().features for item in feature.variants for file in item.files}
        )
        changes = [
            measured(path, old, new, sources)
            for path in paths
            for old, new in pairwise(sources)
            if differ(path, old, new)
        ]
    finally:
        for source in opened:
            source.close()
    result = {
        "benchmark": "import_share",
        "python": platform.python_version(),
        "commit": commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": list(SUPPORTED),
        "files": paths,
        "shares": {
            "all": shares(changes),
            "fixes": shares([item for item in changes if is_fix(item["to"])]),
            "of one hunk": shares([item for item in changes if item["hunks"] == 1]),
        },
        "changes": changes,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    report(result, options.json)
    return 0


def differ(path: str, old: Source, new: Source) -> bool:
    one, other = old.read(path), new.read(path)
    return one is not None and other is not None and one != other


def is_fix(version: str) -> bool:
    return bool(Version(version).micro)


def git_diff(path: str, old: str, new: str) -> str:
    """What `git diff` writes of a file; the lines themselves are found by difflib."""
    lines = difflib.unified_diff(split_lines(old), split_lines(new), f"a/{path}", f"b/{path}")
    names = f"index {blob_name(old)[:10]}..{blob_name(new)[:10]} 100644\n"
    body = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return f"diff --git a/{path} b/{path}\n{names}{''.join(body)}"


def measured(path: str, old: Kept, new: Kept, sources: list[Kept]) -> dict[str, Any]:
    """One change on every version.

    Raises:
        SystemExit: the text that came out is not the next release's, or not what the diffs that would be written give.
    """
    before, after = old.read(path) or "", new.read(path) or ""
    name = f"{path} of {old.version} to {new.version}"
    change = read_change(git_diff(path, before, after).encode(), name)
    carried = carry_all(change, sources, hints=False)
    of_old = next(item for item in carried if item.version == old.version)
    if of_old.outcome is not Outcome.APPLIES or of_old.files[path].result != after:
        raise SystemExit(f"{name}: the import does not give the text of {new.version} ({of_old.reason})")
    good = [item for item in carried if item.outcome is Outcome.APPLIES]
    variants, diffs = make_variants(good)
    feature = written(variants_of(variants), diffs)
    for item, source in zip(carried, sources, strict=True):
        if item.outcome is Outcome.APPLIES and not gives(feature, source, item):
            raise SystemExit(f"{name}: on {item.version} the diffs that were made do not give what the import gave")
    return {
        "file": path,
        "from": old.version,
        "to": new.version,
        "hunks": sum(len(step.diff.hunks) for step in change.steps),
        "lines": changed_lines(change),
        "variants": [item.versions for item in variants],
        "outcomes": {item.version: item.outcome.value for item in carried},
        "refused": {item.version: why(item) for item in carried if item.outcome is Outcome.CONFLICT},
    }


def variants_of(made: Iterable[Any]) -> list[tuple[str, tuple[str, ...]]]:
    return [(item.versions, item.diffs) for item in made]


def written(variants: list[tuple[str, tuple[str, ...]]], diffs: dict[str, FileDiff]) -> Feature:
    """The feature that `patches import` would write, read back from the text of its diffs."""
    read = {name: parse_diff(render(diff), name) for name, diff in diffs.items()}
    return Feature(
        *("imported", "imported", "VLLM_HWPLUGIN_PATCH_IMPORTED", "imported", "imported", "imported"),
        requires=(),
        not_needed=(),
        variants=tuple(Variant(Versions(text), tuple(d for n in names for d in read[n])) for text, names in variants),
    )


def gives(feature: Feature, source: Source, carried: Carried) -> bool:
    plan = make_plan(Catalog((feature,)), source, {})
    found = {path: file.text for path, file in plan.files.items()}
    return found == {path: edited.result for path, edited in carried.files.items()}


def changed_lines(change: Change) -> int:
    return sum(sign != " " for step in change.steps for hunk in step.diff.hunks for sign, _ in hunk.lines)


def why(item: Carried) -> str:
    statuses = Counter(rejected.verdict.status for rejected in item.rejected)
    told = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
    return f"{item.reason} ({told})" if told and "missing" not in statuses else item.reason


def shares(changes: list[dict[str, Any]]) -> dict[str, Any]:
    """Of changes: how often they applied, on each version and by how many releases it is away."""
    by_version = {version: Counter(item["outcomes"][version] for item in changes) for version in SUPPORTED}
    by_distance: dict[int, Counter[str]] = {}
    for item in changes:
        base = SUPPORTED.index(item["from"])
        for number, version in enumerate(SUPPORTED):
            by_distance.setdefault(number - base, Counter())[item["outcomes"][version]] += 1
    return {
        "changes": len(changes),
        "by_version": {version: share(count) for version, count in by_version.items()},
        # In releases from the one that the diff was made from; less than 0: older ones.
        "by_distance": {str(distance): share(by_distance[distance]) for distance in sorted(by_distance)},
    }


def share(count: Counter[str]) -> dict[str, Any]:
    applied, refused = count["applies"], count["conflict"]
    asked = applied + refused
    return {
        "applies": applied,
        "conflict": refused,
        "upstream": count["upstream"],
        "share": round(applied / asked, 4) if asked else None,
    }


def commit() -> str:
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def report(result: dict[str, Any], path: Path) -> None:
    print(f"{len(result['changes'])} changes of {len(result['files'])} files, commit {result['commit']}")
    for kind, row in result["shares"].items():
        print(f"{kind}: {row['changes']} changes; applied exactly, of those that the version does not have:")
        for version, item in row["by_version"].items():
            told = "-" if item["share"] is None else f"{item['share']:.0%}"
            print(f"  {version:<8}{told:>5}   ({item['applies']} of {item['applies'] + item['conflict']})")
    print(f"details in {path}")


if __name__ == "__main__":
    sys.exit(main())
