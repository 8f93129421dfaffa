# SPDX-License-Identifier: Apache-2.0
"""How a feature fits a version: verdicts only, from text alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ..versions import SUPPORTED, is_supported, is_version, supported_as
from ._apply import Edit, Text, apply_edits, edits_of, first_clash, locate
from ._errors import NOT_COMPILED, UnreadableFile
from ._model import (
    VLLM,
    Catalogue,
    Conflict,
    Feature,
    FeatureVerdict,
    FileDiff,
    HunkVerdict,
    Overridden,
    Source,
    Status,
    blob_of,
)

if TYPE_CHECKING:
    import ast


class Texts:
    """The files of one source, each read and indexed once."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.unreadable: dict[str, str] = {}
        self._read: dict[str, str | None] = {}
        self._indexed: dict[str, Text | None] = {}
        self._blobs: dict[str, str | None] = {}
        self._trees: dict[str, ast.Module | str] = {}

    def get(self, path: str) -> Text | None:
        """The text; None where there is none, or none that can be read, which `unreadable` then explains."""
        if path not in self._indexed:
            text = self._text(path)
            self._indexed[path] = None if text is None else Text(text)
        return self._indexed[path]

    def blob(self, path: str) -> str | None:
        """The text's name by `blob_of`; None likewise."""
        if path not in self._blobs:
            text = self._text(path)
            self._blobs[path] = None if text is None else blob_of(text)
        return self._blobs[path]

    def tree(self, path: str) -> ast.Module | str:
        """Return the text's syntax tree, or why there is none."""
        if path not in self._trees:
            import ast

            try:
                self._trees[path] = ast.parse(self._text(path) or "")
            except NOT_COMPILED as error:
                self._trees[path] = f"{path} is no Python here: {error}"
        return self._trees[path]

    def _text(self, path: str) -> str | None:
        if path not in self._read:
            try:
                self._read[path] = self.source.read(path)
            except UnreadableFile as error:
                # The features that change this file are lost, the others are not.
                self._read[path], self.unreadable[path] = None, str(error)
        return self._read[path]


class Fit(NamedTuple):
    """A verdict, and by path the edits that make it so (empty unless the feature applies)."""

    verdict: FeatureVerdict
    edits: Mapping[str, list[Edit]] = MappingProxyType({})
    distribution: str = VLLM


def evaluate(feature: Feature, source: Source) -> FeatureVerdict:
    """The verdict on `feature` for the version that `source` holds, what it makes of each file compiled."""
    texts = Texts(source)
    return _compiled(fit(feature, texts), texts)


def fit(
    feature: Feature, texts: Texts, *, try_unlisted: bool = False, hints: bool = True, last: str | None = None
) -> Fit:
    """Like `evaluate`, with the edits.

    A version behind the last one that was read inherits what the last one does not need, whether or not that range has
    an end: a range says nothing of releases that were to come when it was written.

    Args:
        try_unlisted: on a version that is not listed, take the hunks for the nearest that is, if each fits one place.
        hints: look for the nearest place of each hunk that is not found, and read the classes of overrides also where
            the text is one that this release has read; takes milliseconds each.
        last: the version that this one comes behind, whatever it calls itself.
    """
    version = texts.source.version
    covers = feature.versions.covers(version) and last is None
    if covers and _is_listed(version, feature) and feature.files_for(version):
        result = _fit_files(feature, version, texts, hints)
        found = _relied_on(feature, texts) if result.verdict.status is Status.APPLIES else None
        return result if found is None else Fit(result.verdict._replace(status=found[0], reason=found[1]))
    if last is None and feature.distribution == VLLM and _is_behind(version):
        last = SUPPORTED[-1]
    if last is not None and (not_needed := feature.not_needed_for(last)):
        reason = f"{not_needed.reason}; so it is in {last}, and nobody has looked here"
        return Fit(FeatureVerdict(feature.id, version, Status.NOT_NEEDED, reason=reason))
    # A checkout that states no version has all that is said of versions to come.
    if not_needed := feature.not_needed_for(version if last is None or is_version(version) else "9999"):
        return Fit(FeatureVerdict(feature.id, version, Status.NOT_NEEDED, reason=not_needed.reason))
    if try_unlisted:
        like = version if covers else _nearest(feature, version)
        result = _fit_files(feature, like, texts, hints)
        if result.verdict.status in (Status.APPLIES, Status.UPSTREAM):
            return result
        reason = f"its hunks for {like} do not fit it: {result.verdict.reason}"
        return Fit(FeatureVerdict(feature.id, version, Status.UNLISTED, reason=reason))
    if not covers:
        reason = "the patch does not list it"
    elif _is_listed(version, feature):
        reason = "none of its hunks is for it"
    else:
        reason = "it was not there to be checked"
    return Fit(FeatureVerdict(feature.id, version, Status.UNLISTED, reason=reason))


