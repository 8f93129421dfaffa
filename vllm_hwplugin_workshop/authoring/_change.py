# SPDX-License-Identifier: Apache-2.0
"""A change to vLLM as git writes it: a diff, a commit, or a series of commits."""

from __future__ import annotations

import email
import email.policy
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from vllm_hwplugin.base.errors import HwpluginError
from vllm_hwplugin.patching.texts import DiffError, FileDiff, Hunk, Source, file_diff, read_sections, split_lines

_MAILED: Final = re.compile(r"(From [0-9a-f]{40} |From: |Subject: |Date: |Message-I[dD]: |MIME-Version: )")
_COMMIT: Final = re.compile(r"^(?:From|commit) ([0-9a-f]{7,40})(?: Mon Sep 17 00:00:00 2001| \(.*\))?$", re.MULTILINE)
_SECTION: Final = re.compile(r"^(?:diff --git |--- [^\n]*\n\+\+\+ )", re.MULTILINE)
_MAIL: Final = re.compile(r"^From [0-9a-f]{7,40} Mon Sep 17 00:00:00 2001$", re.MULTILINE)
_HUNK: Final = re.compile(r"@@ -\d{1,9}(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@")
# Lines around the diffs of files that are no prose: of diff, of Subversion, and a mail's signature.
_FURNITURE: Final = re.compile(r"diff |index |Index: |={3,}$|Only in |Files |--? ?$|\d+(\.\d+)+")
_INSTALLED: Final = re.compile(r"(?:^|/)(?:site|dist)-packages/(vllm/.*)")
# git's signature below a mail's diff: a dash line with a version.
_SIGNATURE: Final = re.compile(r"^-- \n[^\n]*\n*\Z", re.MULTILINE)
_INDEX: Final = re.compile(r"^diff --git [^\n]*\n(?:(?!@@|diff --git )[^\n]*\n)*?index (\w+)\.\.(\w+)", re.MULTILINE)
# "[PATCH] [Bugfix][V1] Say it (#12345)"
_TAGS: Final = re.compile(r"^(?:\s*\[[^\]]*\])+\s*")
_PULL_REQUEST: Final = re.compile(r"\s*\(#(\d+)\)\s*$")
# The rest of a longer subject is ignored.
_LONGEST_SUBJECT: Final = 1000
# The last line of `git format-patch`'s list of files.
_COUNTED: Final = re.compile(r"^ (\d{1,6}) files? changed\b", re.MULTILINE)
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\(?:[abtnvfr"\\]|[0-7]{3}))*"', re.ASCII)
_TRAILER: Final = re.compile(r"^[A-Z][A-Za-z-]*-[Bb]y: .*$", re.MULTILINE)

PACKAGE: Final = "vllm/"

EDIT_ONLY: Final = "a patch can only edit Python files that vLLM has"
_NEW: Final = "a new file"
_NEW_WAY_OUT: Final = f"{EDIT_ONLY}: put it into your own installed package, and import it from there"


class ChangeError(HwpluginError):
    """A change cannot be read, or cannot be written to a feature's folder or a work tree."""


class LeftOut(NamedTuple):
    """A file of the change that no patch can carry; `way_out` is empty if vLLM runs the same without it."""

    path: str
    reason: str
    way_out: str = ""


class Step(NamedTuple):
    """The change to one file.

    Attributes:
        before: Prefix of git's blob id of the file before the change; empty if the diff does not state it.
        after: The same after the change.
    """

    diff: FileDiff
    before: str = ""
    after: str = ""


class Change(NamedTuple):
    """A change to files of vLLM.

    Attributes:
        title: The commit's subject without tags and number; or empty.
        origin: The pull request, the commit or the file of the change.
        message: The rest of the commit message, or the prose above a diff.
        steps: The change to each file.
        assumed: The folder that was put in front of each path, because no path is in `vllm/`; else empty.
    """

    title: str
    origin: str
    message: str
    steps: tuple[Step, ...]
    left_out: tuple[LeftOut, ...] = ()
    assumed: str = ""

    @property
    def paths(self) -> list[str]:
        return [step.diff.path for step in self.steps]


def blob_name(text: str) -> str:
    """Return git's blob id of a text."""
    data = text.encode("utf-8")
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def read_change(data: bytes, name: str, prefix: str = "") -> Change:
    """Read a `git diff`, or a commit in one of git's formats.

    The formats are `git show`'s and `git format-patch`'s.

    Raises:
        ChangeError: There are several commits, or as `read_series`.
    """
    changes = read_series(data, name, prefix)
    if len(changes) > 1:
        raise ChangeError(
            f"{name}: several changes; import them with `patches import`, or write one diff of them all with `git diff "
            "FIRST^ LAST` (on GitHub, a pull request's address with .diff)"
        )
    return changes[0]


def read_series(data: bytes, name: str, prefix: str = "") -> tuple[Change, ...]:
    """Read a file's changes in order: mails, or diffs with prose.

    Args:
        name: The file's name for messages.
        prefix: The folder of site-packages in which the paths begin; empty: they have it, or it is `vllm/`.

    Raises:
        ChangeError: The data has another form, or changes no Python file of vLLM.
    """
    text = _decoded(data, name)
    if not _MAIL.match(text) and len(_COMMIT.findall(text)) > 1:
        raise ChangeError(
            f"{name}: several commits of `git log`, newest first; write them with `git format-patch --stdout`, or one "
            "diff of them all"
        )
    parts = [part for part in _parts(text) if part.strip()] or [text]
    changes = [_read(part, name, prefix) for part in parts]
    if not any(change.steps for change in changes):
        listed = ", ".join(f"{file.path} ({file.reason})" for change in changes for file in change.left_out)
        unusable = f"nothing to carry in {listed}; {EDIT_ONLY}, new code belongs in your own package"
        none = "no '--- a/... +++ b/...' header found; write it with `git diff` or `git format-patch`"
        raise ChangeError(f"{name}: {unusable if listed else none}")
    return _with_steps(changes)


def _with_steps(changes: Sequence[Change]) -> tuple[Change, ...]:
    """Return the changes with steps; the first lists the other files."""
    others = [file for change in changes if not change.steps for file in change.left_out]
    first, *rest = (change for change in changes if change.steps)
    return (first._replace(left_out=(*first.left_out, *others)), *rest)


def merged(changes: Sequence[Change]) -> Change:
    """Return one change with the texts and files of all."""
    first, *rest = changes
    if not rest:
        return first
    told = [f"{change.title}\n\n{change.message}".strip() for change in changes]
    return first._replace(
        origin=", ".join(dict.fromkeys(change.origin for change in changes)),
        message="\n\n".join(filter(None, told)),
        steps=tuple(step for change in changes for step in change.steps),
        left_out=tuple(file for change in changes for file in change.left_out),
    )


def settled(changes: Iterable[Change], sources: Sequence[Source]) -> tuple[Change, ...]:
    """Leave out the files that the series adds; check assumed paths.

    Raises:
        ChangeError: No version has a file under the path that was assumed for it, or nothing is left to carry.
    """
    added: set[str] = set()
    remaining: list[Change] = []
    for change in changes:
        added |= {file.path for file in change.left_out if file.reason == _NEW}
        absent = [step for step in change.steps if all(source.read(step.diff.path) is None for source in sources)]
        # Without `/dev/null`: a hunk that only adds lines is for an empty file, or for none.
        new = [step for step in absent if step.diff.path in added or not any(hunk.before for hunk in step.diff.hunks)]
        if change.assumed and len(absent) > len(new):
            unknown = ", ".join(step.diff.path.removeprefix(change.assumed) for step in absent)
            raise ChangeError(
                f"nothing to carry in {unknown} (outside {PACKAGE}, and not in the package either); if the paths begin "
                "in a folder of vLLM, name it with --prefix"
            )
        added |= {step.diff.path for step in new}
        left_out = (*change.left_out, *(LeftOut(step.diff.path, _NEW, _NEW_WAY_OUT) for step in new))
        remaining.append(
            change._replace(steps=tuple(step for step in change.steps if step not in new), left_out=left_out)
        )
    if not any(change.steps for change in remaining):
        listed = ", ".join(file.path for change in remaining for file in change.left_out)
        raise ChangeError(f"nothing to carry in {listed}; {EDIT_ONLY}, new code belongs in your own package")
    return _with_steps(remaining)


def _parts(text: str) -> Iterator[str]:
    """Yield each mail, or each diff with the prose above it."""
    if _MAIL.match(text):
        starts = [mail.start() for mail in _MAIL.finditer(text)]
    else:
        starts = [0] if _COMMIT.match(text) or _MAILED.match(text) else _beginnings(text)
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        yield text[start:end]


def _beginnings(text: str) -> list[int]:
    """Return the offsets of diffs: at prose, or at a repeated path."""
    lines = split_lines(text)
    offsets = [*accumulate(map(len, lines), initial=0)]
    starts, paths, number, ended, of_git = [0], set[str](), 0, None, False
    while number < len(lines):
        line = lines[number]
        if counts := _HUNK.match(line):
            number = ended = _behind(lines, number + 1, int(counts[1] or 1), int(counts[2] or 1))
            of_git = False
            continue
        is_header = line.startswith("--- ") and number + 1 < len(lines) and lines[number + 1].startswith("+++ ")
        if line.startswith("diff --git ") or (is_header and not of_git):
            path = (line if line.startswith("diff --git ") else lines[number + 1]).split("\t")[0].split()[-1]
            between = lines[number if ended is None else ended : number]
            if any(line[0] not in " +-\\\n" and not _FURNITURE.match(line) for line in between):
                starts.append(offsets[number - len(between)])
                paths.clear()
            elif path in paths and path != "/dev/null":
                starts.append(offsets[number])
                paths.clear()
            paths.add(path)
            ended = None
        of_git = of_git or line.startswith("diff --git ")
        number += 1
    return starts


def _behind(lines: Sequence[str], number: int, before: int, after: int) -> int:
    """Return the line after a hunk, by its header's counts."""
    while number < len(lines) and (before > 0 or after > 0 or lines[number].startswith("\\")):
        sign = lines[number][0]
        before -= sign not in "+\\"
        after -= sign not in "-\\"
        number += 1
    return number


def _read(text: str, name: str, prefix: str) -> Change:
    """Read one mail, commit or diff; the change may have no steps."""
    commit = _COMMIT.match(text)
    if _MAILED.match(text):
        data = text.encode("utf-8")
        message = email.message_from_bytes(data.partition(b"\n")[2] if commit else data, policy=email.policy.default)
        # The raw text: `email` decodes a subject in time quadratic in its length.
        raw = next((value for name, value in message.raw_items() if name.lower() == "subject"), "")
        subject = str(message.policy.header_fetch_parse("Subject", str(raw)[:_LONGEST_SUBJECT]))
        body = message.get_payload(decode=True)
        if not isinstance(body, bytes):
            raise ChangeError(
                f"{name}: a mail with attachments; save the attached patch, or write it with `git format-patch`"
            )
        heading, diff = _split(_SIGNATURE.sub("", _decoded(body, name)))
        counted = _COUNTED.search(heading)
        # After the dashes comes a list of the files, which is not part of the commit message.
        heading = f"\n{heading}".partition("\n---\n")[0]
    else:
        heading, diff = _split(_SIGNATURE.sub("", text))
        # `git show` indents the message by four columns.
        subject, *lines = [line[4:] for line in heading.splitlines() if line.startswith("    ")] if commit else [""]
        counted = None
        prose = (line for line in heading.splitlines() if not _FURNITURE.match(line))
        heading = "\n".join(lines if commit else prose)
    steps, left_out, assumed = _files_in_package(diff, name, prefix)
    if counted is not None and int(counted[1]) != len(steps) + len(left_out):
        raise ChangeError(
            f"{name}: its list has {counted[1]} files and its diff {len(steps) + len(left_out)}, so the mail is cut or "
            "edited; write it again with `git format-patch`"
        )
    subject = " ".join(subject[:_LONGEST_SUBJECT].split())
    number = _PULL_REQUEST.search(subject)
    # `git format-patch --zero-commit` names none.
    named = commit is not None and commit[1].strip("0")
    return Change(
        title=_PULL_REQUEST.sub("", _TAGS.sub("", subject)).strip(),
        origin=f"vLLM PR {number[1]}" if number else f"commit {commit[1][:12]}" if commit and named else name,
        message=re.sub(r"\n{3,}", "\n\n", _TRAILER.sub("", heading)).strip(),
        steps=tuple(steps),
        left_out=tuple(sorted(left_out)),
        assumed=assumed,
    )


def _split(text: str) -> tuple[str, str]:
    """Split a text before the first file's diff."""
    section = _SECTION.search(text)
    at = len(text) if section is None else section.start()
    return text[:at], text[at:]


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ChangeError(
            f"{name}: not UTF-8 ({error}); write it again with `git diff` or `git format-patch`"
        ) from error


def _files_in_package(diff: str, origin: str, prefix: str) -> tuple[list[Step], list[LeftOut], str]:
    """Return `_files`, and the folder that was assumed for them."""
    steps, left_out = _files(diff, origin, prefix)
    if not steps and not prefix and not any(file.path.startswith(PACKAGE) for file in left_out):
        inside, others = _files(diff, origin, PACKAGE)
        if inside:
            return inside, others, PACKAGE
    return steps, left_out, ""


def _files(diff: str, origin: str, prefix: str) -> tuple[list[Step], list[LeftOut]]:
    """Return the changes that can be carried, and the other files.

    Raises:
        ChangeError: The diff is malformed, or a file occurs twice.
    """
    # Only the text files of git's diffs have blob ids.
    names = _names(diff, prefix)
    steps: dict[str, Step | None] = {}
    left_out = []
    try:
        for source, target, hunks in read_sections(diff, origin):
            old, new = (name if name == "/dev/null" else _placed(name, prefix) for name in (source, target))
            path = old if new == "/dev/null" else new
            if path in steps:
                raise ChangeError(f"{origin}: changes {path} twice; write one diff of both with `git diff`")
            steps[path] = None
            reason = _not_carried(path, old, new, hunks)
            if reason is not None:
                left_out.append(LeftOut(path, *reason))
            else:
                steps[path] = Step(file_diff(path, hunks, origin), *names.get(path, ("", "")))
    except DiffError as error:
        raise ChangeError(str(error)) from error
    return [step for step in steps.values() if step is not None], left_out


def _names(diff: str, prefix: str) -> dict[str, tuple[str, str]]:
    """Return path -> git's blob ids before and after the change."""
    names = {}
    for match in _INDEX.finditer(diff):
        path = _placed(match[0].partition("\n")[0].rpartition(" ")[2], prefix)
        names[path] = (match[1], match[2])
    return names


def _placed(path: str, prefix: str) -> str:
    """Return a path as in site-packages."""
    plain = _plain(path)
    installed = _INSTALLED.search(plain)
    return installed[1] if installed else prefix + plain


def _plain(path: str) -> str:
    """Remove git's prefix (a/, b/, i/, w/, c/, o/) from a path."""
    if _QUOTED.fullmatch(path):
        # git writes non-ASCII bytes in octal.
        path = path[1:-1].encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")
    return re.sub(r"^[abciwo]/", "", path)


def _not_carried(path: str, old: str, target: str, hunks: list[Hunk]) -> tuple[str, ...] | None:
    """Return why a file cannot be carried, and a way out."""
    # None: it can be carried. The way out is missing if vLLM runs the same without the file.
    if not old.startswith(PACKAGE) and not path.startswith(PACKAGE):
        return (f"outside {PACKAGE}",)
    if ".." in path.split("/"):
        return "leads out of the package", EDIT_ONLY
    if old == "/dev/null":
        return _NEW, _NEW_WAY_OUT
    if target == "/dev/null":
        return "deleted", f"{EDIT_ONLY}: the file stays, and modules that import it still work"
    if old != path:
        return f"renamed from {old}", f"{EDIT_ONLY}: make the change in {old} with `patches edit`"
    if not path.endswith(".py"):
        return "not a Python file", EDIT_ONLY
    if not hunks:
        return "no line changes", "there is nothing to carry, or it is not text"
    return None
