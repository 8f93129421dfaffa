# SPDX-License-Identifier: Apache-2.0
"""`vllm-hwplugin patches import`: somebody's diff as a feature, for every version that it fits."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from packaging.version import Version

from vllm_hwplugin.cli.output import STANDARD_OUTPUT
from vllm_hwplugin.cli.parser import Parser
from vllm_hwplugin.patching import SUPPORTED, Source
from vllm_hwplugin.versions import Versions

from ..authoring import (
    About,
    Carried,
    Change,
    ChangeError,
    Outcome,
    Written,
    carry_all,
    check_catalogue,
    create,
    new_folder,
    put_back,
    ranges,
    read_change,
    slug,
    told,
    written,
)
from ..sources import Index, SourceError, open_target
from ._lines import line
from ._waiting import read_all, say_notes


def import_change(arguments: Sequence[str]) -> int:
    """Make a feature of a diff, such as an upstream pull request's, for every version that it fits exactly."""
    parser = Parser(
        "patches import",
        "Make a feature of a diff, such as an upstream pull request's, for every version that it fits exactly."
        "\n\nExit status: 0 each version gets the change or has it, 1 one does not or a part was left out, "
        "2 could not tell.",
        ["patches import fix.diff", "patches import fix.diff --into patches --versions '>=0.30,<0.34'"],
    )
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="What `git diff` or `git format-patch` wrote; -: standard input."
    )
    add_versions(parser)
    feature = parser.add_argument_group("the feature")
    feature.add_argument(
        "--into",
        metavar="CATALOGUE",
        type=Path,
        help="The folder of patches to write the feature to; a new one is made. Default: nothing is written.",
    )
    feature.add_argument("--id", metavar="ID", help="Its name. Default: made of the commit's subject.")
    feature.add_argument(
        "--gate", metavar="NAME", help="The variable that switches it. Default: made of the names of both."
    )
    options = parser.read(arguments)
    change = change_in(options.file)
    folder = None
    if options.into is not None:
        say_put_back(options.into)
        # Before anything is read from an index: a name that is taken costs nothing then.
        check_catalogue(options.into, gate=options.gate)
        folder = new_folder(options.into, options.id or _name(change))
    index = Index()
    sources = read_versions(targets_of(options.versions, options.vllm), change.paths, index)
    carried = carry_all(change, sources)
    good = [item for item in carried if item.outcome is Outcome.APPLIES]
    made = written(good)
    line(f"{change.title or 'a change'} ({change.origin})")
    if folder is None and not change.title and options.id is None:
        line("to write it, name the feature with --id: the diff has no commit's subject")
    for path in change.paths:
        line(f"  {path}")
    for left in change.left_out:
        line(f"left out: {left.path}: {left.what}" + (f"; {left.way_out}" if left.way_out else ""))
    report_outcomes(carried)
    say_notes(index.notes)
    if folder is not None and good:
        upstream = [item.version for item in carried if item.outcome is Outcome.UPSTREAM]
        create(folder, about_of(change, folder.name, options.gate, upstream), made, upstream)
    report_written(folder, made)
    refused = [item.version for item in carried if item.outcome is Outcome.CONFLICT]
    if refused and folder is not None:
        more = "" if good else f" --change {options.file}"
        line(f"next: vllm-hwplugin patches edit {folder} --vllm {refused[-1]}{more}")
    return 1 if refused or any(item.way_out for item in change.left_out) else 0


def add_versions(parser: Parser) -> argparse._ArgumentGroup:
    """Give a command the options that `targets_of` takes."""
    versions = parser.add_argument_group("versions")
    versions.add_argument(
        "--versions",
        metavar="RANGE",
        help="The versions of vLLM, such as '>=0.24,<0.34', of those that are supported.",
    )
    versions.add_argument(
        "--vllm",
        metavar="TARGET",
        action="append",
        default=[],
        help="Also this wheel file, folder or version, as `drift` takes them; repeat for several.",
    )
    return versions


