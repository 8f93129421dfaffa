"""What git writes, read: by git itself, whatever form it comes in."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from vllm_hwplugin_workshop.authoring import Change, ChangeError, Outcome, carry, read_change, read_series

from .made import PATH, Memory, Repository, git_diff

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

CRLF = "vllm/v1/crlf.py"
BEFORE = {
    PATH: "".join(f"line_{number} = {number}\n" for number in range(40)).encode(),
    CRLF: b"one = 1\r\ntwo = 2\r\nthree = 3\r\n",
    "vllm/old.py": b"a = 1\n" * 20,
    "vllm/gone.py": b"gone = True\n",
    "vllm/data.json": b"{}\n",
    "vllm/sign.bin": bytes(range(256)),
    "tests/test_alpha.py": b"a = 1\n",
}
LEFT_OUT = {
    "csrc/new.cu": "outside vllm/",
    "tests/test_alpha.py": "outside vllm/",
    "vllm/data.json": "not a Python file",
    "vllm/gone.py": "deleted",
    "vllm/moved.py": "renamed from vllm/old.py",
    "vllm/new.py": "a new file",
    "vllm/sign.bin": "not a Python file",
}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """A commit on top of the first."""
    made = Repository(tmp_path / "repository")
    made.commit("Begin", BEFORE)
    made.commit(
        "[Bugfix][V1] Größe - mend `alpha` (#12345)\n\nWhy it is so.\n\nSigned-off-by: J <j@example.org>",
        {
            PATH: BEFORE[PATH].replace(b"line_5 = 5\n", b"line_5 = 55\nmore = 5\n"),
            CRLF: BEFORE[CRLF].replace(b"two = 2\r\n", b"two = 22\r\n"),
            "vllm/old.py": None,
            "vllm/moved.py": BEFORE["vllm/old.py"] + b"b = 1\n",
            "vllm/gone.py": None,
            "vllm/new.py": b"a = 1\n",
            "vllm/data.json": b"[]\n",
            "vllm/sign.bin": bytes(range(255, -1, -1)),
            "tests/test_alpha.py": b"a = 2\n",
            "csrc/new.cu": b"int a;\n",
        },
    )
    return made


def result(change: Change) -> dict[str, str]:
    carried = carry(change, Memory("0.33.0", {path: data.decode() for path, data in BEFORE.items() if path[-1] == "y"}))
    assert carried.outcome is Outcome.APPLIES, carried.reason
    return {path: edited.result for path, edited in carried.files.items()}


@needs_git
@pytest.mark.parametrize(
    "arguments",
    [("diff", "HEAD~"), ("diff", "--binary", "HEAD~"), ("format-patch", "--stdout", "HEAD~"), ("show",)],
    ids=["diff", "binary", "mail", "show"],
)
def test_every_form_gives_what_git_checks_out(repository: Repository, arguments: tuple[str, ...]) -> None:
    change = read_change(repository.git(*arguments), "it.patch")
    assert {item.path: item.reason for item in change.left_out} == LEFT_OUT
    assert [item.path for item in change.left_out if not item.way_out] == ["csrc/new.cu", "tests/test_alpha.py"]
    assert result(change) == {path: (repository.folder / path).read_bytes().decode() for path in (PATH, CRLF)}
    if arguments[0] == "diff":
        assert (change.title, change.origin, change.message) == ("", "it.patch", "")
    else:
        assert (change.title, change.origin) == ("Größe - mend `alpha`", "vLLM PR 12345")
        assert change.message == "Why it is so."


@needs_git
def test_several_commits_are_a_series_of_mails_or_one_diff(repository: Repository) -> None:
    repository.commit("Say it once more", {PATH: b"a = 1\n"})
    with pytest.raises(ChangeError, match="newest first; write them with `git format-patch"):
        read_series(repository.git("log", "-p", "HEAD~2..HEAD"), "it.patch")
    mails = repository.git("format-patch", "--stdout", "HEAD~2")
    assert [change.title for change in read_series(mails, "it.patch")] == ["Größe - mend `alpha`", "Say it once more"]
    with pytest.raises(ChangeError, match="several changes; import them with `patches import`, or write one diff"):
        read_change(mails, "it.patch")
    number = repository.git("rev-parse", "HEAD").decode()[:12]
    assert read_change(repository.git("show"), "it.patch").origin == f"commit {number}"


@needs_git
def test_a_mail_that_is_cut_between_two_files_is_refused(repository: Repository) -> None:
    """What is left reads as a whole diff; only the list of the files knows."""
    mail = repository.git("format-patch", "--stdout", "HEAD~")
    begins = [found.start() for found in re.finditer(rb"^diff --git ", mail, re.MULTILINE)]
    assert len(begins) > 2
    assert read_change(mail, "it.patch").steps
    for begin in begins[2:]:
        with pytest.raises(ChangeError, match=r"its list has \d+ files and its diff \d+, so the mail is cut"):
            read_change(mail[:begin], "it.patch")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"nothing\n", r"no '--- a/\.\.\. \+\+\+ b/\.\.\.' header"),
        (git_diff("a\n", "b\n", "csrc/x.cu"), r"nothing to carry in csrc/x\.cu \(outside vllm/\)"),
        (git_diff("a\n", "b\n") + b"+one too many\n", "belongs to no hunk"),
        (git_diff("a\n", "b\n") + git_diff("b\n", "c\n"), "several changes"),
        (
            b"From: a@b\nSubject: It\n\n---\n" + git_diff("a\n", "b\n") + git_diff("b\n", "c\n"),
            "changes vllm/v1/alpha.py twice",
        ),
        (git_diff("a\n", "b\n").replace(b"@@ -1", b"@@ -" + b"1" * 5000), "belongs to no hunk"),
        (git_diff("a\n", "b\n")[:-1], "the last line has no newline"),
        (git_diff("a\n", "b\n").replace(b"+b", b"+\xff"), "not UTF-8"),
        (git_diff("a\nb\n", "a\nc\nb\n", context=0), "no context to match"),
    ],
)
def test_refused(data: bytes, message: str) -> None:
    with pytest.raises(ChangeError, match=message):
        read_change(data, "it.patch")
