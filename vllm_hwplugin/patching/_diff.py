# SPDX-License-Identifier: Apache-2.0
"""A strict reader of unified diffs.

General parsers ignore what makes a later match inexact: lines that a hunk's header does not count, hunks out of order
or without context, renamed, new and deleted files. Here each is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from ..base.versions import Versions
from ._errors import DiffError
from ._model import VLLM, FileDiff, Hunk, target_name

# After the second `@@` comes a hunk's range of versions, or git's heading, which begins with a letter.
_HEADER: Final = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@(?: *([<>=!~|\d].*))?")


def parse_diff(text: str, origin: str, distribution: str = VLLM) -> tuple[FileDiff, ...]:
    """Read the diff of one or more files.

    Args:
        text: a unified diff with paths `a/vllm/...` and `b/vllm/...`; a hunk's versions may follow its `@@`.
        origin: the diff's name in messages.
        distribution: whose files it changes; paths of any but `VLLM` are relative to site-packages.

    Raises:
        DiffError: malformed, or changes more than existing files of that distribution.
    """
    files = tuple(
        file_diff(_path(source, target, origin, distribution), hunks, origin)
        for source, target, hunks in read_sections(text, origin, ranges=True)
    )
    if not files:
        raise DiffError(f"{origin}: no '--- a/... +++ b/...' header found; write it with `diff -u` or `git diff`")
    return files


def file_diff(path: str, hunks: Sequence[Hunk], origin: str) -> FileDiff:
    """Return a file's diff; raise DiffError without hunks or for unmatchable hunks."""
    if not hunks:
        raise DiffError(f"{origin}: no hunks for {path}; remove the file or write the diff again")
    for hunk in hunks:
        _refuse_unmatchable(hunk, f"{origin}: hunk {hunk.number} of {path}")
    for hunk, following in pairwise(hunks):
        # Hunks for other versions state other lines.
        end = hunk.source_start + hunk.source_length
        if hunk.versions == following.versions and following.source_start < end:
            raise DiffError(
                f"{origin}: hunk {following.number} of {path} starts at line {following.source_start}, inside or "
                f"before hunk {hunk.number}; write the diff again"
            )
    return FileDiff(path, tuple(hunks), origin)


def read_sections(text: str, origin: str, *, ranges: bool = False) -> Iterator[tuple[str, str, list[Hunk]]]:
    """Yield a diff's files with both paths and hunks, or raise DiffError.

    A new file's first path and a deleted file's second path is `/dev/null`. A file that is only renamed, has a new mode
    or is not text has no hunks. With `ranges`, a hunk's versions may follow its `@@`.
    """
    if text and not text.endswith("\n"):
        raise DiffError(f"{origin}: the last line has no newline, so the file may be cut short; write the diff again")
    lines = text.split("\n")[:-1]
    source = target = ""
    hunks: list[Hunk] = []
    of_git = False
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if line.startswith("diff --git "):
            if source:
                yield source, target, hunks
            # Only this line has the paths if the file is only renamed or has a new mode.
            source, _, target = line.removeprefix("diff --git ").partition(" ")
            hunks, of_git = [], True
        elif line.startswith("--- ") and number < len(lines) and lines[number].startswith("+++ "):
            if source and not of_git:
                yield source, target, hunks
            hunks, of_git = [], False
            # `diff -u` writes a tab and the file's time after the path.
            source = line.removeprefix("--- ").partition("\t")[0]
            target = lines[number].removeprefix("+++ ").partition("\t")[0]
            number += 1
        elif header := _HEADER.match(line):
            if not source:
                raise _not_a_diff(origin, f"Unexpected hunk found: {line}")
            of_git = False
            where = f"{origin}: hunk {len(hunks) + 1} of {source}"
            versions = _versions(header[5], where) if ranges and header[5] else None
            body, number = _body(lines, number, header, where, origin)
            hunks.append(Hunk(len(hunks) + 1, *_counts(header), tuple(body), versions))
        elif line.startswith((" ", "+", "-")):
            raise DiffError(
                f"{origin}: line {number} ({line[:40]!r}) belongs to no hunk: the '@@' header above it is malformed or "
                "counts too few lines; write the diff again"
            )
    if source:
        yield source, target, hunks


def _versions(text: str, where: str) -> Versions:
    try:
        return Versions(text)
    except ValueError as error:
        raise DiffError(
            f"{where}: {text!r} behind its '@@' is no range of versions, such as '>=0.24,<0.26' or '<0.22 || >=0.24'"
        ) from error


def _counts(header: re.Match[str]) -> tuple[int, int, int, int]:
    start, length, target_start, target_length, _ = header.groups(default="1")
    return int(start), int(length), int(target_start), int(target_length)


def _body(
    lines: list[str], number: int, header: re.Match[str], where: str, origin: str
) -> tuple[list[tuple[str, str]], int]:
    """Return the lines of the hunk at `number`, and the next number."""
    _, before, _, after = _counts(header)
    counted = f"{where}: the header counts {before} and {after} lines, the hunk has"
    body: list[tuple[str, str]] = []
    while True:
        line = lines[number] if number < len(lines) else None
        if line is not None and line.startswith("\\"):
            if not body:
                raise DiffError(f"{where}: starts with '\\ No newline at end of file'; write the diff again")
            sign, text = body[-1]
            body[-1] = (sign, text.removesuffix("\n"))
            number += 1
            continue
        if before == after == 0:
            if line == "":
                # A blank context line whose space an editor has removed, and which the header does not count.
                _, had_before, _, had_after = _counts(header)
                raise DiffError(f"{counted} {had_before + 1} and {had_after + 1}; write the diff again")
            return body, number
        if line is None:
            raise _not_a_diff(origin, "Hunk is shorter than expected")
        sign = line[:1] or " "
        if sign not in " -+":
            raise _not_a_diff(origin, f"Hunk diff line expected: {line}")
        before -= sign != "+"
        after -= sign != "-"
        if before < 0 or after < 0:
            raise _not_a_diff(origin, "Hunk is longer than expected")
        body.append((sign, line[1:] + "\n"))
        number += 1


def _not_a_diff(origin: str, why: str) -> DiffError:
    return DiffError(f"{origin}: not a unified diff ({why}); write it again with `diff -u` or `git diff`")


def _path(source: str, target: str, origin: str, distribution: str) -> str:
    old, new = source.removeprefix("a/"), target.removeprefix("b/")
    of_vllm = old.startswith("vllm/")
    if old != new or of_vllm != (distribution == VLLM) or not _is_module(old):
        expected = "vllm/....py" if distribution == VLLM else "....py"
        whose = target_name(distribution)
        if of_vllm and distribution != VLLM:
            whose += ", and the package vllm is of the distribution 'vllm', whoever built it"
        raise DiffError(
            f"{origin}: changes {source!r} to {target!r}; expected the same {expected!r} on both sides: patches edit "
            f"existing files of {whose}, new code goes into vllm_hwplugin or a package of your own"
        )
    return old


def _is_module(path: str) -> bool:
    parts = path.removesuffix(".py").split("/")
    return path.endswith(".py") and all(part.isidentifier() for part in parts)


def _refuse_unmatchable(hunk: Hunk, where: str) -> None:
    before, after = hunk.before, hunk.after
    if any(not line.endswith("\n") for line in (*before[:-1], *after[:-1])):
        raise DiffError(f"{where}: a line before its last has no newline; write the diff again")
    if not before and hunk.source_start != 0:
        raise DiffError(f"{where}: no context to match; make the diff with at least one line of context")
    if before == after:
        raise DiffError(f"{where}: changes nothing; write the diff again")
