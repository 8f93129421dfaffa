# SPDX-License-Identifier: Apache-2.0
"""Verdicts on features for vLLM versions that no process runs, with hints where hunks do not fit."""

from __future__ import annotations

import difflib

from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.patching import VLLM, Catalogue, Feature, PatchingError
from vllm_hwplugin.patching.texts import (
    Conflict,
    FeatureVerdict,
    FileDiff,
    Source,
    Status,
    Texts,
    compiled,
    conflicts_between,
    fit,
    fit_files,
    known_versions,
    patched_files,
    split_lines,
)

from .nearest import nearest


def evaluate(feature: Feature, source: Source) -> FeatureVerdict:
    """Return the verdict on `feature` for `source`, with each patched file compiled."""
    texts = Texts(source)
    return compiled(fit(feature, texts, hint=nearest), texts)


def evaluate_as(feature: Feature, source: Source, version: str) -> FeatureVerdict:
    """Return the verdict on the hunks for `version` in any source."""
    texts = Texts(source)
    return compiled(fit_files(feature, version, texts, nearest), texts)


def evaluate_together(
    catalogue: Catalogue, source: Source, *, hints: bool = True, last: str | None = None
) -> tuple[list[FeatureVerdict], list[Conflict]]:
    """Return `evaluate`'s verdict on each feature, and the conflicts between features.

    Args:
        catalogue: features of the source's distribution only.
        hints: look for the nearest place of each hunk that does not fit.
        last: see `fit`.
    """
    texts = Texts(source)
    fits = [fit(feature, texts, hint=nearest if hints else None, last=last) for feature in catalogue.features]
    return [compiled(result, texts) for result in fits], list(conflicts_between(fits))


def told_apart(feature: Feature) -> list[str]:
    """Return a version for each distinct set of hunks, newest first."""
    by_hunks: dict[tuple[FileDiff, ...], str] = {}
    for version in known_versions(feature):
        by_hunks.setdefault(feature.files_for(version), version)
    return list(by_hunks.values())


def last_listed(catalogue: Catalogue) -> str | None:
    """Return the newest of `SUPPORTED` in ranges with ends, or None.

    None: the catalogue has no feature for vLLM with such a range.
    """
    ours = [feature for feature in catalogue.features if feature.distribution == VLLM]
    ranges = [
        versions
        for feature in ours
        for versions in (feature.versions, *(entry.versions for entry in feature.not_needed))
        if versions.has_end
    ]
    return next((version for version in reversed(SUPPORTED) if any(known.covers(version) for known in ranges)), None)


def render_diff(feature: Feature, source: Source) -> str:
    """Return only this feature's change to `source`, or raise PatchingError."""
    texts = Texts(source)
    result = fit(feature, texts, hint=nearest)
    if result.verdict.status is not Status.APPLIES:
        status, reason = result.verdict.status.value, result.verdict.reason
        raise PatchingError(f"{feature.id} changes nothing in {feature.target} {source.version}: {status} ({reason})")
    parts = []
    for path, file in patched_files({feature.distribution: texts}, [result]).items():
        pristine = texts.get(path)
        assert pristine is not None
        lines = difflib.unified_diff(pristine.lines, split_lines(file.text), f"a/{path}", f"b/{path}")
        parts += [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]
    return "".join(parts)
