# SPDX-License-Identifier: Apache-2.0
"""`vllm-hwplugin patches diff`: the exact text change that a feature makes."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from vllm_hwplugin.cli.catalogues import all_features, find_feature
from vllm_hwplugin.patching import FeatureVerdict, Source, Status, evaluate, render_diff

from ..sources import Index, open_installed, open_target, run_all
from ._drift_report import TargetReport, exit_status, summary
from ._drift_table import say_once
from .drift import PATIENCE

_FEATURE = typer.Argument(metavar="FEATURE", help="The id of a feature, as `vllm-hwplugin patches` lists them.")


def diff(
    feature: Annotated[str, _FEATURE],
    vllm: Annotated[
        str | None,
        typer.Option(
            "--vllm",
            "--target",
            metavar="TARGET",
            help="A wheel file, a folder or a version, as `drift` takes them. Default: what is installed.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the exact text change that a feature makes to a vLLM, or to what else it changes, as a unified diff.

    Exit status 1 where the feature does not fit, 2 where that cannot be told; the diff of what is not needed is empty.
    """
    found = find_feature(all_features(), feature)
    index = Index()

    def read(target: str) -> tuple[Source, FeatureVerdict]:
        if vllm is None:
            source = open_installed(found.distribution, [found])
        else:
            source = open_target(target, index, found.distribution)
        return source, evaluate(found, source)

    wait = say_once(Console(stderr=True, highlight=False))
    ((source, verdict),) = run_all(read, [vllm or f"the installed {found.target}"], 1, patience=PATIENCE, on_wait=wait)
    if verdict.status is not Status.APPLIES:
        reason = f" ({verdict.reason})" if verdict.reason else ""
        typer.echo(f"{source.label}: {found.id}: {summary(verdict)}{reason}", err=True)
        raise typer.Exit(exit_status([TargetReport(source.label, source.label, source.version, (verdict,))]))
    text = render_diff(found, source)
    for note in index.notes:
        typer.echo(f"note: {note}", err=True)
    out = Console(highlight=False)
    if not out.is_terminal:
        typer.echo(text, nl=False)
        return
    for line in text.splitlines():
        out.print(Text(line, style=_style(line)), soft_wrap=True)


def _style(line: str) -> str:
    if line.startswith(("---", "+++", "@@")):
        return "bold"
    return {"-": "red", "+": "green"}.get(line[:1], "")
