# SPDX-License-Identifier: Apache-2.0
"""`vllm-hwplugin patches`: what the plugin changes in vLLM, for reading and review."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from vllm_hwplugin.patching import Catalog, Feature, FeatureVerdict, Source, Status, evaluate, load_catalog, render_diff

from ._app import FAILURE
from ._catalogues import select
from ._drift import PATIENCE
from ._drift_report import TargetReport, exit_status, summary
from ._drift_table import say_once, say_troubles
from ._patches_check import check
from ._patches_edit import edit, save
from ._patches_import import import_change
from ._tables import print_rows
from .sources import Index, SourceError, open_installed, open_target, run_all

app = typer.Typer(invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False)

_FEATURE = typer.Argument(metavar="FEATURE", help="The id of a feature, as `vllm-hwplugin patches` lists them.")


class UnknownFeature(SourceError):
    """No feature has this id."""


@app.callback()
def patches(ctx: typer.Context) -> None:
    """List the patches and their exact text changes; import and check others.

    Without a subcommand: one line a feature with its gate and versions, the plugin's own and those of catalogues from
    outside. Exit status 2 where one of these cannot be used.
    """
    if ctx.invoked_subcommand is not None:
        return
    out = Console(highlight=False)
    selection = select(load_catalog())
    if not out.is_terminal:
        for feature in selection.chosen:
            typer.echo(f"{feature.id}: {feature.title}; gate {feature.gate}; {feature.target} {versions(feature)}")
    else:
        cells = [
            (feature.id, feature.title, feature.gate, f"{feature.target} {versions(feature)}")
            for feature in selection.chosen
        ]
        print_rows(out, "", ("feature", "what", "gate", "versions"), [list(map(Text, row)) for row in cells])
    if selection.troubles:
        say_troubles(selection, Console(stderr=True, highlight=False))
        raise typer.Exit(FAILURE)


@app.command()
def show(feature: Annotated[str, _FEATURE]) -> None:
    """Show what a feature changes and why, where it comes from, and when it can go."""
    found = find_feature(_all(), feature)
    typer.echo(f"{found.id}: {found.title}\n")
    typer.echo(_paragraph(found.what) + "\n")
    typer.echo(f"gate:     {found.gate}")
    typer.echo(f"origin:   {found.origin}")
    typer.echo(f"requires: {', '.join(found.requires) or 'nothing'}")
    typer.echo(f"removal:  {' '.join(found.removal.split())}")
    for gap in found.not_needed:
        typer.echo(f"not needed on {found.target} {gap.versions}: {' '.join(gap.reason.split())}")
    for variant in found.variants:
        typer.echo(f"\non {found.target} {variant.versions}:")
        for file in variant.files:
            typer.echo(f"  {file.path}: {len(file.hunks)} hunk{'' if len(file.hunks) == 1 else 's'} ({file.origin})")


@app.command()
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
    found = find_feature(_all(), feature)
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


app.command("import")(import_change)
app.command()(edit)
app.command()(save)
app.command()(check)


def _all() -> Catalog:
    """The features of all catalogues; what is wrong with one of these may be why the wanted feature is not there."""
    selection = select(load_catalog())
    say_troubles(selection, Console(stderr=True, highlight=False))
    return selection.catalog


def find_feature(catalog: Catalog, name: str) -> Feature:
    """The feature of that id.

    Raises:
        UnknownFeature: there is none; the message lists those that there are.
    """
    for feature in catalog.features:
        if feature.id == name:
            return feature
    known = ", ".join(feature.id for feature in catalog.features) or "none"
    raise UnknownFeature(f"{name}: no such feature; there are: {known}")


def versions(feature: Feature) -> str:
    """The version ranges that a feature has patches for."""
    return " or ".join(str(variant.versions) for variant in feature.variants)


def _paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), width=100)


def _style(line: str) -> str:
    if line.startswith(("---", "+++", "@@")):
        return "bold"
    return {"-": "red", "+": "green"}.get(line[:1], "")
