# SPDX-License-Identifier: Apache-2.0
"""A change made by hand, for a version that a diff does not fit.

A work tree is a folder with the version's files as they are (`stock/`), the same files with as much of the change as
fits (`vllm/`), the hunks that were rejected, and a note of what it is for. Only `vllm/` is there to be edited.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from vllm_hwplugin.patching import (
    LONGEST_COMPARED,
    Edit,
    Feature,
    Hunk,
    HunkVerdict,
    Source,
    Text,
    edits_of,
    told_apart,
    trouble_in,
)

from ._carry import Carried, Edited, Outcome, Rejected, carry
from ._change import PACKAGE, Change, ChangeError, Step
from ._folder import About, write

NOTE: Final = "edit.json"
REJECTED: Final = "rejected.txt"
_STOCK: Final = "stock"
_TO_DO: Final = (
    "These hunks did not fit. Make each of them below vllm/, then remove this file: nothing is saved while it is\n"
    "there. Lines are counted in the files below stock/."
)


class WorkTree(NamedTuple):
    """What a work tree is for: the folder of a feature, and the texts of one that is not there yet; else None."""

    feature: Path
    about: About | None


def change_of(feature: Feature, source: Source) -> Change:
    """A feature as a change: its hunks for that version, or else those for the one on which most of them fit."""
    candidates = [source.version] if feature.versions.covers(source.version) else told_apart(feature)
    changes = [
        Change(feature.title, feature.origin, feature.what, tuple(Step(file) for file in feature.files_for(version)))
        for version in candidates
    ]

    def rejected(change: Change) -> float:
        total = sum(len(step.diff.hunks) for step in change.steps)
        return len(carry(change, source, hints=False).rejected) / max(total, 1)

    return min(changes, key=rejected)


def open_tree(
    folder: Path, feature: Path, source: Source, change: Change, more: Sequence[str], about: About | None
) -> Carried:
    """Write a work tree.

    Args:
        folder: a new or empty one.
        more: further files of that version to be edited.
        about: the texts of a feature that is not there yet.

    Raises:
        ChangeError: the folder is not empty, or the version has none of the files.
        HwpluginError: the source cannot be read.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ChangeError(f"{folder}: is there already, and not empty; name a new folder with --into")
    carried = carry(change, source)
    texts = {path: (edited.pristine.text, edited.result) for path, edited in carried.files.items()}
    for path in more:
        refuse_path(path)
        text = source.read(path)
        if text is None:
            raise ChangeError(f"{path}: {source.label} has no such file; paths begin with vllm/")
        texts.setdefault(path, (text, text))
    if not texts:
        raise ChangeError(
            f"{source.label} has no {', '.join(change.paths)}; name the files that took their place with --file"
        )
    for path, (stock, edited) in texts.items():
        write(folder / _STOCK / path, stock)
        write(folder / path, edited)
    if carried.rejected:
        parts = [_TO_DO, *("\n".join(told(item)) for item in carried.rejected)]
        write(folder / REJECTED, "\n\n".join(parts) + "\n")
    note = {
        "feature": str(feature.resolve()),
        "version": carried.version,
        "label": carried.label,
        "about": None if about is None else about._asdict(),
    }
    write(folder / NOTE, json.dumps(note, indent=1) + "\n")
    return carried


def refuse_path(path: str) -> None:
    """Raise ChangeError for what is no Python file of vLLM by its name."""
    if not path.startswith(PACKAGE) or not path.endswith(".py") or ".." in path.split("/"):
        raise ChangeError(f"{path!r}: expected a file of vLLM, as vllm/v1/utils.py")


