# SPDX-License-Identifier: Apache-2.0
"""Verdicts on how a feature fits a version, from text only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ..base.versions import SUPPORTED, is_supported, is_version, supported_as
from ._apply import Edit, Hint, Text, apply_edits, edits_of, first_clash, locate
from ._errors import NOT_COMPILED, UnreadableFile
from ._model import VLLM, Conflict, Feature, FeatureVerdict, HunkVerdict, Overridden, Source, Status, blob_of

if TYPE_CHECKING:
    import ast


class Texts:
    """The files of a source, which are read and indexed once."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.unreadable: dict[str, str] = {}
        self._read: dict[str, str | None] = {}
        self._indexed: dict[str, Text | None] = {}
        self._blobs: dict[str, str | None] = {}
        self._trees: dict[str, ast.Module | str] = {}

    def get(self, path: str) -> Text | None:
        """Return a text, or None if missing or unreadable (then in `unreadable`)."""
        if path not in self._indexed:
            text = self._text(path)
            self._indexed[path] = None if text is None else Text(text)
        return self._indexed[path]

    def blob(self, path: str) -> str | None:
        """Return a text's name by `blob_of`; None as in `get`."""
        if path not in self._blobs:
            text = self._text(path)
            self._blobs[path] = None if text is None else blob_of(text)
        return self._blobs[path]

    def tree(self, path: str) -> ast.Module | str:
        """Return a text's syntax tree, or why there is none."""
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
                # Only the features that change this file are lost.
                self._read[path], self.unreadable[path] = None, str(error)
        return self._read[path]


class Fit(NamedTuple):
    """A verdict, and its edits by path (empty unless the feature applies)."""

    verdict: FeatureVerdict
    edits: Mapping[str, list[Edit]] = MappingProxyType({})
    distribution: str = VLLM


def fit(
    feature: Feature, texts: Texts, *, try_unlisted: bool = False, hint: Hint | None = None, last: str | None = None
) -> Fit:
    """Return the verdict on `feature`, not compiled, with the edits.

    A version after the last reviewed version does not need what the last version does not need, with or without an end
    of the range: a range does not know the releases after it was written.

    Args:
        try_unlisted: on an unlisted version, use the hunks for the nearest listed version if each fits one place.
        hint: as for `locate`; the classes of overrides are then read also if their text is reviewed. Takes
            milliseconds each.
        last: the version that this one comes after, even if it states another version or none.
    """
    version = texts.source.version
    covers = feature.versions.covers(version) and last is None
    if covers and _is_listed(version, feature) and feature.files_for(version):
        result = fit_files(feature, version, texts, hint)
        trouble = _relied_on(feature, texts) if result.verdict.status is Status.APPLIES else None
        return result if trouble is None else Fit(result.verdict._replace(status=trouble[0], reason=trouble[1]))
    if last is None and feature.distribution == VLLM and _is_behind(version):
        last = SUPPORTED[-1]
    if last is not None and (not_needed := feature.not_needed_for(last)):
        reason = f"{not_needed.reason}; so it is in {last}, and this version is not reviewed"
        return Fit(FeatureVerdict(feature.id, version, Status.NOT_NEEDED, reason=reason))
    # For a checkout that states no version, all ranges without an end hold.
    if not_needed := feature.not_needed_for(version if last is None or is_version(version) else "9999"):
        return Fit(FeatureVerdict(feature.id, version, Status.NOT_NEEDED, reason=not_needed.reason))
    if try_unlisted:
        like = version if covers else _nearest(feature, version)
        result = fit_files(feature, like, texts, hint)
        if result.verdict.status in (Status.APPLIES, Status.UPSTREAM):
            return result
        reason = f"its hunks for {like} do not fit it: {result.verdict.reason}"
        return Fit(FeatureVerdict(feature.id, version, Status.UNLISTED, reason=reason))
    if not covers:
        reason = "the patch does not list it"
    elif _is_listed(version, feature):
        reason = "none of its hunks is for it"
    else:
        reason = "this release of the plugin was not checked with it"
    return Fit(FeatureVerdict(feature.id, version, Status.UNLISTED, reason=reason))


def _relied_on(feature: Feature, texts: Texts) -> tuple[Status, str] | None:
    """Return why relied-on files are wrong; None if reviewed or unknown."""
    version = supported_as(texts.source.version)
    if version is None:
        return None
    others = [relied.path for relied in feature.relies if texts.blob(relied.path) != relied.text_of(version)]
    lost = [texts.unreadable[path] for path in others if path in texts.unreadable]
    if lost:
        return Status.UNREADABLE, "; ".join(lost)
    if others:
        return Status.OTHER_TEXT, f"{', '.join(others)}: not the text of vLLM {version} that this release has read"
    return None


def _nearest(feature: Feature, version: str) -> str:
    """Return the feature's newest version up to `version`, else its newest."""
    from packaging.version import InvalidVersion, Version

    known = known_versions(feature)
    try:
        return next((older for older in known if Version(older) <= Version(version)), known[0])
    except InvalidVersion:
        return known[0]


