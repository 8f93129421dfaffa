"""Made-up sources and features for the tests of the pure engine: text in, text out, nothing on a disk."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_hwplugin.base.versions import Versions
from vllm_hwplugin.patching import Feature
from vllm_hwplugin.patching._apply import Text, apply_edits, edits_of, locate, split_lines
from vllm_hwplugin.patching._diff import parse_diff
from vllm_hwplugin.patching.texts import FileDiff, NotNeeded

PATH = "vllm/v1/alpha.py"
OTHER = "vllm/v1/beta.py"
GATE = "VLLM_HWPLUGIN_DRAFT_FULL_GRAPH"
GATE_2 = "VLLM_HWPLUGIN_DFLASH_CONTEXT_NORM"

# Twenty lines, each its own.
ALPHA = "".join(f"line {number}\n" for number in range(1, 21))


@dataclass
class Memory:
    """A vLLM version that is only a mapping of paths to texts."""

    files: Mapping[str, str] = field(default_factory=lambda: {PATH: ALPHA})
    version: str = "0.32.0"
    label: str = "made up"

    def read(self, path: str) -> str | None:
        return self.files.get(path)


def make_diff(before: str, after: str, path: str = PATH, context: int = 3) -> str:
    """What `diff -u` would write."""
    lines = difflib.unified_diff(split_lines(before), split_lines(after), f"a/{path}", f"b/{path}", n=context)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def file_diff(before: str, after: str, path: str = PATH, context: int = 3) -> FileDiff:
    (diff,) = parse_diff(make_diff(before, after, path, context), "test.diff")
    return diff


def feature(
    *files: FileDiff,
    name: str = "one",
    gate: str = GATE,
    versions: str = ">=0.20.0,<0.34.0",
    requires: Sequence[str] = (),
    not_needed: Sequence[NotNeeded] = (),
) -> Feature:
    return Feature(
        id=name,
        title="a made-up feature",
        gate=gate,
        what="tests",
        origin="tests",
        removal="never",
        requires=tuple(requires),
        versions=Versions(versions),
        not_needed=tuple(not_needed),
        files=files,
    )


def statuses(diff: FileDiff, text: str | None) -> list[str]:
    return [verdict.status for verdict, _ in locate(diff, None if text is None else Text(text))]


def apply(diff: FileDiff, text: str) -> str | None:
    """The patched text, or None where a hunk cannot be applied."""
    pristine = Text(text)
    edits = []
    for hunk, (_, place) in zip(diff.hunks, locate(diff, pristine), strict=True):
        if place is None:
            return None
        edits += edits_of(hunk, place, "test")
    return apply_edits(pristine, edits)