def targets_of(versions: str | None, targets: Iterable[str] = ()) -> list[str]:
    """The vLLMs that a command is for; all supported ones where neither a range nor a target is given.

    Raises:
        SourceError: the range is none, or holds no supported version.
    """
    named = list(dict.fromkeys(targets))
    if versions is None:
        return named or list(SUPPORTED)
    try:
        chosen = Versions(versions).supported()
    except ValueError as error:
        raise SourceError(f"--versions: {versions!r} is no range of versions, such as '>=0.24,<0.34'") from error
    if not chosen:
        raise SourceError(
            f"--versions: {versions!r} holds no supported version; those are {SUPPORTED[0]} to {SUPPORTED[-1]}"
        )
    return [*chosen, *(target for target in named if target not in chosen)]


def read_versions(targets: Sequence[str], paths: Sequence[str], index: Index) -> list[Source]:
    """The vLLMs by their versions, oldest first, these files of each read already, several at a time.

    Raises:
        SourceError: one cannot be read, or two are the same version.
    """

    def read(target: str) -> Source:
        source = open_target(target, index)
        # So that not one wheel after the other is asked for them.
        for path in paths:
            source.read(path)
        return source

    sources = read_all(read, targets)
    sources.sort(key=lambda source: Version(source.version))
    for one, other in pairwise(sources):
        if Version(one.version).public == Version(other.version).public:
            raise SourceError(f"{one.label} and {other.label} are the same version of vLLM; name one of them")
    return sources


def say_put_back(catalogue: Path) -> None:
    """Put features back that a killed command had put aside, and say so."""
    for name in put_back(catalogue):
        line(f"{catalogue / name}: put back; a command was stopped while it wrote it")


def about_of(change: Change, name: str, gate: str | None, upstream: Iterable[str] = ()) -> About:
    """The texts of a feature, as far as a change tells them."""
    title = change.title or name
    since = f" (those of {text} do)" if (text := ranges(upstream)) else ""
    removal = f"When every vLLM in use has the change{since}."
    return About(title, change.message or title, change.origin, removal, gate)


def report_outcomes(carried: Iterable[Carried]) -> None:
    """A line for each version, and the hunks that do not fit. What two versions have in common is shown once."""
    words = {Outcome.UPSTREAM: "upstream", Outcome.CONFLICT: "does not fit"}
    shown: dict[tuple[str, ...], str] = {}
    for item in carried:
        fits = f"moved by {item.offset} line{'' if item.offset == 1 else 's'}" if item.offset else "exact"
        because = f": {item.reason}" if item.outcome is Outcome.CONFLICT else ""
        line(f"vllm {item.version}: {words.get(item.outcome, fits)}{because}")
        for rejected in item.rejected:
            heading, *rest = told(rejected)
            before = shown.setdefault((heading.partition(": ")[0], *rest), item.version)
            line(f"  {heading}" + (f" (shown under {before})" if before != item.version else ""))
            for text in rest if before == item.version else ():
                line(f"  {text}")


def report_written(folder: Path | None, made: Written) -> None:
    """What was written, or would be."""
    if not made.diffs:
        line("it fits no version, so there is nothing to write")
        return
    line(f"{'would be' if folder is None else folder}: for {made.versions}")
    for name, diffs in made.diffs.items():
        for diff in diffs:
            line(f"  {name} ({diff.path}):")
            for hunk in diff.hunks:
                line(f"    line {hunk.source_start}" + (f", on {hunk.versions}" if hunk.versions else ""))
    if folder is None:
        line("nothing is written; --into CATALOGUE does that")


def _name(change: Change) -> str:
    # Long enough for a subject, short enough for a variable's name.
    words = slug(change.title).split("-")
    while len("-".join(words)) > 40:
        words.pop()
    if not any(words):
        raise ChangeError("the diff has no commit's subject to make a name of; name the feature with --id")
    return "-".join(words)


def change_in(file: Path) -> Change:
    """The change that a file holds; `-` is standard input.

    Raises:
        ChangeError: it cannot be read, or holds none.
    """
    try:
        if file == STANDARD_OUTPUT:
            return read_change(sys.stdin.buffer.read(), "standard input")
        return read_change(file.read_bytes(), str(file))
    except OSError as error:
        raise ChangeError(f"{file}: can't be read ({error.strerror}); name a diff, or - for standard input") from error
