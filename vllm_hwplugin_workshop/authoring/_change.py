# SPDX-License-Identifier: Apache-2.0
"""A change to vLLM as git writes it: a diff or a commit."""

from __future__ import annotations

import email
import email.policy
import hashlib
import re
from typing import Final, NamedTuple

from vllm_hwplugin.errors import HwpluginError
from vllm_hwplugin.patching.texts import DiffError, FileDiff, Hunk, file_diff, read_sections

_MAILED: Final = re.compile(r"(From [0-9a-f]{40} |From: |Subject: |Date: |Message-I[dD]: |MIME-Version: )")
_COMMIT: Final = re.compile(r"^(?:From|commit) ([0-9a-f]{7,40})(?: Mon Sep 17 00:00:00 2001| \(.*\))?$", re.MULTILINE)
_SECTION: Final = re.compile(r"^(?:diff --git |--- [^\n]*\n\+\+\+ )", re.MULTILINE)
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


class ChangeError(HwpluginError):
    """A change cannot be read, or cannot be written to a feature's folder or a work tree."""


class LeftOut(NamedTuple):
    """A file of the change that no patch can carry; `way_out` is empty if vLLM runs the same without it."""

    path: str
    what: str
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
        message: The rest of the commit message.
        steps: The change to each file.
    """

    title: str
    origin: str
    message: str
    steps: tuple[Step, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def paths(self) -> list[str]:
        return [step.diff.path for step in self.steps]


def blob_name(text: str) -> str:
    """Return git's blob id of a text."""
    data = text.encode("utf-8")
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def read_change(data: bytes, name: str) -> Change:
    """Read a `git diff`, or a commit in git's formats.

    The formats are `git show`'s and `git format-patch`'s.

    Args:
        name: The file's name for messages.

    Raises:
        ChangeError: The data has another form, or changes no Python file of vLLM.
    """
    text = _decoded(data, name)
    if len(_COMMIT.findall(text)) > 1:
        raise ChangeError(
            f"{name}: several commits; write one diff of them all, `git diff FIRST^ LAST` (on GitHub, a pull "
            "request's address with .diff)"
        )
    commit = _COMMIT.match(text)
    if _MAILED.match(text):
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
        heading, diff = _split(text)
        # `git show` indents the message by four columns.
        subject, *lines = [line[4:] for line in heading.splitlines() if line.startswith("    ")] if commit else [""]
        counted = None
        heading = "\n".join(lines)
    steps, left_out = _files(diff, name)
    if counted is not None and int(counted[1]) != len(steps) + len(left_out):
        raise ChangeError(
            f"{name}: its list has {counted[1]} files and its diff {len(steps) + len(left_out)}, so the mail is cut or "
            "edited; write it again with `git format-patch`"
        )
    if not steps:
        listed = ", ".join(f"{file.path} ({file.what})" for file in left_out)
        unusable = f"nothing to carry in {listed}; {EDIT_ONLY}, new code belongs in your own package"
        none = "no '--- a/... +++ b/...' header found; write it with `git diff` or `git format-patch`"
        raise ChangeError(f"{name}: {unusable if listed else none}")
    subject = " ".join(subject[:_LONGEST_SUBJECT].split())
    number = _PULL_REQUEST.search(subject)
    return Change(
        title=_PULL_REQUEST.sub("", _TAGS.sub("", subject)).strip(),
        origin=f"vLLM PR {number[1]}" if number else f"commit {commit[1][:12]}" if commit else name,
        message=re.sub(r"\n{3,}", "\n\n", _TRAILER.sub("", heading)).strip(),
        steps=tuple(steps),
        left_out=tuple(sorted(left_out)),
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


def _files(diff: str, origin: str) -> tuple[list[Step], list[LeftOut]]:
    """Return the changes that can be carried, and the other files.

    Raises:
        ChangeError: The diff is malformed, or a file occurs twice.
    """
    # Only the text files of git's diffs have blob ids.
    names = _names(diff)
    steps: dict[str, Step | None] = {}
    left_out = []
    try:
        for source, target, hunks in read_sections(diff, origin):
            path = _plain(source if target == "/dev/null" else target)
            if path in steps:
                raise ChangeError(f"{origin}: changes {path} twice; write one diff of both with `git diff`")
            steps[path] = None
            reason = _not_carried(path, source, target, hunks)
            if reason is not None:
                left_out.append(LeftOut(path, *reason))
            else:
                steps[path] = Step(file_diff(path, hunks, origin), *names.get(path, ("", "")))
    except DiffError as error:
        raise ChangeError(str(error)) from error
    return [step for step in steps.values() if step is not None], left_out


def _names(diff: str) -> dict[str, tuple[str, str]]:
    """Return path -> git's blob ids before and after the change."""
    names = {}
    for match in _INDEX.finditer(diff):
        path = _plain(match[0].partition("\n")[0].rpartition(" ")[2])
        names[path] = (match[1], match[2])
    return names


def _plain(path: str) -> str:
    """Remove git's prefix (a/, b/, i/, w/, c/, o/) from a path."""
    if _QUOTED.fullmatch(path):
        # git writes non-ASCII bytes in octal.
        path = path[1:-1].encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")
    return re.sub(r"^[abciwo]/", "", path)


def _not_carried(path: str, source: str, target: str, hunks: list[Hunk]) -> tuple[str, ...] | None:
    """Return why a file cannot be carried, and a way out."""
    # None: it can be carried. The way out is missing if vLLM runs the same without the file.
    old = _plain(source)
    if not old.startswith(PACKAGE) and not path.startswith(PACKAGE):
        return (f"outside {PACKAGE}",)
    if ".." in path.split("/"):
        return "leads out of the package", EDIT_ONLY
    if source == "/dev/null":
        return "a new file", f"{EDIT_ONLY}: put it into your own installed package, and import it from there"
    if target == "/dev/null":
        return "deleted", f"{EDIT_ONLY}: the file stays, and modules that import it still work"
    if old != path:
        return f"renamed from {old}", f"{EDIT_ONLY}: make the change in {old} with `patches edit`"
    if not path.endswith(".py"):
        return "not a Python file", EDIT_ONLY
    if not hunks:
        return "no line changes", "there is nothing to carry, or it is not text"
    return None
