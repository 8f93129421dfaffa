"""The operations that stand under vLLM's names by default are those that the results files show to gain."""

from __future__ import annotations

import pytest

from benchmarks.pages import RESULTS, read_all, verdicts
from vllm_hwplugin.ops.override_table import OPS
from vllm_hwplugin.versions import SUPPORTED, Versions

FILES = read_all(RESULTS, "kernels-ops-")
SAID = [one for file in FILES for one in verdicts(file.results).values()]


@pytest.mark.parametrize("name", OPS)
def test_an_operation_is_on_by_default_where_every_file_shows_a_gain(name):
    gains = {(one.device, one.vllm) for one in SAID if (one.op, one.verdict) == (name, "gain")}
    losses = {(one.device, one.vllm) for one in SAID if (one.op, one.verdict) == (name, "loss")}
    default = {
        (gain.device, version)
        for gain in OPS[name].default_on
        for version in SUPPORTED
        if Versions(gain.vllm).covers(version)
    }
    assert default == (set() if OPS[name].not_default else gains - losses)


def test_one_is_kept_off_though_it_gains():
    assert [op.name for op in OPS.values() if op.not_default] == ["rotary_embedding"]
