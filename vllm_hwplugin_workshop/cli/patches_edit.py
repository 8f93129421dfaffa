# SPDX-License-Identifier: Apache-2.0
"""`vllm-hwplugin patches edit` and `save`: a feature's variant made by hand, for a version that no diff of it fits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from packaging.version import Version
from rich.console import Console

from vllm_hwplugin.patching import default_folder, load_catalog, outside

from ..authoring import (
    REJECTED,
    About,
    Carried,
    Outcome,
    WorkTree,
    WorkTreeError,
    add_variants,
    carry_again,
    change_of,
    check_catalogue,
    create,
    make_variants,
    new_folder,
    open_tree,
    read_change,
    read_feature,
    read_tree,
    refuse_overtaken,
)
from ..sources import Index, open_installed, open_target
from .patches_import import about_of, line, read_versions, report_outcomes, report_variants, targets_of

_FEATURE = typer.Argument(help="A feature's folder, or its id as `patches` lists it; a new folder with --change.")


def edit(
    feature: Annotated[str, _FEATURE],
    vllm: Annotated[
        str | None,
        typer.Option(
            "--vllm",
            metavar="TARGET",
            help="A wheel file, a folder or a version, as `drift` takes them. Default: the installed vLLM.",
            show_default=False,
        ),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The work tree. Default: the feature's name and the version, here."),
    ] = None,
    change_file: Annotated[
        Path | None,
        typer.Option(
            "--change", metavar="FILE", help="Begin with this diff instead of the feature's own.", show_default=False
        ),
    ] = None,
    files: Annotated[
        list[str] | None,
        typer.Option("--file", metavar="PATH", help="Also this file of vLLM (vllm/...); can be given several times."),
    ] = None,
    gate: Annotated[str | None, typer.Option(help="A new feature's variable. Default: made of its names.")] = None,
) -> None:
    """Open a work tree: the files of one vLLM with the feature applied, as far as it fits, to be edited and saved.

    Exit status: 0 all of it fits, 1 a part was rejected and is shown, 2 could not tell.
    """
    home = _folder_of(feature)
    about = None
    index = Index()
    source = open_installed() if vllm is None else open_target(vllm, index)
    if change_file is not None:
        change = read_change(_bytes(change_file), str(change_file))
        if not home.exists():
            check_catalogue(home.parent, gate=gate)
            about = about_of(change, new_folder(home.parent, home.name).name, gate=gate)
    else:
        change = change_of(read_feature(home), source)
    folder = into if into is not None else Path(f"{home.resolve().name}-{source.version}")
    out = Console(highlight=False)
    carried = open_tree(folder, home, source, change, files or [], about)
    report_outcomes([carried], out)
    for note in index.notes:
        typer.echo(f"note: {note}", err=True)
    if carried.rejected:
        line(out, f"the rejected hunks are in {folder / REJECTED}; remove it when each of them is made")
    line(out, f"edit the files below {folder / 'vllm'}, then: vllm-hwplugin patches save {folder}")
    raise typer.Exit(1 if carried.outcome is Outcome.CONFLICT else 0)


def save(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The work tree.", show_default=False)] = Path(),
    versions: Annotated[
        str | None,
        typer.Option(
            "--versions",
            metavar="RANGE",
            help="Also for these supported versions, where it fits exactly. Default: the work tree's alone.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make the feature's variant of what was edited in a work tree.

    Exit status: 0 saved, 1 saved, but not for all the versions that were asked for, 2 not saved.
    """
    tree, made = read_tree(folder)
    if tree.about is None and not tree.feature.is_dir():
        raise WorkTreeError(f"{tree.feature}: the feature is gone; open the tree anew, with --change")
    out = Console(highlight=False)
    carried = [made, *_others(tree, made, versions)]
    report_outcomes(carried[1:], out)
    good = [item for item in carried if item.outcome is Outcome.APPLIES]
    refuse_overtaken(tree, [item.version for item in good])
    _write(tree, good, out)
    raise typer.Exit(1 if any(item.outcome is Outcome.CONFLICT for item in carried) else 0)


def _folder_of(feature: str) -> Path:
    """The folder of a feature that is named by its path, or by its id in a catalogue that is in use."""
    path = Path(feature)
    if path.exists():
        return path
    own = load_catalog()
    if own.feature(feature) is not None:
        return default_folder() / feature
    for each in outside.find_outside(os.environ, own).catalogues:
        if any(item.id == feature for item in each.features):
            return each.manifest.folder / feature.rpartition("/")[2]
    return path


def _others(tree: WorkTree, made: Carried, versions: str | None) -> list[Carried]:
    if versions is None:
        return []
    own = Version(made.version).public
    wanted = [version for version in targets_of(versions, None) if Version(version).public != own]
    return carry_again(made, read_versions(wanted, sorted(made.files), Index()))


def _write(tree: WorkTree, good: list[Carried], out: Console) -> None:
    if tree.about is not None and not tree.feature.exists():
        variants, diffs = make_variants(good)
        create(tree.feature, About(*tree.about), variants, diffs)
        report_variants(tree.feature, variants, diffs, out)
        return
    variants, diffs = make_variants(good, numbered=True)
    given, unused = add_variants(tree.feature, variants, diffs)
    names = {
        name: diffs[old]
        for one, other in zip(variants, given, strict=True)
        for old, name in zip(one.diffs, other.diffs, strict=True)
    }
    report_variants(tree.feature, given, names, out)
    for name in unused:
        line(out, f"no variant uses {tree.feature / name} any more; remove it")


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise WorkTreeError(f"{file}: can't be read ({error.strerror}); name a diff") from error