def read_tree(folder: Path) -> tuple[WorkTree, Carried]:
    """A work tree, and the change that was made in it.

    Raises:
        ChangeError: it is not as it has to be, nothing was changed, what was made is no Python, or there are hunks
            that nobody has said to be done with.
    """
    if (folder / REJECTED).exists():
        # Whatever else was made would be a part of the change, and be taken for all of it.
        raise ChangeError(
            f"{folder / REJECTED}: names hunks that did not fit; make each of them by hand below {folder / 'vllm'}, or "
            "find that it is not needed, then remove this file"
        )
    try:
        note: dict[str, Any] = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        about = None if note["about"] is None else About(**note["about"])
        version, label = str(note["version"]), str(note["label"])
        tree = WorkTree(Path(note["feature"]), about)
        stock, edited = ({path: _read(top / path) for path in _modules(top)} for top in (folder / _STOCK, folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ChangeError(f"{folder}: not what `patches edit` wrote ({error}); open the tree anew") from error
    if strange := stock.keys() ^ edited.keys():
        raise ChangeError(
            f"{folder / min(strange)}: a patch can only edit files that vLLM has, those that are below {_STOCK}/ too; "
            f"put new code into a package of your own, or open the tree with --file if {label} has it"
        )
    files: dict[str, Edited] = {}
    for path, text in edited.items():
        if trouble := trouble_in(path, text):
            raise ChangeError(f"{folder}: {trouble}")
        pristine = Text(stock[path])
        if edits := _edits_between(pristine.lines, Text(text).lines):
            files[path] = Edited(pristine, edits)
    if not files:
        raise ChangeError(f"{folder}: nothing is changed; edit the files below vllm/, then save")
    return tree, Carried(version, label, Outcome.APPLIES, files)


def _modules(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in (folder / PACKAGE).rglob("*.py"))


def _read(file: Path) -> str:
    # Not `read_text`, which would make one of all kinds of line ends.
    return file.read_bytes().decode("utf-8")


def _edits_between(before: list[str], after: list[str]) -> tuple[Edit, ...]:
    """What turns one text's lines into the other's."""
    lines = (*(("-", line) for line in before), *(("+", line) for line in after))
    # Between the first and the last line that differ only: the rest of a large file takes seconds to compare.
    return tuple(
        Edit(whole.start + start, whole.start + end, whole.lines[first:last], "")
        for whole in edits_of(Hunk(1, 1, len(before), 1, len(after), lines), 0, "")
        for tag, start, end, first, last in difflib.SequenceMatcher(
            None, before[whole.start : whole.end], whole.lines, autojunk=False
        ).get_opcodes()
        if tag != "equal"
    )


def told(item: Rejected) -> list[str]:
    """A hunk that was not made, in lines: which and why, what it is, and what stands at the nearest place."""
    hunk = [f"    {sign}{text.rstrip()}" for sign, text in item.hunk.lines]
    heading, *rest = where_it_stands(item.verdict)
    return [heading, *hunk, *rest]


def where_it_stands(verdict: HunkVerdict) -> list[str]:
    """Of a hunk without a place: which one and why, and below that what the nearest place has instead."""
    nearest = verdict.nearest
    if verdict.status == "missing":
        why = "this version has no such file"
    elif verdict.status == "ambiguous":
        why = f"fits, or is there already, at lines {', '.join(map(str, verdict.found_at))}; expected one place"
    elif nearest is None and len(verdict.expected) > LONGEST_COMPARED:
        why = f"it has {len(verdict.expected)} lines to be found, too many to look for the nearest place"
    elif nearest is None:
        why = "nothing in the file resembles what it expects"
    elif not nearest.diff:
        why = f"found at line {nearest.line}, before the hunk that precedes it"
    else:
        why = f"drifted; nearest: line {nearest.line}, {nearest.similarity:.0%} alike"
    lines = [f"{verdict.path}: hunk {verdict.hunk_index} of {verdict.origin}: {why}"]
    if nearest is not None and nearest.diff:
        # Without the names of the two sides, which the heading says.
        lines += ["  what it expects (-) and what is there (+):"]
        lines += [f"    {line}" for line in nearest.diff.splitlines()[2:]]
    return lines
