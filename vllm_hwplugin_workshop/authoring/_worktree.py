# SPDX-License-Identifier: Apache-2.0
"""Work trees, to make a change by hand for a version that a diff does not fit.

A work tree has the version's unpatched files (`stock/`), the same files with the hunks that fit (`vllm/`), the rejected
hunks, and a note with its purpose. Only `vllm/` is for editing.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from vllm_hwplugin.patching import Feature
from vllm_hwplugin.patching.texts import (
    Edit,
    Hunk,
    HunkVerdict,
    Source,
    Text,
    edits_of,
    trouble_in,
)

from ..nearest import LONGEST_COMPARED
from ..verdicts import told_apart
from ._carry import Carried, Edited, Outcome, Rejected, carry, context_lines
from ._change import PACKAGE, Change, ChangeError, Step
from ._folder import About, write

NOTE: Final = "edit.json"
REJECTED: Final = "rejected.txt"
_STOCK: Final = "stock"
_TO_DO: Final = (
    "These hunks did not fit. Make them by hand below vllm/, then remove this file: `patches save` refuses while it\n"
    "exists. Line numbers are of the files below `stock/`."
)


class WorkTree(NamedTuple):
    """A work tree's purpose: the folder of its feature, and a new feature's texts (None: it exists)."""

    feature: Path
    about: About | None


def change_of(feature: Feature, source: Source) -> Change:
    """Return a feature's hunks for a version, or the best fit.

    The best fit is for a version that the feature does not list.
    """
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
        folder: A new or empty folder.
        about: The texts of a new feature; None: the feature exists.

    Raises:
        ChangeError: The folder is not empty, or the version has none of the files.
        HwpluginError: The source cannot be read.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ChangeError(f"{folder} exists and is not empty; name a new folder with --into")
    carried = carry(change, source)
    texts = {path: (edited.pristine.text, edited.result) for path, edited in carried.files.items()}
    for path in more:
        if not path.startswith(PACKAGE) or not path.endswith(".py") or ".." in path.split("/"):
            raise ChangeError(f"{path!r}: expected a Python file of vLLM, such as vllm/v1/utils.py")
        text = source.read(path)
        if text is None:
            raise ChangeError(f"{path}: not a file of {source.label}; paths begin with vllm/")
        texts.setdefault(path, (text, text))
    if not texts:
        raise ChangeError(
            f"{source.label} has no {', '.join(change.paths)}; name the files that replace them with --file"
        )
    for path, (stock, edited) in texts.items():
        write(folder / _STOCK / path, stock)
        write(folder / path, edited)
    if carried.rejected:
        parts = [_TO_DO, *("\n".join(told(rejected)) for rejected in carried.rejected)]
        write(folder / REJECTED, "\n\n".join(parts) + "\n")
    note = {
        "feature": str(feature.resolve()),
        "version": carried.version,
        "label": carried.label,
        "about": None if about is None else about._asdict(),
    }
    write(folder / NOTE, json.dumps(note, indent=1) + "\n")
    return carried


def read_tree(folder: Path) -> tuple[WorkTree, Carried]:
    """Read a work tree, and the change that was made in it.

    Raises:
        ChangeError: The folder is not a work tree, nothing was changed, the result is not valid Python, or rejected
            hunks are still listed.
    """
    if (folder / REJECTED).exists():
        # A part of the change would be saved as the whole change.
        raise ChangeError(
            f"{folder / REJECTED} lists hunks that did not fit; make them by hand below {folder / 'vllm'}, or decide "
            "that they are not needed, then remove this file"
        )
    try:
        note: dict[str, Any] = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        about = None if note["about"] is None else About(**note["about"])
        version, label = str(note["version"]), str(note["label"])
        tree = WorkTree(Path(note["feature"]), about)
        stock, edited = ({path: _read(top / path) for path in _modules(top)} for top in (folder / _STOCK, folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ChangeError(f"{folder}: not what `patches edit` wrote ({error}); open the tree again") from error
    if strange := stock.keys() ^ edited.keys():
        raise ChangeError(
            f"{folder / min(strange)}: a patch can only edit files that are also below {_STOCK}/; put new code into "
            f"your own package, or, if {label} has the file, open the tree with --file"
        )
    files: dict[str, Edited] = {}
    for path, text in edited.items():
        if trouble := trouble_in(path, text):
            raise ChangeError(f"{folder}: {trouble}")
        pristine = Text(stock[path])
        if edits := edits_between(pristine.lines, Text(text).lines):
            files[path] = Edited(pristine, edits)
    if not files:
        raise ChangeError(f"{folder}: no file was changed; edit the files below vllm/, then save")
    return tree, Carried(version, label, Outcome.APPLIES, files)


def _modules(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in (folder / PACKAGE).rglob("*.py"))


def _read(file: Path) -> str:
    # `read_text` would convert line ends.
    return file.read_bytes().decode("utf-8")


def edits_between(before: list[str], after: list[str]) -> tuple[Edit, ...]:
    """Return the edits that turn one text's lines into the other's."""
    lines = (*(("-", line) for line in before), *(("+", line) for line in after))
    # Only between the first and last line that differ: comparing a whole large file takes seconds.
    return tuple(
        Edit(whole.start + start, whole.start + end, whole.lines[first:last], "")
        for whole in edits_of(Hunk(1, 1, len(before), 1, len(after), lines), 0, "")
        for tag, start, end, first, last in difflib.SequenceMatcher(
            None, before[whole.start : whole.end], whole.lines, autojunk=False
        ).get_opcodes()
        if tag != "equal"
    )


def told(rejected: Rejected) -> list[str]:
    """Describe a rejected hunk: why, its text, and the nearest place."""
    hunk = [f"    {sign}{text.rstrip()}" for sign, text in rejected.hunk.lines]
    heading, *rest = where_it_stands(rejected.verdict)
    if rejected.fits_with:
        heading += f"; fits with {context_lines(rejected.fits_with)}"
    return [heading, *hunk, *rest]


def where_it_stands(verdict: HunkVerdict) -> list[str]:
    """Describe why a hunk does not fit, and the nearest place."""
    nearest = verdict.nearest
    if verdict.status == "missing":
        why = "this version has no such file"
    elif verdict.status == "ambiguous":
        why = f"fits, or is applied, at lines {', '.join(map(str, verdict.found_at))}; expected one place"
    elif nearest is None and len(verdict.expected) > LONGEST_COMPARED:
        why = f"its {len(verdict.expected)} lines are too many to look for the nearest place"
    elif nearest is None:
        why = "nothing in the file resembles what it expects"
    elif not nearest.diff:
        why = f"found at line {nearest.line}, before the hunk that precedes it"
    else:
        why = f"drifted; nearest: line {nearest.line}, {nearest.similarity:.0%} alike"
    lines = [f"{verdict.path}: hunk {verdict.hunk_index} of {verdict.origin}: {why}"]
    if nearest is not None and nearest.diff:
        # Without the diff's two file names.
        lines += ["  expected (-) and found (+):"]
        lines += [f"    {line}" for line in nearest.diff.splitlines()[2:]]
    return lines
