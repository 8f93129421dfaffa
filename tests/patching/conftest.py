"""Fixtures with a made-up vLLM (see ``madeup.py``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from .madeup import EDITS, Project, make_project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path)


@pytest.fixture
def patched(project: Project) -> Project:
    """The same with one feature that is live in every process that calls ``install()``."""
    project.feature("made-up", EDITS)
    return project
