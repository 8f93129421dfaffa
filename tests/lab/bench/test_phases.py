"""The host's time by phase, on classes that lie where vLLM's do; a real engine is looked at in tests/e2e."""

from __future__ import annotations

import pytest

from vllm_hwplugin_lab.bench._phases import Phases
from vllm_hwplugin_lab.bench.table import Phase, phases_of


def test_a_rare_step_does_not_move_the_figures():
    phases = Phases()
    for number in range(9):
        rare = {("step", "prompt"): [0.5]} if number == 0 else {}
        phases.add_step({("step",): [0.6 if rare else 0.002], ("step", "sample"): [0.0005, 0.0005], **rare})
    rows = {one.path[-1]: one for one in phases_of(phases.rows())}
    assert rows["step"].us == pytest.approx(2000)
    assert rows["step"].own == pytest.approx(1000 - 0.5e6 / 9)
    assert rows["sample"] == Phase(("step", "sample"), 2.0, pytest.approx(1000), pytest.approx(1000))
    # What is in one step of nine takes a ninth of its time in each.
    assert (rows["prompt"].calls, rows["prompt"].us) == pytest.approx((1 / 9, 0.5e6 / 9))
