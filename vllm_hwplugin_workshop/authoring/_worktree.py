# SPDX-License-Identifier: Apache-2.0
"""A change made by hand, for a version that a diff does not fit.

A work tree is a folder with the version's files as they are (`stock/`), the same files with as much of the change as
fits (`vllm/`), the hunks that were rejected, and a note of what it is for. Only `vllm/` is there to be edited.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from vllm_hwplugin.patching import SUPPORTED, Edit, Feature, Source, Text, told_apart, trouble_in

from ._carry import Carried, Edited, Outcome, Rejected, carry, trimmed
from ._change import PACKAGE, Change, Step
from ._errors import WorkTreeError
from ._folder import About, read_feature
from ._line import public

NOTE: Final = "edit.json"
REJECTED: Final = "rejected.txt"
_STOCK: Final = "stock"
_FORMAT: Final = 2
_TO_DO: Final = (
    "These hunks did not fit. Make each of them below vllm/, then remove this file: nothing is saved while it is\n"
    "there. Lines are counted in the files below stock/."
)


class WorkTree(NamedTuple):
    """What a work tree is for.

    Attributes:
        feature: its folder.
        about: the texts of a feature that is not there yet; None where it is.
        stock: path -> the SHA-256 of the version's own text.
        held: version -> the SHA-256 of what the feature had for it when the tree was opened.
    """

    folder: Path
    feature: Path
    version: str
    label: str
    about: About | None
    stock: Mapping[str, str]
    held: Mapping[str, str]


def change_of(feature: Feature, source: Source) -> Change:
    """A feature as a change: its hunks for that version, or else those for the one on which most of them fit."""
    candidates = [source.version] if feature.versions.covers(source.version) else told_apart(feature)
    changes = [
        Change(feature.title, feature.origin, feature.what, tuple(Step(file) for file in feature.files_for(version)))
        for version in candidates
    ]
    return max(changes, key=lambda change: _share(carry(change, source, hints=False), change))


def _share(carried: Carried, change: Change) -> float:
    total = sum(len(step.diff.hunks) for step in change.steps)
    return (total - len(carried.rejected)) / max(total, 1)


def open_tree(
    folder: Path, feature: Path, source: Source, change: Change, more: Sequence[str], about: About | None
) -> Carried:
    """Write a work tree.

    Args:
        folder: a new or empty one.
        more: further files of that version to be edited.
        about: the texts of a feature that is not there yet.

    Raises:
        WorkTreeError: the folder is not empty, or the version has none of the files.
        HwpluginError: the source cannot be read.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WorkTreeError(f"{folder}: is there already, and not empty; name a new folder with --into")
    carried = carry(change, source)
    texts = {path: (edited.pristine.text, edited.result) for path, edited in carried.files.items()}
    for path in more:
        refuse_path(path)
        text = source.read(path)
        if text is None:
            raise WorkTreeError(f"{path}: {source.label} has no such file; paths begin with vllm/")
        texts.setdefault(path, (text, text))
    if not texts:
        raise WorkTreeError(
            f"{source.label} has no {', '.join(change.paths)}; name the files that took their place with --file"
        )
    for path, (stock, edited) in texts.items():
        _write(folder / _STOCK / path, stock)
        _write(folder / path, edited)
    if carried.rejected:
        parts = [_TO_DO, *("\n".join(told(item)) for item in carried.rejected)]
        _write(folder / REJECTED, "\n\n".join(parts) + "\n")
    note = {
        "format": _FORMAT,
        "feature": str(feature.resolve()),
        "version": carried.version,
        "label": carried.label,
        "about": None if about is None else about._asdict(),
        "stock": {path: _digest(stock) for path, (stock, _) in texts.items()},
        "held": _held(feature, {*SUPPORTED, carried.version}),
    }
    _write(folder / NOTE, json.dumps(note, indent=1) + "\n")
    return carried


def refuse_path(path: str) -> None:
    """Raise WorkTreeError for what is no Python file of vLLM by its name."""
    if not path.startswith(PACKAGE) or not path.endswith(".py") or ".." in path.split("/"):
        raise WorkTreeError(f"{path!r}: expected a file of vLLM, as vllm/v1/utils.py")


