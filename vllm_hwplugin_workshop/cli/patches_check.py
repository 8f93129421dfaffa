# SPDX-License-Identifier: Apache-2.0
"""`vllm-hwplugin patches check`: is a catalogue in order?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from vllm_hwplugin.cli.output import add_json, for_a_reader, write_json
from vllm_hwplugin.cli.parser import Parser
from vllm_hwplugin.patching import SUPPORTED, VLLM, Catalogue, CatalogueError, DiffError, default_folder

from ..authoring import Finding, check_form, check_on, paths_of, read_catalogue
from ..sources import Index
from ._waiting import say_notes
from .patches_import import add_versions, line, read_versions, targets_of


def check(arguments: Sequence[str]) -> int:
    """Check catalogues of patches: their form, and on each version whether every patch fits one place and compiles."""
    parser = Parser(
        "patches check",
        "Check catalogues of patches: their form, and on each version whether every patch fits one place and compiles."
        "\n\nWithout --versions and --vllm: on each supported version that a feature is for. Exit status: "
        "0 nothing to mend, 1 something is, 2 could not tell.",
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
        "--form", action="store_true", help="Read no vLLM: only what the files themselves show."
    )
    add_json(parser.add_argument_group("results"))
    options = parser.read(arguments)
    out = for_a_reader(options.json)
    index = Index()
    reports = []
    for folder in options.catalogues or [default_folder()]:
        try:
            catalogue = read_catalogue(folder)
            targets = [] if options.form else _targets(catalogue, options.versions, options.vllm)
            sources = read_versions(targets, paths_of(catalogue), index)
            findings = [*check_form(folder, catalogue), *check_on(catalogue, sources)]
        except (CatalogueError, DiffError) as error:
            # What a process would leave out as a whole, and no feature of it can be looked at.
            catalogue, sources, findings = Catalogue(()), [], [Finding("", str(error))]
        read = [source.version for source in sources]
        _report(folder, catalogue, read, findings, out)
        reports.append(
            {
                "catalogue": str(folder),
                "features": [feature.id for feature in catalogue.features],
                "versions": read,
                "findings": [item._asdict() for item in findings],
            }
        )
    say_notes(index.notes)
    if options.json is not None:
        write_json({"format": 1, "catalogues": reports}, options.json)
    return 1 if any(report["findings"] for report in reports) else 0


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text}: no such folder")
    return Path(text)


def _targets(catalogue: Catalogue, versions: str | None, targets: Sequence[str]) -> list[str]:
    if versions is not None or targets:
        return targets_of(versions, targets)
    return [
        version
        for version in SUPPORTED
        if any(item.distribution == VLLM and item.versions.covers(version) for item in catalogue.features)
    ]


def _report(
    folder: Path, catalogue: Catalogue, versions: Sequence[str], findings: Sequence[Finding], out: TextIO
) -> None:
    for item in findings:
        where = f"{item.feature} on vLLM {item.version}" if item.version else item.feature
        line(out, f"{where}: {item.what}" if where else item.what)
    others = [feature.id for feature in catalogue.features if feature.distribution != VLLM]
    for name in others:
        line(out, f"{name}: changes another distribution than vLLM; its diffs were read, and nothing more")
    many = f"{len(catalogue.features)} feature{'' if len(catalogue.features) == 1 else 's'}"
    span = f" on {len(versions)} version{'' if len(versions) == 1 else 's'} of vLLM" if versions else ""
    line(out, f"{folder}: {many}{span}: {f'{len(findings)} to mend' if findings else 'in order'}")
