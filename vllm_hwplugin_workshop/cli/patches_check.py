# SPDX-License-Identifier: Apache-2.0
"""`vllm-hwplugin patches check`: check catalogues of patches."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from vllm_hwplugin.base.versions import SUPPORTED
from vllm_hwplugin.cli.parser import Parser
from vllm_hwplugin.patching import VLLM, Catalogue, load_catalogue
from vllm_hwplugin.patching.texts import CatalogueError, DiffError, default_folder

from ..authoring import read_catalogue
from ..sources import Index
from ._drift_report import EXPECTED, summary
from ._drift_report import check as judged
from ._lines import line
from ._waiting import say_notes
from .catalogues import only
from .patches_import import add_versions, read_versions, targets_of


def check(arguments: Sequence[str]) -> int:
    """Check that catalogues can be read and their patches fit."""
    parser = Parser(
        "patches check",
        "Check that catalogues of patches can be read, and that every patch fits and compiles on each version."
        "\n\nWithout --versions and --vllm: on each supported version of a feature. Exit status: "
        "0 no problem, 1 problems found, 2 could not tell.",
        ["patches check --form", "patches check ../patches --versions '>=0.30,<0.34'"],
    )
    parser.add_argument(
        "catalogues",
        metavar="CATALOGUE",
        nargs="*",
        type=_folder,
        help="Folders of patches. Default: the plugin's own.",
    )
    add_versions(parser).add_argument(
        "--form", action="store_true", help="Check only the catalogue's files, without reading vLLM."
    )
    options = parser.read(arguments)
    index = Index()
    is_in_order = True
    for folder in options.catalogues or [default_folder()]:
        try:
            catalogue = read_catalogue(folder)
            ours = only(catalogue.features, VLLM)
            # The project's patches are applied together with any catalogue's.
            others = load_catalogue().features if all(feature.is_outside for feature in catalogue.features) else ()
            together = Catalogue((*others, *ours.features))
            targets = [] if options.form else _targets(ours, options.versions, options.vllm)
            paths = [path for feature in together.features for path in feature.paths]
            sources = read_versions(targets, paths, index)
            findings = []
            for source in sources:
                report = judged(together, source.label, source, ours)
                findings += [
                    f"{verdict.feature} on vLLM {source.version}: {summary(verdict)} ({verdict.reason})"
                    for feature, verdict in zip(ours.features, report.verdicts, strict=True)
                    if feature.versions.covers(source.version) and verdict.status not in EXPECTED
                ]
        except (CatalogueError, DiffError) as error:
            # A process would ignore the whole catalogue, so no feature can be checked.
            catalogue, sources, findings = Catalogue(()), [], [str(error)]
        is_in_order = is_in_order and not findings
        for finding in findings:
            line(finding)
        for feature in catalogue.features:
            if feature.distribution != VLLM:
                line(f"{feature.id}: changes {feature.distribution}, not vLLM; only its diffs were read")
        many = f"{len(catalogue.features)} feature{'' if len(catalogue.features) == 1 else 's'}"
        span = f" on {len(sources)} version{'' if len(sources) == 1 else 's'} of vLLM" if sources else ""
        problems = f"{len(findings)} problem{'' if len(findings) == 1 else 's'}"
        line(f"{folder}: {many}{span}: {problems if findings else 'no problem'}")
    say_notes(index.notes)
    return 0 if is_in_order else 1


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder; name a folder of patches")
    return Path(text)


def _targets(catalogue: Catalogue, versions: str | None, targets: Sequence[str]) -> list[str]:
    if versions is not None or targets:
        return targets_of(versions, targets)
    return [version for version in SUPPORTED if any(feature.versions.covers(version) for feature in catalogue.features)]