def read_tree(folder: Path) -> tuple[WorkTree, Carried]:
    """A work tree, and the change that was made in it.

    Raises:
        WorkTreeError: it is not as it has to be, nothing was changed, what was made is no Python, or there are hunks
            that nobody has said to be done with.
    """
    tree = _note(folder)
    if (folder / REJECTED).exists():
        # Whatever else was made would be a part of the change, and be taken for all of it.
        raise WorkTreeError(
            f"{folder / REJECTED}: names hunks that did not fit; make each of them by hand below {folder / 'vllm'}, or "
            "find that it is not needed, then remove this file"
        )
    files: dict[str, Edited] = {}
    for path, digest in tree.stock.items():
        stock, edited = _read(folder / _STOCK / path), _read(folder / path)
        if _digest(stock) != digest:
            raise WorkTreeError(f"{folder / _STOCK / path}: is not {tree.label}'s text any more; open the tree anew")
        trouble = trouble_in(path, edited)
        if trouble:
            raise WorkTreeError(f"{folder}: {trouble}")
        pristine = Text(stock)
        edits = edits_between(pristine.lines, Text(edited).lines)
        if edits:
            files[path] = Edited(pristine, edits)
    known = {str(Path(path)) for path in tree.stock}
    found = {str(file.relative_to(folder)) for file in (folder / "vllm").rglob("*.py")}
    if strange := sorted(found - known):
        raise WorkTreeError(
            f"{folder / strange[0]}: a patch can only edit files that vLLM has; put new code into a package of your "
            f"own, or open the tree with --file if {tree.label} has it"
        )
    if not files:
        raise WorkTreeError(f"{folder}: nothing is changed; edit the files below vllm/, then save")
    return tree, Carried(tree.version, tree.label, Outcome.APPLIES, files)


def refuse_overtaken(tree: WorkTree, versions: Collection[str]) -> None:
    """Raise WorkTreeError where the feature has got something else for one of these versions since `open_tree`."""
    now = _held(tree.feature, versions)
    if lost := [name for name in map(public, versions) if now.get(name) != tree.held.get(name)]:
        raise WorkTreeError(
            f"{tree.feature}: what it has for vLLM {', '.join(lost)} was changed since {tree.folder} was opened, and "
            "would be lost; open a tree anew, and make the change there"
        )


def _held(feature: Path, versions: Collection[str]) -> dict[str, str]:
    if not feature.exists():
        return {}
    found = read_feature(feature)
    held = {}
    for version in map(public, versions):
        if found.versions.covers(version):
            # Of the hunks alone: their ranges change with what is saved for others.
            files = found.files_for(version)
            held[version] = _digest(repr([(file.path, [hunk.lines for hunk in file.hunks]) for file in files]))
        elif (gap := found.not_needed_for(version)) is not None:
            held[version] = _digest(gap.reason)
    return held


def edits_between(before: Sequence[str], after: Sequence[str]) -> tuple[Edit, ...]:
    """What turns one text's lines into the other's."""
    whole = trimmed(Edit(0, len(before), tuple(after), ""), before)
    if whole is None:
        return ()
    # Between the first and the last line that differ only: the rest of a large file takes seconds to compare.
    matcher = difflib.SequenceMatcher(None, before[whole.start : whole.end], whole.lines, autojunk=False)
    return tuple(
        Edit(whole.start + start, whole.start + end, whole.lines[first:last], "")
        for tag, start, end, first, last in matcher.get_opcodes()
        if tag != "equal"
    )


def told(item: Rejected) -> list[str]:
    """A hunk that was not made, in lines: which and why, what it is, and what stands at the nearest place."""
    verdict = item.verdict
    if verdict.status == "missing":
        why = "this version has no such file"
    elif verdict.status == "ambiguous":
        why = f"fits, or is there already, at lines {', '.join(map(str, verdict.found_at))}; expected one place"
    elif verdict.nearest is None:
        why = "nothing in the file resembles what it expects"
    elif not verdict.nearest.diff:
        why = f"found at line {verdict.nearest.line}, before the hunk that precedes it"
    else:
        why = f"nearest: line {verdict.nearest.line}, {verdict.nearest.similarity:.0%} alike"
    lines = [f"{verdict.path}: hunk {verdict.hunk_index} of {verdict.origin}: {why}"]
    lines += [f"    {sign}{text.rstrip()}" for sign, text in item.hunk.lines]
    if verdict.nearest is not None and verdict.nearest.diff:
        # Without the names of the two sides, which the heading says.
        lines += ["  what it expects (-) and what is there (+):"]
        lines += [f"    {line}" for line in verdict.nearest.diff.splitlines()[2:]]
    return lines


def _note(folder: Path) -> WorkTree:
    file = folder / NOTE
    try:
        raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if raw["format"] != _FORMAT:
            raise ValueError(f"format {raw['format']!r}")
        about = None if raw["about"] is None else About(**raw["about"])
        stock = {str(path): str(digest) for path, digest in raw["stock"].items()}
        held = {str(version): str(digest) for version, digest in raw["held"].items()}
        return WorkTree(folder, Path(raw["feature"]), str(raw["version"]), str(raw["label"]), about, stock, held)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WorkTreeError(
            f"{file}: not what `patches edit` writes ({error}); name the folder that it wrote"
        ) from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkTreeError(f"{file}: can't be read ({error}); open the tree anew") from error


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode("utf-8"))
    except OSError as error:
        raise WorkTreeError(f"{file}: can't be written ({error.strerror}); name another folder with --into") from error