def _relied_on(feature: Feature, texts: Texts) -> tuple[Status, str] | None:
    """What is wrong with the files that a feature relies on; None where each is as it was read, or nobody knows how."""
    version = supported_as(texts.source.version)
    if version is None:
        return None
    others = [item.path for item in feature.relies if texts.blob(item.path) != item.text_of(version)]
    known = (tree.texts for tree in feature.trees if tree.version == version)
    if any({*others} <= tree.keys() and all(texts.blob(path) in tree[path] for path in tree) for tree in known):
        return None
    lost = [texts.unreadable[path] for path in others if path in texts.unreadable]
    if lost:
        return Status.UNREADABLE, "; ".join(lost)
    if others:
        trees = [tree.name for tree in feature.trees if tree.version == version]
        read = " or ".join([f"the text of vLLM {version}", *(f"a text of {name}" for name in trees)])
        return Status.OTHER_TEXT, f"{', '.join(others)}: not {read} that this release has read"
    return None


def _nearest(feature: Feature, version: str) -> str:
    """Of the versions that a feature is for, the newest that is not newer than this one, or else the newest."""
    from packaging.version import InvalidVersion, Version

    known = _told(feature)
    try:
        return next((item for item in known if Version(item) <= Version(version)), known[0])
    except InvalidVersion:
        return known[0]


def told_apart(feature: Feature) -> list[str]:
    """Of versions that take the same hunks of a feature one, newest first."""
    found: dict[tuple[FileDiff, ...], str] = {}
    for version in _told(feature):
        found.setdefault(feature.files_for(version), version)
    return list(found.values())


def _told(feature: Feature) -> list[str]:
    """Versions that a feature is for, newest first: those that are known, and those at the edges of its ranges."""
    from packaging.version import Version

    ranges = [feature.versions, *(hunk.versions for file in feature.files for hunk in file.hunks if hunk.versions)]
    known = [*(edge for item in ranges for edge in item.edges()), *(SUPPORTED if feature.distribution == VLLM else ())]
    # By version, because 0.33 and 0.33.0 are one.
    versions = {Version(text): text for text in known if feature.versions.covers(text)}
    found = [versions[version] for version in sorted(versions, reverse=True)]
    # What lies just behind an edge is the last to name, because there is no such release.
    return sorted(found, key=lambda version: version.endswith(".0.0.1"))


def evaluate_as(feature: Feature, source: Source, version: str) -> FeatureVerdict:
    """The verdict that a source would have if the hunks for that version were meant for it."""
    texts = Texts(source)
    return _compiled(_fit_files(feature, version, texts, True), texts)


def _compiled(item: Fit, texts: Texts) -> FeatureVerdict:
    for path, edits in item.edits.items():
        pristine = texts.get(path)
        assert pristine is not None
        trouble = trouble_in(path, apply_edits(pristine, edits))
        # A version may be written for a newer Python than this one.
        if trouble and not trouble_in(path, pristine.text):
            return item.verdict._replace(status=Status.NO_PYTHON, reason=trouble)
    return item.verdict


def trouble_in(path: str, text: str) -> str:
    """Why Python cannot compile a text; empty where it can."""
    try:
        compile(text, path, "exec", dont_inherit=True)
    except NOT_COMPILED as error:
        return f"{path} would be no Python: {error}"
    return ""


def _is_behind(version: str) -> bool:
    """Whether a version is newer than all of `SUPPORTED`."""
    from packaging.version import Version

    return not is_supported(version) and is_version(version) and Version(version) > Version(SUPPORTED[-1])


def last_listed(catalogue: Catalogue) -> str | None:
    """The newest of `SUPPORTED` that a range with an end holds; None of a catalogue for another distribution."""
    ours = [feature for feature in catalogue.features if feature.distribution == VLLM]
    ranges = [
        item for feature in ours for item in (feature.versions, *(other.versions for other in feature.not_needed))
    ]
    stated = [item for item in ranges if item.has_end]
    return next((version for version in reversed(SUPPORTED) if any(item.covers(version) for item in stated)), None)


def _is_listed(version: str, feature: Feature) -> bool:
    """Whether the author of a feature that covers a version can have meant it.

    The project's own ranges say nothing of releases that were to come when they were written; a version that is spelt
    out is meant. What a catalogue from outside covers, it has to end by itself.
    """
    return feature.is_outside or is_supported(version) or feature.versions.names(version)