def known_versions(feature: Feature) -> list[str]:
    """Return a feature's known versions and its ranges' edges, newest first."""
    from packaging.version import Version

    ranges = [feature.versions, *(hunk.versions for file in feature.files for hunk in file.hunks if hunk.versions)]
    known = [
        *(edge for versions in ranges for edge in versions.edges()),
        *(SUPPORTED if feature.distribution == VLLM else ()),
    ]
    # By version, because 0.33 equals 0.33.0.
    covered = {Version(text): text for text in known if feature.versions.covers(text)}
    newest_first = [covered[version] for version in sorted(covered, reverse=True)]
    # A version just after an edge is no release, so it comes last.
    return sorted(newest_first, key=lambda version: version.endswith(".0.0.1"))


def compiled(result: Fit, texts: Texts) -> FeatureVerdict:
    """Return the verdict, after a compilation of each patched file."""
    for path, edits in result.edits.items():
        pristine = texts.get(path)
        assert pristine is not None
        trouble = trouble_in(path, apply_edits(pristine, edits))
        # A version may be written for a newer Python than this one.
        if trouble and not trouble_in(path, pristine.text):
            return result.verdict._replace(status=Status.NO_PYTHON, reason=trouble)
    return result.verdict


def trouble_in(path: str, text: str) -> str:
    """Return why Python cannot compile a text; empty if it can."""
    try:
        compile(text, path, "exec", dont_inherit=True)
    except NOT_COMPILED as error:
        return f"{path} would be no Python: {error}"
    return ""


def _is_behind(version: str) -> bool:
    """Whether a version is newer than all of `SUPPORTED`."""
    from packaging.version import Version

    return not is_supported(version) and is_version(version) and Version(version) > Version(SUPPORTED[-1])


def _is_listed(version: str, feature: Feature) -> bool:
    """Whether a feature's author can mean a version that it covers.

    The project's own ranges do not know the releases after they were written; a version that is spelt out is meant.
    External catalogues must end their ranges themselves.
    """
    return feature.is_outside or is_supported(version) or feature.versions.names(version)


def fit_files(feature: Feature, like: str, texts: Texts, hint: Hint | None) -> Fit:
    """Fit the hunks and the overrides for the version `like`."""
    files = feature.files_for(like)
    hunks: list[HunkVerdict] = []
    edits: dict[str, list[Edit]] = {}
    for diff in files:
        for hunk, (verdict, place) in zip(diff.hunks, locate(diff, texts.get(diff.path), hint), strict=True):
            hunks.append(verdict)
            if place is not None:
                edits.setdefault(diff.path, []).extend(edits_of(hunk, place, feature.id))
    lost = sorted({diff.path for diff in files} & texts.unreadable.keys())
    if lost:
        status, reason = Status.UNREADABLE, "; ".join(texts.unreadable[path] for path in lost)
    else:
        status, reason = _judge(hunks, feature.target)
    if status is Status.APPLIES:
        for path, edits_of_file in edits.items():
            clash = first_clash(edits_of_file)
            if clash is not None:
                status = Status.CONFLICT
                reason = f"two of its hunks change {path} at lines {_lines(*clash)}"
    if status is Status.APPLIES and (troubles := _misfits(feature.overrides_for(like), texts, read=hint is not None)):
        status, reason = Status.OTHER_CLASS, f"an override does not fit: {'; '.join(troubles)}"
    result = FeatureVerdict(feature.id, texts.source.version, status, tuple(hunks), reason)
    return Fit(result, edits, feature.distribution) if status is Status.APPLIES else Fit(result)


def _misfits(overrides: tuple[Overridden, ...], texts: Texts, *, read: bool) -> list[str]:
    """Return how classes differ from the overrides; parse reviewed texts if `read`."""
    version, troubles = supported_as(texts.source.version), list[str]()
    for overridden in overrides:
        if not read and version is not None and texts.blob(overridden.path) == overridden.text.text_of(version):
            continue
        # A start that knows the texts has no time for this import and a tenth of a second for each parse.
        from ._overrides import misfits

        tree = texts.tree(overridden.path)
        troubles += [tree] if isinstance(tree, str) else misfits(overridden, tree)
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


def conflicts_between(fits: list[Fit]) -> Iterator[Conflict]:
    for earlier, later in combinations(fits, 2):
        for path in sorted(earlier.edits.keys() & later.edits.keys()):
            clash = first_clash([*earlier.edits[path], *later.edits[path]])
            if clash is not None:
                first, last = clash[0].start + 1, max(edit.end for edit in clash)
                yield Conflict(path, (earlier.verdict.feature, later.verdict.feature), (first, max(first, last)))
                break


def _lines(first: Edit, second: Edit) -> str:
    return f"{first.start + 1} to {max(first.end, second.end, first.start + 1)}"
