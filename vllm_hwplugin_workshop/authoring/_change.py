# SPDX-License-Identifier: Apache-2.0
"""Somebody's change to vLLM, as git writes it: a diff, a commit, or the mails of a branch."""

from __future__ import annotations

import email
import email.errors
import email.header
import email.message
import email.policy
import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from vllm_hwplugin.patching import DiffError, FileDiff, Hunk, file_diff, read_sections

from ._errors import ChangeError

_MAIL: Final = re.compile(rb"^From [0-9a-f]{40} Mon Sep 17 00:00:00 2001\n", re.MULTILINE)
_HEADER: Final = re.compile(rb"(From|Subject|Date|Message-I[dD]|MIME-Version|Return-Path|Received): ")
_SECTION: Final = re.compile(r"^(?:diff --git |--- [^\n]*\n\+\+\+ )", re.MULTILINE)
# What git writes below a mail's diff: a dash line with its version, or that of who made the page.
_SIGNATURE: Final = re.compile(r"^-- \n[^\n]*\n*\Z", re.MULTILINE)
_COMMIT: Final = re.compile(r"^commit ([0-9a-f]{7,40})\b")
_INDEX: Final = re.compile(r"^diff --git [^\n]*\n(?:(?!@@|diff --git )[^\n]*\n)*?index (\w+)\.\.(\w+)", re.MULTILINE)
# "[Bugfix][V1] Say it (#12345)"
_TAGS: Final = re.compile(r"^(?:\s*\[[^\]]*\])+\s*")
_PULL_REQUEST: Final = re.compile(r"\s*\(#(\d+)\)\s*$")
_FILES: Final = re.compile(r"^ (\d{1,9}) files? changed\b", re.MULTILINE)
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\(?:[abtnvfr"\\]|[0-7]{3}))*"', re.ASCII)
_TRAILER: Final = re.compile(r"^[A-Z][A-Za-z-]*-[Bb]y: .*$", re.MULTILINE)
_MAILED: Final = re.compile(r"^\[PATCH[^\]]*\]\s*")

PACKAGE: Final = "vllm/"

EDIT_ONLY: Final = "a patch can only edit Python files that vLLM has"


class LeftOut(NamedTuple):
    """A file of the change that no patch can carry. `way_out` is empty where vLLM runs the same without it."""

    path: str
    what: str
    way_out: str = ""


class Step(NamedTuple):
    """What one commit does to one file.

    Attributes:
        before: the beginning of git's name for the file's whole text before the commit; empty where it is not stated.
        after: the same behind it.
    """

    diff: FileDiff
    before: str = ""
    after: str = ""


class Change(NamedTuple):
    """A change to files of vLLM.

    Attributes:
        title: the first commit's subject without tags and number; empty where there is none.
        origin: the pull request, the commit or the file that it came from.
        message: what the commits say besides.
        steps: in the order in which they are to be made; a file may occur in several.
    """

    title: str
    origin: str
    message: str
    steps: tuple[Step, ...]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def paths(self) -> list[str]:
        return sorted({step.diff.path for step in self.steps})


class _Commit(NamedTuple):
    """`files`: of how many files the mail says that it changes them; 0 where it does not say."""

    subject: str
    message: str
    diff: str
    number: str
    files: int = 0


def blob_name(text: str) -> str:
    """Git's name for a file with this text."""
    data = text.encode("utf-8")
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def read_change(data: bytes, name: str) -> Change:
    """Read a `git diff`, the output of `git show`, or what `git format-patch` wrote (one mail or a series).

    Args:
        name: of the file, in messages.

    Raises:
        ChangeError: it is none of these, or changes no Python file of vLLM.
    """
    commits = list(_commits(data, name))
    steps: list[Step] = []
    left_out: dict[str, LeftOut] = {}
    for number, commit in enumerate(commits, 1):
        origin = name if len(commits) == 1 else f"{name} ({number} of {len(commits)})"
        try:
            found = _read_commit(commit.diff, origin, steps, left_out)
        except DiffError as error:
            raise ChangeError(str(error)) from error
        # The first mail of a series lists what the others change, and has no diff.
        if 0 < found < commit.files:
            raise ChangeError(
                f"{origin}: it says that it changes {commit.files} files, and its diff has {found}: it was cut short; "
                "get all of it"
            )
    kept = [step for step in steps if step.diff.path not in left_out]
    if not kept:
        raise ChangeError(_nothing(name, left_out.values()))
    first = commits[0]
    return Change(
        title=_PULL_REQUEST.sub("", _TAGS.sub("", first.subject)).strip(),
        origin=_origin(commits, name),
        message="\n\n".join(filter(None, (_said(commit, alone=len(commits) == 1) for commit in commits))),
        steps=tuple(kept),
        left_out=tuple(left_out[path] for path in sorted(left_out)),
    )


def _nothing(name: str, left_out: Iterable[LeftOut]) -> str:
    listed = ", ".join(f"{item.path} ({item.what})" for item in left_out)
    if not listed:
        return f"{name}: no '--- a/... +++ b/...' header found; write it with `git diff` or `git format-patch`"
    return f"{name}: nothing to carry in {listed}; {EDIT_ONLY}, new code goes into a package of your own"


def _commits(data: bytes, name: str) -> Iterator[_Commit]:
    starts = [match.start() for match in _MAIL.finditer(data)]
    if starts:
        for start, end in zip(starts, [*starts[1:], len(data)], strict=True):
            header, _, mail = data[start:end].partition(b"\n")
            yield _of_mail(mail, header.split()[1].decode(), name)
    elif _HEADER.match(data):
        yield _of_mail(data, "", name)
    else:
        yield _of_git(_decoded(data, name), name)


def _of_mail(mail: bytes, number: str, name: str) -> _Commit:
    message = email.message_from_bytes(mail, policy=email.policy.compat32)
    body = message.get_payload(decode=True)
    if not isinstance(body, bytes):
        raise ChangeError(
            f"{name}: a mail with attachments; save the attached patch, or write it with `git format-patch`"
        )
    said, diff = _halves(_decoded(body, name))
    # Behind the dashes stands what is not for the commit: a list of the files.
    said, _, listed = f"\n{said}".partition("\n---\n")
    files = _FILES.search(listed)
    subject = _MAILED.sub("", " ".join(_subject(message).split()))
    return _Commit(subject, said, _SIGNATURE.sub("", diff), number, int(files[1]) if files else 0)


def _subject(message: email.message.Message) -> str:
    raw = next((str(value) for name, value in message.raw_items() if name.lower() == "subject"), "")
    text = raw.encode(errors="surrogateescape").decode(errors="replace")
    try:
        return str(email.header.make_header(email.header.decode_header(text)))
    except (LookupError, ValueError, email.errors.MessageError):
        # It is only a title: what nobody can decode stays as it was written.
        return text


def _of_git(text: str, name: str) -> _Commit:
    said, diff = _halves(text)
    commit = _COMMIT.match(said)
    if commit is None:
        return _Commit("", "", diff, "")
    if re.search(_COMMIT.pattern, diff, re.MULTILINE):
        raise ChangeError(f"{name}: several commits, newest first; write them in their order with `git format-patch`")
    lines = [line[4:] for line in said.splitlines() if line.startswith("    ")]
    return _Commit(lines[0] if lines else "", "\n".join(lines[1:]), diff, commit[1])


def _halves(text: str) -> tuple[str, str]:
    """What stands above the first file's diff, and the rest."""
    found = _SECTION.search(text)
    at = len(text) if found is None else found.start()
    return text[:at], text[at:]


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ChangeError(
            f"{name}: not UTF-8 ({error}); write it anew with `git diff` or `git format-patch`"
        ) from error


def _said(commit: _Commit, *, alone: bool) -> str:
    said = re.sub(r"\n{3,}", "\n\n", _TRAILER.sub("", commit.message)).strip()
    return said if alone else "\n\n".join(filter(None, (commit.subject, said)))


def _origin(commits: list[_Commit], name: str) -> str:
    number = next((found[1] for commit in commits if (found := _PULL_REQUEST.search(commit.subject))), None)
    if number is not None:
        return f"vLLM PR {number}"
    named = [commit.number[:12] for commit in commits if commit.number.strip("0")]
    return f"commit {', '.join(named)}" if named else name


def _read_commit(diff: str, origin: str, steps: list[Step], left_out: dict[str, LeftOut]) -> int:
    """Add the commit's files to `steps`, or to `left_out` by their paths, and count them.

    Raises:
        DiffError: malformed, or a file occurs twice.
    """
    # Only git's own sections state them, and of those each text file's.
    names = _names(diff)
    seen: set[str] = set()
    for source, target, hunks in read_sections(diff, origin):
        old, new = _plain(source), _plain(target)
        path = new if target != "/dev/null" else old
        if path in seen:
            raise DiffError(f"{origin}: changes {path} twice; write commits in their order with `git format-patch`")
        seen.add(path)
        reason = _not_carried(source, target, hunks)
        if reason is not None:
            left_out.setdefault(path, reason)
        else:
            steps.append(Step(file_diff(path, hunks, origin), *names.get(path, ("", ""))))
    return len(seen)


def _names(diff: str) -> dict[str, tuple[str, str]]:
    """Path -> git's names of the text before and after."""
    found = {}
    for match in _INDEX.finditer(diff):
        path = _plain(match[0].partition("\n")[0].rpartition(" ")[2])
        found[path] = (match[1], match[2])
    return found


def _plain(path: str) -> str:
    """Without the letter that git puts before it: a and b, or i, w, c and o, as it is set up."""
    if _QUOTED.fullmatch(path):
        # Git writes each byte of a letter beyond ASCII as an octal number.
        path = path[1:-1].encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")
    return re.sub(r"^[abciwo]/", "", path)


def _not_carried(source: str, target: str, hunks: list[Hunk]) -> LeftOut | None:
    old, new = _plain(source), _plain(target)
    path = new if target != "/dev/null" else old
    if not any(item.startswith(PACKAGE) for item in (old, new)):
        return LeftOut(path, f"outside {PACKAGE}")
    if ".." in path.split("/"):
        return LeftOut(path, "leads out of the package", EDIT_ONLY)
    if source == "/dev/null":
        return LeftOut(
            path, "a new file", f"{EDIT_ONLY}: put it into an installed package of your own, and import it from there"
        )
    if target == "/dev/null":
        return LeftOut(path, "deleted", f"{EDIT_ONLY}: it stays, and whatever still imports it works as before")
    if old != new:
        return LeftOut(path, f"renamed from {old}", f"{EDIT_ONLY}: make the change in {old} with `patches edit`")
    if not path.endswith(".py"):
        return LeftOut(path, "no Python file", EDIT_ONLY)
    if not hunks:
        return LeftOut(path, "no line of it changes", "there is nothing to carry, or it is not text")
    return None