def _fit_files(feature: Feature, like: str, texts: Texts, hints: bool) -> Fit:
    """Fit the hunks and the overrides for the version `like`."""
    files = feature.files_for(like)
    hunks: list[HunkVerdict] = []
    edits: dict[str, list[Edit]] = {}
    for diff in files:
        for hunk, (found, place) in zip(diff.hunks, locate(diff, texts.get(diff.path), hints=hints), strict=True):
            hunks.append(found)
            if place is not None:
                edits.setdefault(diff.path, []).extend(edits_of(hunk, place, feature.id))
    lost = sorted({diff.path for diff in files} & texts.unreadable.keys())
    if lost:
        status, reason = Status.UNREADABLE, "; ".join(texts.unreadable[path] for path in lost)
    else:
        status, reason = _judge(hunks, feature.target)
    if status is Status.APPLIES:
        for path, items in edits.items():
            clash = first_clash(items)
            if clash is not None:
                status = Status.CONFLICT
                reason = f"two of its own hunks change {path} at lines {_lines(*clash)}"
    if status is Status.APPLIES and (troubles := _misfits(feature.overrides_for(like), texts, read=hints)):
        status, reason = Status.OTHER_CLASS, f"an override does not fit: {'; '.join(troubles)}"
    verdict = FeatureVerdict(feature.id, texts.source.version, status, tuple(hunks), reason)
    return Fit(verdict, edits, feature.distribution) if status is Status.APPLIES else Fit(verdict)


def _misfits(overrides: tuple[Overridden, ...], texts: Texts, *, read: bool) -> list[str]:
    """Return what differs from the classes that the overrides were written for.

    Args:
        read: also read a text that this release has read; takes a tenth of a second each.
    """
    version, troubles = supported_as(texts.source.version), list[str]()
    for item in overrides:
        if not read and version is not None and texts.blob(item.path) == item.text.text_of(version):
            continue
        # A start that knows the texts has no time for this import.
        from ._overrides import misfits

        tree = texts.tree(item.path)
        troubles += [tree] if isinstance(tree, str) else misfits(item, tree)
    return troubles


def _judge(hunks: list[HunkVerdict], target: str) -> tuple[Status, str]:
    missing = sorted({hunk.path for hunk in hunks if hunk.status == "missing"})
    if missing:
        return Status.TARGET_MISSING, f"{target} has no {', '.join(missing)}"
    lost = [hunk for hunk in hunks if hunk.status in ("drifted", "ambiguous")]
    if lost:
        return Status.DRIFTED, "; ".join(_why_lost(hunk) for hunk in lost)
    present = [hunk for hunk in hunks if hunk.status == "upstream"]
    if present and len(present) == len(hunks):
        return Status.UPSTREAM, f"every hunk is in this {target} already"
    if present:
        where = ", ".join(f"hunk {hunk.hunk_index} of {hunk.path}" for hunk in present)
        return Status.DRIFTED, f"{where}: in this {target} already, but the others are not"
    return Status.APPLIES, ""


def _why_lost(hunk: HunkVerdict) -> str:
    where = f"hunk {hunk.hunk_index} of {hunk.path} ({hunk.origin})"
    if hunk.status == "ambiguous":
        return f"{where} fits, or is there already, at lines {', '.join(map(str, hunk.found_at))}, expected one place"
    if hunk.nearest is None:
        return f"{where} not found"
    if not hunk.nearest.diff:
        return f"{where} found at line {hunk.nearest.line}, before the hunk that precedes it"
    return f"{where} not found; nearest at line {hunk.nearest.line}, {hunk.nearest.similarity:.0%} alike"


def evaluate_together(
    catalogue: Catalogue, source: Source, *, hints: bool = True, last: str | None = None
) -> tuple[list[FeatureVerdict], list[Conflict]]:
    """The verdict on each feature by itself, as `evaluate` gives it, and every pair that changes the same lines.

    Args:
        catalogue: features of one distribution, which is the source's.
        hints: look for the nearest place of each hunk that is not found.
        last: see `fit`.
    """
    texts = Texts(source)
    fits = [fit(feature, texts, hints=hints, last=last) for feature in catalogue.features]
    return [_compiled(item, texts) for item in fits], list(conflicts_between(fits))


def conflicts_between(fits: list[Fit]) -> Iterator[Conflict]:
    for one, other in combinations(fits, 2):
        for path in sorted(one.edits.keys() & other.edits.keys()):
            clash = first_clash([*one.edits[path], *other.edits[path]])
            if clash is not None:
                first, last = clash[0].start + 1, max(edit.end for edit in clash)
                yield Conflict(path, (one.verdict.feature, other.verdict.feature), (first, max(first, last)))
                break


def _lines(one: Edit, other: Edit) -> str:
    return f"{one.start + 1} to {max(one.end, other.end, one.start + 1)}"
