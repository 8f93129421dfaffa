"""Versions of a made-up vLLM, and diffs between texts as git writes them."""

from __future__ import annotations

import difflib
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_hwplugin.patching.texts import split_lines
from vllm_hwplugin_workshop.authoring import blob_name

PATH = "vllm/v1/alpha.py"


@dataclass
class Memory:
    """A version that is only a mapping of paths to texts."""

    version: str
    files: Mapping[str, str]
    label: str = "made up"

    def read(self, path: str) -> str | None:
        return self.files.get(path)


def git_diff(before: str, after: str, path: str = PATH, *, named: bool = True, context: int = 3) -> bytes:
    """What `git diff` would write of a file; without git's names of the texts where not `named`."""
    names = f"index {blob_name(before)[:10]}..{blob_name(after)[:10]} 100644\n" if named else ""
    lines = difflib.unified_diff(split_lines(before), split_lines(after), f"a/{path}", f"b/{path}", n=context)
    body = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return f"diff --git a/{path} b/{path}\n{names}{body}".encode()


class Repository:
    """A real git repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "-q", ".")

    def git(self, *arguments: str) -> bytes:
        own = ("-c", "user.name=Jörg", "-c", "user.email=j@example.org", "-c", "core.autocrlf=false")
        done = subprocess.run(["git", *own, *arguments], cwd=self.folder, capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def commit(self, message: str, files: Mapping[str, bytes | None]) -> None:
        """Write these files (None: remove), and commit all there is."""
        for path, data in files.items():
            target = self.folder / path
            if data is None:
                target.unlink()
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)
