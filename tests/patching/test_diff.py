"""Unified diffs are read strictly: what could be misread is refused, with the way out."""

from __future__ import annotations

import re

import pytest

from vllm_hwplugin.patching._diff import parse_diff
from vllm_hwplugin.patching.texts import DiffError

HEAD = "--- a/vllm/v1/alpha.py\n+++ b/vllm/v1/alpha.py\n"
HUNK = "@@ -2,3 +2,4 @@ class A:\n one\n-two\n+2\n+and a half\n three\n"


def test_versions_behind_a_header() -> None:
    """And nowhere else: git writes the line of the function there."""
    parts = [HUNK.replace(" class A:", text) for text in (" class A:", " >=0.24,<0.26", "<0.24 || >=0.26")]
    (diff,) = parse_diff(HEAD + "".join(parts), "d.diff")
    found = [[version for version in ("0.20.0", "0.25.0", "0.26.0") if hunk.covers(version)] for hunk in diff.hunks]
    assert found == [["0.20.0", "0.25.0", "0.26.0"], ["0.25.0"], ["0.20.0", "0.26.0"]]


def test_several_files_and_git_headers() -> None:
    """As `git diff` writes it, with timestamps as `diff -u` does."""
    git = "diff --git a/vllm/v1/pack/__init__.py b/vllm/v1/pack/__init__.py\nindex 1234567..89abcde 100644\n"
    second = (
        "--- a/vllm/v1/pack/__init__.py\t2026-01-01\n+++ b/vllm/v1/pack/__init__.py\t2026-01-02\n@@ -1 +1 @@\n-x\n+y\n"
    )
    diffs = parse_diff(HEAD + HUNK + git + second, "d.diff")
    assert [diff.module for diff in diffs] == ["vllm.v1.alpha", "vllm.v1.pack"]


def test_missing_final_newlines() -> None:
    marker = "\\ No newline at end of file\n"
    (diff,) = parse_diff(f"{HEAD}@@ -1,2 +1,2 @@\n a\n-b\n{marker}+c\n{marker}", "d.diff")
    assert diff.hunks[0].before == ("a\n", "b")
    assert diff.hunks[0].after == ("a\n", "c")


def test_other_line_ends_are_kept() -> None:
    """CRLF, and characters at which str.splitlines() would split."""
    (diff,) = parse_diff(f"{HEAD}@@ -1,2 +1,2 @@\n a\x0cb\u2028c\r\n-x\r\n+y\r\n", "d.diff")
    assert diff.hunks[0].before == ("a\x0cb\u2028c\r\n", "x\r\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no '--- a/... +++ b/...' header found"),
        (HEAD + HUNK.replace("+2,4", "+2,3"), "d.diff: not a unified diff (Hunk is longer than expected)"),
        (HEAD + HUNK + "\n", "counts 3 and 4 lines, the hunk has 4 and 5"),
        (HEAD + HUNK + "@@ -9 +9 @\n-x\n+y\n", "line 10 ('-x') belongs to no hunk: the '@@' header above"),
        (HEAD + HUNK + "@@ -4 +5 @@\n-three\n+3\n", "hunk 2 of vllm/v1/alpha.py starts at line 4, inside or before"),
        (HEAD + HUNK.removesuffix("\n"), "the last line has no newline"),
        (HEAD + HUNK.replace("class A:", "0.24"), "hunk 1 of a/vllm/v1/alpha.py: '0.24' behind its '@@' is no range"),
        (HEAD + "@@ -5,0 +6 @@\n+x\n", "no context to match"),
        (HEAD + "@@ -1 +1 @@\n x\n", "changes nothing"),
        (HEAD + "@@ -1,2 +1,2 @@\n-x\n\\ No newline at end of file\n a\n+x\n", "a line before its last has no newline"),
        (HEAD + "@@ -1 +1 @@\n\\ No newline at end of file\n-x\n+y\n", "starts with '\\ No newline"),
        (HEAD.replace("/vllm/", "/vllm/../torch/") + HUNK, "expected the same 'vllm/....py' on both sides"),
        (HEAD.replace("b/vllm/v1/alpha", "b/vllm/v1/beta") + HUNK, "'b/vllm/v1/beta.py'; expected the same"),
        ("--- /dev/null\n+++ b/vllm/new.py\n@@ -0,0 +1 @@\n+x\n", "new code goes into vllm_hwplugin"),
        ("diff --git a/vllm/a.py b/vllm/b.py\nsimilarity index 100%\n", "patches edit existing files"),
        (
            "diff --git a/vllm/a.py b/vllm/a.py\nold mode 100644\nnew mode 100755\n",
            "no hunks for vllm/a.py",
        ),
    ],
)
def test_refused(text: str, message: str) -> None:
    """One line that names the diff."""
    with pytest.raises(DiffError, match=re.escape(message)) as caught:
        parse_diff(text, "d.diff")
    assert str(caught.value).startswith("d.diff: ")
    assert "\n" not in str(caught.value)
