# SPDX-License-Identifier: Apache-2.0
"""A trial on a stand-in of a backend."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from vllm_hwplugin_lab.probe import Plain, trials  # noqa: E402
from vllm_hwplugin_lab.probe._refusals import Refused, refusals  # noqa: E402
from vllm_hwplugin_lab.probe._trial import try_out  # noqa: E402
from vllm_hwplugin_lab.probe.reference import Measure  # noqa: E402

TRIALS = {one.key: one for one in trials()}


class Host:
    plain = Plain("bfloat16", 64, 16)

    def __init__(self, *answers, broken=False):
        self.answers, self.broken = list(answers), broken

    def declared(self, trial, case):
        return "no"

    def run(self, case):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Measure(answer, 0.1 * answer, 0.1, 2)

    def check(self):
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def tried(*answers, trial=("sinks", "yes"), **options):
    """What is found, and the number of the case that it tells of."""
    began = []
    found = try_out(
        Host(*answers, **options),
        TRIALS[trial],
        seed=1,
        count=len(answers),
        factor=2.0,
        on_case=lambda case, declared: began.append(str(case)),
    )
    assert len(began) == len(answers) == found["cases"]
    assert found["declared"] == "no"
    return found, began.index(found["shape"])


@pytest.mark.parametrize(
    ("answers", "behaviour", "worst", "ratio"),
    [
        ((0.9, 1.8, 1.1), "works", 1, 1.8),
        ((0.9, 2.1, 3.0, 1.0), "wrong", 2, 3.0),
        ((0.9, math.inf), "wrong", 1, None),
        ((1.0, Refused("no"), 1.0), "refuses", 1, 1.0),
        ((Refused("no"), 9.0), "wrong", 1, 9.0),
        ((TypeError("no"), 9.0, Refused("no")), "error", 0, 9.0),
    ],
)
def test_the_worst_case_counts_and_its_shape_is_told(answers, behaviour, worst, ratio):
    found, told = tried(*answers)
    assert (found["behaviour"], told, found["ratio"]) == (behaviour, worst, ratio)


def test_float32_gets_twice_the_factor():
    assert tried(3.9, trial=("dtype", "float32"))[0]["behaviour"] == "works"
    assert tried(3.9)[0]["behaviour"] == "wrong"


@pytest.mark.parametrize("error", [Refused("no"), RuntimeError("something failed")])
def test_a_broken_device_ends_the_process_and_is_no_refusal(error):
    with pytest.raises(RuntimeError, match="illegal memory"):
        tried(error, broken=True)


@pytest.mark.parametrize("kind", [NotImplementedError, ValueError, AssertionError, RuntimeError, "triton"])
def test_what_a_backend_says_no_with(kind):
    if kind == "triton":
        kind = type("CompilationError", (Exception,), {"__module__": "triton.compiler.errors"})
    with pytest.raises(Refused, match=f"{kind.__name__}: because of that"), refusals():
        raise kind("because\n  of that")


@pytest.mark.parametrize("kind", [TypeError, KeyError, AttributeError, ImportError, torch.OutOfMemoryError])
def test_what_is_no_refusal_stays_what_it_is(kind):
    with pytest.raises(kind) as raised, refusals():
        raise kind("because")
    assert type(raised.value) is kind
