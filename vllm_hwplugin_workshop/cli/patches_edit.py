# SPDX-License-Identifier: Apache-2.0
"""`vllm-hwplugin patches edit` and `save`: edit a feature by hand, for a version that its hunks do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

from vllm_hwplugin.base import gates
from vllm_hwplugin.cli.parser import Parser
from vllm_hwplugin.patching import load_catalogue, outside
from vllm_hwplugin.patching.texts import default_folder

from ..authoring import (
    REJECTED,
    ChangeError,
    Outcome,
    carry_again,
    change_of,
    check_catalogue,
    create,
    extend,
    new_folder,
    open_tree,
    read_feature,
    read_tree,
    settled,
    written,
)
from ..sources import Index, open_installed, open_target
from ._lines import line
from ._waiting import say_notes
from .patches_import import (
    about_of,
    change_in,
    read_versions,
    report_outcomes,
    report_written,
    say_put_back,
    targets_of,
)


def edit(arguments: Sequence[str]) -> int:
    """Open a work tree of one vLLM with the hunks that fit."""
    parser = Parser(
        "patches edit",
        "Open a work tree: the files of one vLLM with the feature's hunks that fit, to edit and save."
        "\n\nExit status: 0 all hunks fit, 1 some were rejected and are shown, 2 could not tell.",
        ["patches edit draft-full-graph --vllm 0.33.0", "patches edit patches/new --change fix.diff"],
    )
    parser.add_argument(
        "feature",
        metavar="FEATURE",
        help="A feature's folder, or its id as `patches` lists it; with --change also a new folder.",
    )
    tree = parser.add_argument_group("the work tree")
    tree.add_argument(
        "--vllm",
        metavar="TARGET",
        help="A wheel file, a folder or a version, as for `drift`. Default: the installed vLLM.",
    )
    tree.add_argument(
        "--into", metavar="FOLDER", type=Path, help="The work tree's folder. Default: FEATURE-VERSION, here."
    )
    tree.add_argument(
        "--file",
        metavar="PATH",
        action="append",
        default=[],
        help="Also this file of vLLM (vllm/...); can be repeated.",
    )
    change_of_another = parser.add_argument_group("another change")
    change_of_another.add_argument(
        "--change", metavar="FILE", type=Path, help="Begin with this diff instead of the feature's hunks."
    )
    change_of_another.add_argument(
        "--gate", metavar="NAME", help="A new feature's environment variable. Default: from its name."
    )
    options = parser.read(arguments)
    home = _folder_of(options.feature)
    about = None
    index = Index()
    source = open_installed() if options.vllm is None else open_target(options.vllm, index)
    if options.change is not None:
        (change,) = settled([change_in(options.change)], [source])
        if not home.exists():
            check_catalogue(home.parent, gate=options.gate)
            about = about_of(change, new_folder(home.parent, home.name).name, options.gate)
    else:
        change = change_of(read_feature(home), source)
    folder = options.into or Path(f"{home.resolve().name}-{source.version}")
    carried = open_tree(folder, home, source, change, options.file, about)
    report_outcomes([carried])
    say_notes(index.notes)
    if carried.rejected:
        line(f"the rejected hunks are in {folder / REJECTED}; remove it when they are made")
    line(f"edit the files below {folder / 'vllm'}, then: vllm-hwplugin patches save {folder}")
    return 1 if carried.outcome is Outcome.CONFLICT else 0


def save(arguments: Sequence[str]) -> int:
    """Save the edits of a work tree in the feature."""
    parser = Parser(
        "patches save",
        "Save the edits of a work tree in the feature."
        "\n\nExit status: 0 saved, 1 saved, but not for all requested versions, 2 not saved.",
        ["patches save draft-full-graph-0.33.0", "patches save work --versions '>=0.32,<0.34'"],
    )
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, nargs="?", default=Path(), help="The work tree. Default: this folder."
    )
    versions = parser.add_argument_group("versions")
    versions.add_argument(
        "--versions",
        metavar="RANGE",
        help="Also for these supported versions if it fits exactly. Default: only the work tree's version.",
    )
    options = parser.read(arguments)
    tree, first = read_tree(options.folder)
    say_put_back(tree.feature.parent)
    if tree.about is None and not tree.feature.is_dir():
        raise ChangeError(f"{tree.feature}: the feature is gone; open the tree again, with --change")
    carried = [first]
    if options.versions is not None:
        own = Version(first.version).public
        wanted = [version for version in targets_of(options.versions) if Version(version).public != own]
        carried += carry_again(first, read_versions(wanted, sorted(first.files), Index()))
    report_outcomes(carried[1:])
    good = [result for result in carried if result.outcome is Outcome.APPLIES]
    if tree.about is not None and not tree.feature.exists():
        made = written(good)
        create(tree.feature, tree.about, made)
    else:
        made = extend(tree.feature, good)
    report_written(tree.feature, made)
    return 1 if any(result.outcome is Outcome.CONFLICT for result in carried) else 0


def _folder_of(feature: str) -> Path:
    """Return a feature's folder, named by its path or its id."""
    path = Path(feature)
    if not path.exists():
        say_put_back(path.parent)
    if path.exists():
        return path
    own = load_catalogue()
    if own.feature(feature) is not None:
        return default_folder() / feature
    for catalogue in outside.find_outside(gates.read(outside.FOLDERS).names, own).catalogues:
        if any(known.id == feature for known in catalogue.features):
            return catalogue.manifest.folder / feature.rpartition("/")[2]
    return path
