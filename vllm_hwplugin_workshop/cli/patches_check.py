# SPDX-License-Identifier: Apache-2.0
"""`vllm-hwplugin patches check`: is a catalogue in order?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_hwplugin.cli.output import STANDARD_OUTPUT, JsonFile, write_json
from vllm_hwplugin.patching import SUPPORTED, VLLM, Catalog, CatalogError, DiffError, default_folder

from ..authoring import Finding, check_form, check_on, paths_of, read_catalogue
from ..sources import Index
from .patches_import import TARGETS, VERSIONS, line, read_versions, targets_of


def check(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[CATALOGUE]...",
            exists=True,
            file_okay=False,
            help="Folders of patches. Default: the plugin's own.",
        ),
    ] = None,
    versions: Annotated[str | None, VERSIONS] = None,
    vllm: Annotated[list[str] | None, TARGETS] = None,
    form_only: Annotated[
        bool, typer.Option("--form", help="Read no vLLM: only what the files themselves show.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Check catalogues of patches: their form, and on each version whether every patch fits one place and compiles.

    Without --versions and --vllm: on each supported version that a feature has a variant for.
    Exit status: 0 nothing to mend, 1 something is, 2 could not tell.
    """
    out = Console(highlight=False, stderr=json_file == STANDARD_OUTPUT)
    index = Index()
    reports = []
    for folder in folders or [default_folder()]:
        try:
            catalog = read_catalogue(folder)
            targets = [] if form_only else _targets(catalog, versions, vllm)
            sources = read_versions(targets, paths_of(catalog), index)
            findings = [*check_form(folder, catalog), *check_on(catalog, sources)]
        except (CatalogError, DiffError) as error:
            # What a process would leave out as a whole, and no feature of it can be looked at.
            catalog, sources, findings = Catalog(()), [], [Finding("", str(error))]
        read = [source.version for source in sources]
        _report(folder, catalog, read, findings, out)
        reports.append(
            {
                "catalogue": str(folder),
                "features": [feature.id for feature in catalog.features],
                "versions": read,
                "findings": [item._asdict() for item in findings],
            }
        )
    for note in index.notes:
        typer.echo(f"note: {note}", err=True)
    if json_file is not None:
        write_json({"format": 1, "catalogues": reports}, json_file)
    raise typer.Exit(1 if any(report["findings"] for report in reports) else 0)


def _targets(catalog: Catalog, versions: str | None, targets: list[str] | None) -> list[str]:
    if versions is not None or targets:
        return targets_of(versions, targets)
    return [
        version
        for version in SUPPORTED
        if any(item.distribution == VLLM and item.variant_for(version) is not None for item in catalog.features)
    ]


def _report(folder: Path, catalog: Catalog, versions: Sequence[str], findings: Sequence[Finding], out: Console) -> None:
    for item in findings:
        where = f"{item.feature} on vLLM {item.version}" if item.version else item.feature
        line(out, f"{where}: {item.what}" if where else item.what)
    others = [feature.id for feature in catalog.features if feature.distribution != VLLM]
    for name in others:
        line(out, f"{name}: changes another distribution than vLLM; its diffs were read, and nothing more")
    many = f"{len(catalog.features)} feature{'' if len(catalog.features) == 1 else 's'}"
    span = f" on {len(versions)} version{'' if len(versions) == 1 else 's'} of vLLM" if versions else ""
    line(out, f"{folder}: {many}{span}: {f'{len(findings)} to mend' if findings else 'in order'}")
