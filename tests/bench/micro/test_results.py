"""The results file."""

from __future__ import annotations

import json

import pytest

from vllm_hwplugin.bench.micro import _results


def test_a_file_says_where_it_comes_from_and_can_be_read_again(results, tmp_path):
    made = results("attention", lambda kernel, case: 1e-3)
    (tmp_path / "a.json").write_text(json.dumps(made))
    found = _results.read(tmp_path / "a.json")
    assert found == made
    assert found["host"]["vllm"] == "0.26.0"
    assert found["host"]["driver"] == "580.1"
    assert set(found) >= {"date", "plugin", "commit", "settings", "processes", "cells"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("not json", "no results file of `bench attention` or `bench ops`"),
        ("[]", "results format list"),
        ('{"format": 1}', "results format None, this version reads 1"),
    ],
)
def test_anything_else_is_refused(tmp_path, text, said):
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    with pytest.raises(_results.ResultsError, match=said):
        _results.read(tmp_path / "a.json")
