# SPDX-License-Identifier: Apache-2.0
"""`vllm-hwplugin patches`: what the plugin changes in vLLM, for reading and review."""

from __future__ import annotations

import importlib
import textwrap
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ..patching import Feature, load_catalog
from ._app import FAILURE
from .catalogues import all_features, find_feature, say_troubles, select
from .tables import print_rows

app = typer.Typer(invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False)

_FEATURE = typer.Argument(metavar="FEATURE", help="The id of a feature, as `vllm-hwplugin patches` lists them.")


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
    found = find_feature(all_features(), feature)
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


# What the workshop has of this command: a name, the module and its function.
for _name, (_module, _function) in {
    "diff": ("patches_diff", "diff"),
    "import": ("patches_import", "import_change"),
    "edit": ("patches_edit", "edit"),
    "save": ("patches_edit", "save"),
    "check": ("patches_check", "check"),
}.items():
    app.command(_name)(getattr(importlib.import_module(f"vllm_hwplugin_workshop.cli.{_module}"), _function))


def versions(feature: Feature) -> str:
    """The version ranges that a feature has patches for."""
    return " or ".join(str(variant.versions) for variant in feature.variants)


def _paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), width=100)
