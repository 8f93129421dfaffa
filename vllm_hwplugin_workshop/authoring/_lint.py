# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a catalogue, before a process of vLLM finds out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from vllm_hwplugin.patching import VLLM, Catalog, Feature, Source, Status, evaluate_together, load_catalog
from vllm_hwplugin.versions import SUPPORTED

_GOOD = (Status.APPLIES, Status.UPSTREAM, Status.NOT_NEEDED)


class Finding(NamedTuple):
    """Something to be mended.

    Attributes:
        feature: its id; empty where the catalogue as a whole cannot be read.
        version: empty where it is so whatever vLLM there is.
    """

    feature: str
    what: str
    version: str = ""


def check_form(folder: Path, catalog: Catalog) -> list[Finding]:
    """What can be told without any version's text.

    Args:
        catalog: as it was read from the folder.
    """
    found: list[Finding] = []
    for feature in catalog.features:
        found += (Finding(feature.id, what) for what in _form(folder / feature.id.rpartition("/")[2], feature))
    return found


def _form(folder: Path, feature: Feature) -> Iterator[str]:
    if not feature.variants:
        yield "has no [[variant]]; add one, or remove the folder"
    used = {diff.origin.rpartition("/")[2] for variant in feature.variants for diff in variant.files}
    for file in sorted(folder.iterdir()):
        if file.suffix in (".diff", ".patch") and file.name not in used:
            yield f"{file.name} is used by no variant; name it in one, or remove it"
    if feature.distribution != VLLM:
        return
    for versions in (item.versions for group in (feature.variants, feature.not_needed) for item in group):
        covered = [SUPPORTED.index(version) for version in versions.supported()]
        if any(other != one + 1 for one, other in pairwise(covered)):
            yield f"'{versions}' leaves out supported versions in its midst; make two ranges of it"
    in_order = sorted(
        feature.variants, key=lambda item: SUPPORTED.index((item.versions.supported() or SUPPORTED[-1:])[0])
    )
    for one, other in pairwise(in_order):
        if one.files == other.files and _meet(one.versions.supported(), other.versions.supported()):
            yield f"the variants for {one.versions} and {other.versions} have the same diffs; make one of them"


def _meet(one: Sequence[str], other: Sequence[str]) -> bool:
    return bool(one and other) and SUPPORTED.index(other[0]) == SUPPORTED.index(one[-1]) + 1


def paths_of(catalog: Catalog) -> list[str]:
    """The files of vLLM that have to be read to check a catalogue: its own and those of the project's features."""
    features = (*catalog.features, *load_catalog().features)
    return sorted(
        {
            diff.path
            for feature in features
            if feature.distribution == VLLM
            for variant in feature.variants
            for diff in variant.files
        }
    )


def check_on(catalog: Catalog, sources: Iterable[Source]) -> list[Finding]:
    """Whether each feature for vLLM fits each version that it is for, compiles there, and is alone with its lines.

    Raises:
        HwpluginError: a source cannot be read.
    """
    features = tuple(item for item in catalog.features if item.distribution == VLLM)
    ours = {feature.id for feature in features}
    # Those of the project are live beside any catalogue.
    together = Catalog(
        features if any(not item.is_outside for item in features) else (*load_catalog().features, *features)
    )
    found: list[Finding] = []
    live: dict[tuple[str, str], bool] = {}
    for source in sources:
        judged, conflicts = evaluate_together(together, source)
        verdicts = {verdict.feature: verdict for verdict in judged}
        for feature in features:
            variant = feature.variant_for(source.version)
            if variant is None:
                continue
            verdict = verdicts[feature.id]
            key = feature.id, str(variant.versions)
            live[key] = live.get(key, False) or verdict.status is not Status.UPSTREAM
            if verdict.status not in _GOOD:
                found.append(Finding(feature.id, f"{verdict.status.value}: {verdict.reason}", source.version))
        for conflict in conflicts:
            own = next((name for name in conflict.features if name in ours), None)
            if own is not None:
                found.append(Finding(own, str(conflict), source.version))
    found += (
        Finding(name, f"the variant for {text} changes nothing: each version that was read has it already")
        for (name, text), needed in live.items()
        if not needed
    )
    return found
