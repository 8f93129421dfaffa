# SPDX-License-Identifier: Apache-2.0
"""Unified diffs, read strictly.

`unidiff` does the parsing and checks the counts in hunk headers. On top of that this refuses what it would let pass
and what would make a later match less than exact: renames, new and deleted files, and hunks with nothing to match.
"""

from __future__ import annotations

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

    try:
        patch = PatchSet.from_string(text)
    except UnidiffParseError as error:
        raise DiffError(f"{origin}: not a unified diff ({error}); write it anew with `diff -u` or `git diff`") from error
    if not patch:
        raise DiffError(f"{origin}: no '--- a/... +++ b/...' header found; write it with `diff -u` or `git diff`")
    files = []
    for item in patch:
        path = _path(item.source_file, item.target_file, origin)
        if not len(item):
            raise DiffError(f"{origin}: no hunks for {path}; remove the file or write the diff anew")
        files.append(FileDiff(path, tuple(_hunk(hunk, index, path, origin) for index, hunk in enumerate(item, 1)), origin))
    return tuple(files)


def _path(source: str, target: str, origin: str) -> str:
    old, new = source.removeprefix("a/"), target.removeprefix("b/")
    if old != new or not old.startswith("vllm/") or ".." in old.split("/") or not old.endswith(".py"):
        raise DiffError(
            f"{origin}: changes {source!r} to {target!r}; expected the same 'vllm/....py' on both sides: patches "
            "edit existing files of vLLM, new code goes into vllm_hwplugin"
        )
    return old


def _hunk(parsed, index: int, path: str, origin: str) -> Hunk:  # type: ignore[no-untyped-def]
    lines: list[tuple[str, str]] = []
    for line in parsed:
        if line.line_type == _NO_NEWLINE:
            sign, text = lines[-1]
            lines[-1] = (sign, text.removesuffix("\n"))
        else:
            # unidiff reports a context line that an editor stripped to nothing with its own type; it is a blank line.
            lines.append((line.line_type or " ", line.value))
    hunk = Hunk(
        index=index,
        source_start=parsed.source_start,
        source_length=parsed.source_length,
        target_start=parsed.target_start,
        target_length=parsed.target_length,
        lines=tuple(lines),
    )
    where = f"{origin}: hunk {index} of {path}"
    if (len(hunk.before), len(hunk.after)) != (hunk.source_length, hunk.target_length):
        raise DiffError(
            f"{where}: the header counts {hunk.source_length} and {hunk.target_length} lines, the hunk has "
            f"{len(hunk.before)} and {len(hunk.after)}; write the diff anew"
        )
    if not hunk.before and hunk.source_start != 0:
        raise DiffError(f"{where}: no context to match; make the diff with at least one line of context")
    if hunk.before == hunk.after:
        raise DiffError(f"{where}: changes nothing; write the diff anew")
    return hunk
