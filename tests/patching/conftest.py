"""Fixtures with a made-up vLLM (see ``madeup.py``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from .madeup import EDITS, FILES, Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A package ``vllm`` that is not vLLM, and no feature yet."""
    made = Project(tmp_path)
    for path, text in FILES.items():
        made.write(path, text)
    made.patches.mkdir()
    return made


@pytest.fixture
def patched(project: Project) -> Project:
    """The same with one feature that is live in every process that calls ``install()``."""
    project.feature("made-up", EDITS)
    return project
