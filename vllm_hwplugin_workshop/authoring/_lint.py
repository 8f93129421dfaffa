# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a catalogue, before a process of vLLM finds out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_hwplugin.patching import VLLM, Catalogue, Feature, Source, Status, evaluate_together, load_catalogue

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


def check_form(folder: Path, catalogue: Catalogue) -> list[Finding]:
    """What can be told without any version's text.

    Args:
        catalogue: as it was read from the folder.
    """
    found: list[Finding] = []
    for feature in catalogue.features:
        found += (Finding(feature.id, what) for what in _form(folder / feature.id.rpartition("/")[2], feature))
    return found


def _form(folder: Path, feature: Feature) -> Iterator[str]:
    for patch in sorted(folder.glob("*.patch")):
        yield f"{patch.name} is not read; name it *.diff, or remove it"
    for number, file in enumerate(feature.files):
        if any(file.path == other.path for other in feature.files[:number]):
            yield f"{file.path} is changed by several diffs; make one of them"
        seen: dict[tuple[tuple[str, str], ...], int] = {}
        for hunk in file.hunks:
            where = f"hunk {hunk.number} of {file.path} ({file.origin})"
            if feature.distribution == VLLM and not any(map(hunk.covers, feature.versions.supported())):
                yield f"{where} is for {hunk.versions}, and none of the supported versions of the feature; remove it"
            if (first := seen.setdefault(hunk.lines, hunk.number)) != hunk.number:
                yield f"{where} is hunk {first} once more; make one of them, with both ranges joined by '||'"
    if feature.distribution == VLLM:
        for version in feature.versions.supported():
            if not feature.files_for(version):
                yield f"no hunk is for {version}, which '{feature.versions}' holds; say why under [[not_needed]]"


def paths_of(catalogue: Catalogue) -> list[str]:
    """The files of vLLM that have to be read to check a catalogue: its own and those of the project's features."""
    features = (*catalogue.features, *load_catalogue().features)
    return sorted({diff.path for feature in features if feature.distribution == VLLM for diff in feature.files})


def check_on(catalogue: Catalogue, sources: Iterable[Source]) -> list[Finding]:
    """Whether each feature for vLLM fits each version that it is for, compiles there, and is alone with its lines.

    Raises:
        HwpluginError: a source cannot be read.
    """
    features = tuple(item for item in catalogue.features if item.distribution == VLLM)
    ours = {feature.id for feature in features}
    # Those of the project are live beside any catalogue.
    together = Catalogue(
        features if any(not item.is_outside for item in features) else (*load_catalogue().features, *features)
    )
    found: list[Finding] = []
    # Of each hunk that was looked at, whether some version needs it.
    needed: dict[tuple[str, str], bool] = {}
    for source in sources:
        judged, conflicts = evaluate_together(together, source)
        verdicts = {verdict.feature: verdict for verdict in judged}
        for feature in features:
            verdict = verdicts[feature.id]
            for hunk in verdict.hunks:
                key = feature.id, f"hunk {hunk.hunk_index} of {hunk.path} ({hunk.origin})"
                needed[key] = needed.get(key, False) or verdict.status is not Status.UPSTREAM
            if feature.versions.covers(source.version) and verdict.status not in _GOOD:
                found.append(Finding(feature.id, f"{verdict.status.value}: {verdict.reason}", source.version))
        for conflict in conflicts:
            own = next((name for name in conflict.features if name in ours), None)
            if own is not None:
                found.append(Finding(own, str(conflict), source.version))
    found += (
        Finding(name, f"{hunk} changes nothing: each version that was read has it already")
        for (name, hunk), is_needed in needed.items()
        if not is_needed
    )
    return found
