# SPDX-License-Identifier: Apache-2.0
"""Unified diffs, read strictly.

`unidiff` does the parsing. On top of that this refuses what it would let pass and what would make a later match less
than exact: lines that a hunk's header does not count (it skips them), hunks out of order or with nothing to match, and
renamed, new and deleted files.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from ._errors import DiffError
from ._model import FileDiff, Hunk

_NO_NEWLINE = "\\"


def parse_diff(text: str, origin: str) -> tuple[FileDiff, ...]:
    """Read the diff of one or more files.

    Args:
        text: a unified diff with paths `a/vllm/...` and `b/vllm/...`.
        origin: the diff's name in messages.

    Raises:
        DiffError: malformed, or something else than changes inside existing files of vLLM.
    """
    from unidiff import PatchSet  # at first use: a process with every gate off needs no diff
    from unidiff.errors import UnidiffParseError

    if text and not text.endswith("\n"):
        raise DiffError(f"{origin}: the last line has no newline, so the file may be cut short; write the diff anew")
    try:
        patch = PatchSet.from_string(text)
    except UnidiffParseError as error:
        message = " ".join(str(error).split())
        raise DiffError(
            f"{origin}: not a unified diff ({message}); write it anew with `diff -u` or `git diff`"
        ) from error
    _refuse_uncounted_lines(text, patch, origin)
    if not patch:
        raise DiffError(f"{origin}: no '--- a/... +++ b/...' header found; write it with `diff -u` or `git diff`")
    files = []
    for item in patch:
        path = _path(item.source_file, item.target_file, origin)
        if not len(item):
            raise DiffError(f"{origin}: no hunks for {path}; remove the file or write the diff anew")
        hunks = tuple(_hunk(hunk, index, path, origin) for index, hunk in enumerate(item, 1))
        for one, following in pairwise(hunks):
            if following.source_start < one.source_start + one.source_length:
                raise DiffError(
                    f"{origin}: hunk {following.index} of {path} starts at line {following.source_start}, inside or "
                    f"before hunk {one.index}; write the diff anew"
                )
        files.append(FileDiff(path, hunks, origin))
    return tuple(files)


def _refuse_uncounted_lines(text: str, patch: Any, origin: str) -> None:
    counted = {line.diff_line_no for file in patch for hunk in file for line in hunk}
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if number in counted or not line.startswith((" ", "+", "-")):
            continue
        if line.startswith("--- ") and lines[number].startswith("+++ "):
            continue
        if line.startswith("+++ ") and lines[number - 2].startswith("--- "):
            continue
        raise DiffError(
            f"{origin}: line {number} ({line[:40]!r}) belongs to no hunk: the '@@' header above it is malformed or "
            "counts too few lines; write the diff anew"
        )


def _path(source: str, target: str, origin: str) -> str:
    old, new = source.removeprefix("a/"), target.removeprefix("b/")
    if old != new or not old.startswith("vllm/") or ".." in old.split("/") or not old.endswith(".py"):
        raise DiffError(
            f"{origin}: changes {source!r} to {target!r}; expected the same 'vllm/....py' on both sides: patches "
            "edit existing files of vLLM, new code goes into vllm_hwplugin"
        )
    return old


def _hunk(parsed: Any, index: int, path: str, origin: str) -> Hunk:
    where = f"{origin}: hunk {index} of {path}"
    lines: list[tuple[str, str]] = []
    for line in parsed:
        if line.line_type != _NO_NEWLINE:
            # A blank line after the last one that the header counts has no type; it fails the count below.
            lines.append((line.line_type or " ", line.value))
        elif lines:
            sign, text = lines[-1]
            lines[-1] = (sign, text.removesuffix("\n"))
        else:
            raise DiffError(f"{where}: starts with '\\ No newline at end of file'; write the diff anew")
    hunk = Hunk(
        index=index,
        source_start=parsed.source_start,
        source_length=parsed.source_length,
        target_start=parsed.target_start,
        target_length=parsed.target_length,
        lines=tuple(lines),
    )
    before, after = hunk.before, hunk.after
    if (len(before), len(after)) != (hunk.source_length, hunk.target_length):
        raise DiffError(
            f"{where}: the header counts {hunk.source_length} and {hunk.target_length} lines, the hunk has "
            f"{len(before)} and {len(after)}; write the diff anew"
        )
    if any(not line.endswith("\n") for line in (*before[:-1], *after[:-1])):
        raise DiffError(f"{where}: a line before its last has no newline; write the diff anew")
    if not before and hunk.source_start != 0:
        raise DiffError(f"{where}: no context to match; make the diff with at least one line of context")
    if before == after:
        raise DiffError(f"{where}: changes nothing; write the diff anew")
    return hunk
