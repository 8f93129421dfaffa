# SPDX-License-Identifier: Apache-2.0
"""`vllm-hwplugin patches import`: make a feature from a diff, for every version that it fits."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from packaging.version import Version

from vllm_hwplugin.base.versions import SUPPORTED, Versions
from vllm_hwplugin.cli.output import STANDARD_OUTPUT
from vllm_hwplugin.cli.parser import Parser
from vllm_hwplugin.patching.texts import Source

from ..authoring import (
    About,
    Carried,
    Change,
    ChangeError,
    Outcome,
    Written,
    carry_series,
    check_catalogue,
    create,
    merged,
    new_folder,
    put_back,
    ranges,
    read_change,
    read_series,
    settled,
    slug,
    told,
    written,
)
from ..sources import Index, SourceError, open_target
from ._lines import line
from ._waiting import read_all, say_notes


def import_change(arguments: Sequence[str]) -> int:
    """Make features from a diff, for each version it fits."""
    options = _parser().read(arguments)
    changes = series_in(options.file, options.prefix)
    if options.into is not None:
        say_put_back(options.into)
        # Before the index is read: a taken name then costs no time.
        _folders(changes, options)
    index = Index()
    paths = [path for change in changes for path in change.paths]
    sources = read_versions(targets_of(options.versions, options.vllm), paths, index)
    # Whether later versions have the change says where the feature's range ends.
    later = [] if options.versions is None else read_versions(_later(sources), paths, index)
    changes = settled(changes, sources)
    folders = _folders(changes, options)
    columns = carry_series(changes, [*sources, *later], together=options.one, context=options.context)
    is_whole, required = True, list[str]()
    for change, folder, carried in zip(_units(changes, options.one), folders, columns, strict=True):
        upstream = [result.version for result in carried if result.outcome is Outcome.UPSTREAM]
        is_whole = _import_one(change, folder, carried[: len(sources)], upstream, required, options) and is_whole
        if folder is not None and folder.is_dir():
            required = [folder.name]
    say_notes(index.notes)
    return 0 if is_whole else 1


def _import_one(
    change: Change,
    folder: Path | None,
    carried: Sequence[Carried],
    upstream: Sequence[str],
    required: Sequence[str],
    options: Namespace,
) -> bool:
    """Report and write a change; return whether each version has it then.

    Args:
        upstream: The versions that have the change, also if `carried` lacks them.
    """
    good = [result for result in carried if result.outcome is Outcome.APPLIES]
    made = written(good, context=options.context)
    line(f"{change.title or 'a change'} ({change.origin})")
    if folder is None and not change.title and options.id is None:
        line("to write it, name the feature with --id: the diff has no commit subject")
    if change.assumed:
        line(f"paths begin inside the package: {change.assumed} was put in front of them")
    for path in dict.fromkeys(change.paths):
        line(f"  {path}")
    for left in change.left_out:
        line(f"left out: {left.path}: {left.reason}" + (f"; {left.way_out}" if left.way_out else ""))
    report_outcomes(carried, verbose=options.verbose)
    if folder is not None and good:
        create(folder, about_of(change, folder.name, options.gate, upstream), made, upstream, required)
    report_written(folder, made)
    if good and upstream:
        line(f"vLLM has the change from {upstream[0]} on: [[not_needed]] {ranges(upstream, goes_on=True)}")
    refused = [result.version for result in carried if result.outcome is Outcome.CONFLICT]
    if refused and folder is not None:
        more = "" if good else f" --change {options.file}"
        line(f"next: vllm-hwplugin patches edit {folder} --vllm {refused[-1]}{more}")
    return not refused and not any(left.way_out for left in change.left_out)


def _later(sources: Sequence[Source]) -> list[str]:
    """Return the supported versions that are newer than all sources."""
    last = max(Version(source.version) for source in sources)
    return [version for version in SUPPORTED if Version(version) > last]


def _units(changes: Sequence[Change], together: bool) -> Sequence[Change]:
    """Return the changes that become features."""
    return [merged(changes)] if together else changes


def _folders(changes: Sequence[Change], options: Namespace) -> list[Path | None]:
    """Return a folder per feature; None: nothing is to be written."""
    units = _units(changes, options.one)
    if options.into is None:
        return [None] * len(units)
    if len(units) > 1 and (options.id is not None or options.gate is not None):
        raise ChangeError(f"{options.file}: {len(units)} changes, and `--id` and `--gate` name one feature; add --one")
    check_catalogue(options.into, gate=options.gate)
    names = [options.id or _name(change) for change in units]
    if taken := {name for name in names if names.count(name) > 1}:
        raise ChangeError(f"{options.file}: two changes have the name {min(taken)}; make one feature of all with --one")
    return [new_folder(options.into, name) for name in names]


def _parser() -> Parser:
    parser = Parser(
        "patches import",
        "Make a feature from a diff, such as an upstream pull request's, for every version that it fits exactly. A "
        "series of mails becomes a feature for each, which requires the one before it."
        "\n\nExit status: 0 each version gets or has the change, 1 a version does not, or a file was left out, "
        "2 could not tell.",
        ["patches import fix.diff", "patches import fix.diff --into patches --versions '>=0.30,<0.34'"],
    )
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="Output of `git diff` or `git format-patch`; -: standard input."
    )
    add_versions(parser)
    reading = parser.add_argument_group("the diff")
    reading.add_argument(
        "--prefix",
        metavar="FOLDER",
        default="",
        help="The folder in which the diff's paths begin, such as vllm/v1. Default: as the diff has them, or vllm/.",
    )
    reading.add_argument(
        "--context",
        metavar="LINES",
        type=int,
        choices=(1, 2, 3),
        default=3,
        help="Lines of context that a hunk needs at least; with 1 or 2 it may fit more versions. Default: 3.",
    )
    reading.add_argument("--one", action="store_true", help="Make one feature of a series.")
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
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="Show what does not fit on every version, not only on the newest."
    )
    return parser


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


def report_outcomes(carried: Sequence[Carried], *, verbose: bool = True) -> None:
    """Print a line per version, then the hunks that do not fit.

    Equal hunks are shown once. If not `verbose`, only the hunks of the newest version are shown.
    """
    words = {Outcome.UPSTREAM: "upstream", Outcome.CONFLICT: "does not fit"}
    for result in carried:
        fits = f"moved by {result.offset} line{'' if result.offset == 1 else 's'}" if result.offset else "exact"
        because = f": {result.reason}" if result.reason else ""
        line(f"vllm {result.version}: {words.get(result.outcome, fits)}{because}")
    with_hunks = [result for result in carried if result.rejected]
    shown: dict[tuple[str, ...], str] = {}
    for result in with_hunks if verbose else with_hunks[-1:]:
        line(f"hunks that do not fit {result.version}:")
        for rejected in result.rejected:
            heading, *rest = told(rejected)
            before = shown.setdefault((heading.partition(": ")[0], *rest), result.version)
            line(f"  {heading}" + (f" (shown under {before})" if before != result.version else ""))
            for text in rest if before == result.version else ():
                line(f"  {text}")
    if len(with_hunks) > 1 and not verbose:
        line(f"-v shows the hunks that do not fit {', '.join(result.version for result in with_hunks[:-1])}")


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
    """Read a file's only change; raises as `series_in`."""
    return read_change(*_data(file))


def series_in(file: Path, prefix: str = "") -> tuple[Change, ...]:
    """Read the changes of a file; `-`: standard input.

    Raises:
        ChangeError: The file cannot be read, or holds no change.
    """
    return read_series(*_data(file), prefix.rstrip("/") + "/" if prefix else "")


def _data(file: Path) -> tuple[bytes, str]:
    try:
        if file == STANDARD_OUTPUT:
            return sys.stdin.buffer.read(), "standard input"
        return file.read_bytes(), str(file)
    except OSError as error:
        raise ChangeError(f"{file}: cannot be read ({error.strerror}); name a diff, or - for standard input") from error
