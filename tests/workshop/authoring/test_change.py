"""What git writes, read: by git itself, whatever form it comes in."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from vllm_hwplugin_workshop.authoring import Change, ChangeError, Outcome, carry, read_change

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
    "vllm/data.json": "no Python file",
    "vllm/gone.py": "deleted",
    "vllm/moved.py": "renamed from vllm/old.py",
    "vllm/new.py": "a new file",
    "vllm/sign.bin": "no Python file",
}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """Two commits on top of the first; the second edits what the first has edited, and what it has added."""
    made = Repository(tmp_path / "repository")
    made.commit("Begin", BEFORE)
    first = BEFORE[PATH].replace(b"line_5 = 5\n", b"line_5 = 55\nmore = 5\n")
    made.commit(
        "[Bugfix][V1] Größe - mend `alpha` (#12345)\n\nWhy it is so.\n\nSigned-off-by: J <j@example.org>",
        {
            PATH: first,
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
    made.commit(
        "Say it once more",
        {PATH: first.replace(b"more = 5\n", b"more = 6\n"), "vllm/new.py": b"a = 2\n"},
    )
    return made


def result(change: Change) -> dict[str, str]:
    carried = carry(change, Memory("0.33.0", {path: data.decode() for path, data in BEFORE.items() if path[-1] == "y"}))
    assert carried.outcome is Outcome.APPLIES, carried.reason
    return {path: edited.result for path, edited in carried.files.items()}


@needs_git
@pytest.mark.parametrize(
    "arguments",
    [("diff", "HEAD~2"), ("diff", "--binary", "HEAD~2"), ("format-patch", "--stdout", "HEAD~2")],
    ids=["diff", "binary", "mails"],
)
def test_every_form_gives_what_git_checks_out(repository: Repository, arguments: tuple[str, ...]) -> None:
    change = read_change(repository.git(*arguments), "it.patch")
    assert {item.path: item.what for item in change.left_out} == LEFT_OUT
    assert [item.path for item in change.left_out if not item.way_out] == ["csrc/new.cu", "tests/test_alpha.py"]
    assert result(change) == {path: (repository.folder / path).read_bytes().decode() for path in (PATH, CRLF)}


@needs_git
def test_what_commits_say(repository: Repository) -> None:
    mails = read_change(repository.git("format-patch", "--stdout", "HEAD~2"), "it.patch")
    shown = read_change(repository.git("show", "HEAD~1"), "it.patch")
    for change in (mails, shown):
        assert change.title == "Größe - mend `alpha`"
        assert change.origin == "vLLM PR 12345"
        assert "Why it is so." in change.message
        assert "Signed-off-by" not in change.message
    number = repository.git("rev-parse", "HEAD").decode()[:12]
    last = read_change(repository.git("format-patch", "--stdout", "HEAD~1"), "it.patch")
    assert (last.title, last.origin) == ("Say it once more", f"commit {number}")
    assert read_change(repository.git("diff", "HEAD~2"), "it.diff").origin == "it.diff"


@needs_git
def test_a_name_that_git_quotes(tmp_path: Path) -> None:
    made = Repository(tmp_path / "repository")
    path = "vllm/v1/größe.py"
    made.commit("Begin", {path: b"a = 1\n", "vllm/v1/alpha.py": b"a = 1\n"})
    made.commit("Go on", {path: b"a = 2\n", "vllm/v1/alpha.py": b"a = 2\n"})
    change = read_change(made.git("-c", "core.quotepath=true", "diff", "HEAD~1"), "it.diff")
    assert (change.paths, change.left_out) == (["vllm/v1/alpha.py", path], ())


@needs_git
def test_a_mail_that_was_cut_off_between_files(repository: Repository) -> None:
    """Not so the letter that covers a series: it lists what the others change."""
    mail = repository.git("format-patch", "--stdout", "HEAD~2..HEAD~1")
    last = mail.rindex(b"diff --git")
    with pytest.raises(ChangeError, match="cut short"):
        read_change(mail[:last], "it.patch")
    repository.git("format-patch", "--cover-letter", "-o", "mails", "HEAD~2")
    mails = b"".join(file.read_bytes() for file in sorted((repository.folder / "mails").iterdir()))
    assert len(read_change(mails, "it.patch").steps) == 3


@pytest.mark.parametrize(
    ("subject", "title"),
    [
        (b"=?iso-8859-1?q?M=E9nd?=", "Ménd"),
        ("Ménd ü".encode(), "Ménd ü"),
        (b"=?nosuch?q?Mend?=", "=?nosuch?q?Mend?="),
        (b"=?utf-8?q?=FF=FE?=", "=?utf-8?q?=FF=FE?="),
        (b"M\xe9nd", "M\ufffdnd"),
    ],
)
def test_a_subject_that_nobody_can_decode_is_a_title_as_it_stands(subject: bytes, title: str) -> None:
    mail = b"From: a@b\nSubject: [PATCH] %s\n\nIt.\n---\n%s" % (subject, git_diff("a\n", "b\n"))
    assert read_change(mail, "it.patch").title == title


@needs_git
def test_a_log_is_refused_because_it_begins_with_the_last_commit(repository: Repository) -> None:
    with pytest.raises(ChangeError, match="newest first; write them in their order with `git format-patch`"):
        read_change(repository.git("log", "-p", "HEAD~2..HEAD"), "it.patch")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"nothing\n", r"no '--- a/\.\.\. \+\+\+ b/\.\.\.' header"),
        (git_diff("a\n", "b\n", "tests/x.py"), r"nothing to carry in tests/x\.py \(outside vllm/\)"),
        (git_diff("a\n", "b\n") + b"+one too many\n", "belongs to no hunk"),
        (git_diff("a\n", "b\n") + git_diff("b\n", "c\n"), "changes vllm/v1/alpha.py twice"),
        (git_diff("a\n", "b\n").replace(b"@@ -1", b"@@ -" + b"1" * 5000), "belongs to no hunk"),
        (git_diff("a\n", "b\n")[:-1], "the last line has no newline"),
        (git_diff("a\n", "b\n").replace(b"+b", b"+\xff"), "not UTF-8"),
        (git_diff("a\nb\n", "a\nc\nb\n", context=0), "no context to match"),
    ],
)
def test_refused(data: bytes, message: str) -> None:
    with pytest.raises(ChangeError, match=message):
        read_change(data, "it.patch")
