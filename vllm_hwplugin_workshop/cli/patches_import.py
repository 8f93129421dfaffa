# SPDX-License-Identifier: Apache-2.0
"""`vllm-hwplugin patches import`: make a feature from a diff, for every version that it fits."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from packaging.version import Version

from vllm_hwplugin.cli.output import STANDARD_OUTPUT
from vllm_hwplugin.cli.parser import Parser
from vllm_hwplugin.patching.texts import Source
from vllm_hwplugin.versions import SUPPORTED, Versions

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
    """Make a feature from a diff, for each version it fits."""
    parser = Parser(
        "patches import",
        "Make a feature from a diff, such as an upstream pull request's, for every version that it fits exactly."
        "\n\nExit status: 0 each version gets or has the change, 1 a version does not, or a file was left out, "
        "2 could not tell.",
        ["patches import fix.diff", "patches import fix.diff --into patches --versions '>=0.30,<0.34'"],
    )
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="Output of `git diff` or `git format-patch`; -: standard input."
    )
    add_versions(parser)
    feature = parser.add_argument_group("the feature")
    feature.add_argument(
        "--into",
        metavar="CATALOGUE",
        type=Path,
        help="The folder of patches to write the feature to, created if needed. Default: only report.",
    )
    feature.add_argument("--id", metavar="ID", help="The feature's name. Default: from the commit's subject.")
    feature.add_argument(
        "--gate", metavar="NAME", help="Its environment variable. Default: from the names of catalogue and feature."
    )
    options = parser.read(arguments)
    change = change_in(options.file)
    folder = None
    if options.into is not None:
        say_put_back(options.into)
        # Before the index is read: a taken name then costs no time.
        check_catalogue(options.into, gate=options.gate)
        folder = new_folder(options.into, options.id or _name(change))
    index = Index()
    sources = read_versions(targets_of(options.versions, options.vllm), change.paths, index)
    carried = carry_all(change, sources)
    good = [result for result in carried if result.outcome is Outcome.APPLIES]
    made = written(good)
    line(f"{change.title or 'a change'} ({change.origin})")
    if folder is None and not change.title and options.id is None:
        line("to write it, name the feature with --id: the diff has no commit subject")
    for path in change.paths:
        line(f"  {path}")
    for left in change.left_out:
        line(f"left out: {left.path}: {left.what}" + (f"; {left.way_out}" if left.way_out else ""))
    report_outcomes(carried)
    say_notes(index.notes)
    if folder is not None and good:
        upstream = [result.version for result in carried if result.outcome is Outcome.UPSTREAM]
        create(folder, about_of(change, folder.name, options.gate, upstream), made, upstream)
    report_written(folder, made)
    refused = [result.version for result in carried if result.outcome is Outcome.CONFLICT]
    if refused and folder is not None:
        more = "" if good else f" --change {options.file}"
        line(f"next: vllm-hwplugin patches edit {folder} --vllm {refused[-1]}{more}")
    return 1 if refused or any(left.way_out for left in change.left_out) else 0


def add_versions(parser: Parser) -> argparse._ArgumentGroup:
    """Give a command the options for `targets_of`."""
    versions = parser.add_argument_group("versions")
    versions.add_argument(
        "--versions",
        metavar="RANGE",
        help="Supported versions of vLLM, such as '>=0.24,<0.34'. Default: all.",
    )
    versions.add_argument(
        "--vllm",
        metavar="TARGET",
        action="append",
        default=[],
        help="Also this wheel file, folder or version, as for `drift`; can be repeated.",
    )
    return versions


def targets_of(versions: str | None, targets: Iterable[str] = ()) -> list[str]:
    """Return a command's targets; by default all supported versions.

    Raises:
        SourceError: The range is invalid, or holds no supported version.
    """
    named = list(dict.fromkeys(targets))
    if versions is None:
        return named or list(SUPPORTED)
    try:
        chosen = Versions(versions).supported()
    except ValueError as error:
        raise SourceError(
            f"--versions: {versions!r} is not a range of versions; expected e.g. '>=0.24,<0.34'"
        ) from error
    if not chosen:
        raise SourceError(
            f"--versions: {versions!r} holds no supported version; expected some of {SUPPORTED[0]} to {SUPPORTED[-1]}"
        )
    return [*chosen, *(target for target in named if target not in chosen)]


def read_versions(targets: Sequence[str], paths: Sequence[str], index: Index) -> list[Source]:
    """Read these files of each target concurrently; sort by version.

    Raises:
        SourceError: A target cannot be read, or two are the same version.
    """

    def read(target: str) -> Source:
        source = open_target(target, index)
        # Here, in the threads: later reads would go through the wheels one by one.
        for path in paths:
            source.read(path)
        return source

    sources = read_all(read, targets)
    sources.sort(key=lambda source: Version(source.version))
    for first, second in pairwise(sources):
        if Version(first.version).public == Version(second.version).public:
            raise SourceError(f"{first.label} and {second.label} are the same version of vLLM; name only one of them")
    return sources


def say_put_back(catalogue: Path) -> None:
    """Restore features that were moved aside, and print their names."""
    for name in put_back(catalogue):
        line(f"{catalogue / name}: restored; a command was stopped while it wrote this feature")


def about_of(change: Change, name: str, gate: str | None, upstream: Iterable[str] = ()) -> About:
    """Return the texts of a feature, from its change."""
    title = change.title or name
    since = f" (versions {text} do)" if (text := ranges(upstream)) else ""
    removal = f"When every vLLM that you run has the change{since}."
    return About(title, change.message or title, change.origin, removal, gate)


def report_outcomes(carried: Iterable[Carried]) -> None:
    """Print a line per version, and the hunks that do not fit.

    Equal hunks are shown once.
    """
    words = {Outcome.UPSTREAM: "upstream", Outcome.CONFLICT: "does not fit"}
    shown: dict[tuple[str, ...], str] = {}
    for result in carried:
        fits = f"moved by {result.offset} line{'' if result.offset == 1 else 's'}" if result.offset else "exact"
        because = f": {result.reason}" if result.outcome is Outcome.CONFLICT else ""
        line(f"vllm {result.version}: {words.get(result.outcome, fits)}{because}")
        for rejected in result.rejected:
            heading, *rest = told(rejected)
            before = shown.setdefault((heading.partition(": ")[0], *rest), result.version)
            line(f"  {heading}" + (f" (shown under {before})" if before != result.version else ""))
            for text in rest if before == result.version else ():
                line(f"  {text}")


def report_written(folder: Path | None, made: Written) -> None:
    """Print what was written, or would be."""
    if not made.diffs:
        line("the change fits no version: nothing to write")
        return
    line(f"{'would be' if folder is None else folder}: for {made.versions}")
    for name, diffs in made.diffs.items():
        for diff in diffs:
            line(f"  {name} ({diff.path}):")
            for hunk in diff.hunks:
                line(f"    line {hunk.source_start}" + (f", on {hunk.versions}" if hunk.versions else ""))
    if folder is None:
        line("nothing written; to write the feature, add --into CATALOGUE")


def _name(change: Change) -> str:
    # Short enough for a variable's name.
    words = slug(change.title).split("-")
    while len("-".join(words)) > 40:
        words.pop()
    if not any(words):
        raise ChangeError("the diff has no commit subject to derive a name from; name the feature with --id")
    return "-".join(words)


def change_in(file: Path) -> Change:
    """Read the change of a file; `-`: standard input.

    Raises:
        ChangeError: The file cannot be read, or holds no change.
    """
    try:
        if file == STANDARD_OUTPUT:
            return read_change(sys.stdin.buffer.read(), "standard input")
        return read_change(file.read_bytes(), str(file))
    except OSError as error:
        raise ChangeError(f"{file}: cannot be read ({error.strerror}); name a diff, or - for standard input") from error
