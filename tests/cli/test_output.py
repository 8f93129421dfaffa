"""Files that commands write for their user, as a shell would make them."""

from __future__ import annotations

import os
import stat

import pytest

from vllm_hwplugin.cli.output import write_json


@pytest.fixture
def mask():
    before = os.umask(0o027)
    yield
    assert os.umask(before) == 0o027


@pytest.mark.usefixtures("mask")
def test_results_can_be_read_by_whom_the_user_lets(tmp_path):
    file = tmp_path / "results.json"
    write_json({"a": 1}, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    file.chmod(0o604)
    write_json({"a": 2}, file)
    assert (stat.S_IMODE(file.stat().st_mode), file.read_text()) == (0o604, '{\n "a": 2\n}\n')
